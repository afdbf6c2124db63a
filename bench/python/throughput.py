"""`generate` on many prompts, beside the same requests to the library in Rust: tokens per second, alternating.

Needs the package in the interpreter that runs it, and cargo. Each line is a round of both, one after the other; the last
has their medians, and that of the rounds' ratios: a machine that changes its pace does so for both of a round.

    python bench/python/throughput.py target/models/smollm2-135m-instruct-q4_1.gguf
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time

import lacuna


def prompt(number: int, length: int, vocabulary: int) -> list[int]:
    """The same as in crates/lacuna/examples/throughput.rs."""
    return [(number * 7919 + index * 104_729) % (vocabulary - 300) + 300 for index in range(length)]


def in_rust(arguments: argparse.Namespace) -> float:
    numbers = [arguments.prompts, arguments.prompt_tokens, arguments.reply_tokens, 1]
    command = ["cargo", "run", "--release", "--locked", "--quiet", "-p", "lacuna", "--example", "throughput", "--"]
    done = subprocess.run([*command, arguments.model, *map(str, numbers)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def in_python(arguments: argparse.Namespace) -> float:
    with lacuna.Engine(arguments.model, prefix_cache=False) as engine:
        vocabulary = engine.tokenizer.vocab_size
        prompts = [prompt(number, arguments.prompt_tokens, vocabulary) for number in range(arguments.prompts)]
        begun = time.perf_counter()
        outputs = engine.generate(prompts, temperature=0, max_tokens=arguments.reply_tokens, ignore_eos=True)
        took = time.perf_counter() - begun
    return sum(len(output.token_ids) for output in outputs) / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--reply-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    in_rust(arguments)
    rounds: list[tuple[float, float]] = []
    for number in range(arguments.rounds):
        # By turns, the first of a round is the other.
        if number % 2 == 0:
            rust, python = in_rust(arguments), in_python(arguments)
        else:
            python, rust = in_python(arguments), in_rust(arguments)
        rounds.append((rust, python))
        print(json.dumps({"rust": round(rounds[-1][0], 1), "python": round(rounds[-1][1], 1)}), flush=True)
    rust, python = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(python / rust for rust, python in rounds)
    print(json.dumps({"rust": round(rust, 1), "python": round(python, 1), "python_of_rust": round(ratio, 3)}))


if __name__ == "__main__":
    main()
