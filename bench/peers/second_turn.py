#!/usr/bin/env python3
"""Times the second turn of a long conversation on one GGUF file: Lacuna's server, and llama.cpp with a
checkpoint of its own taken where its server takes one at best, at the end of the first prompt.

    target/release/lacuna synth qwen3.5-4b --dtype q4_k_m -o m.gguf
    bench/peers/second_turn.py m.gguf --tokens 15000

The first turn is a prompt of so many tokens and a short reply. The second sends the conversation
back with another message, twice: with the reply as it was, and with another reply in its place, which is
what a template that drops earlier reasoning makes of it. Then sessions that begin with the same system
prompt come all at once, to Lacuna alone.
"""

import argparse
import ctypes
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
PORT = 18_094
REPLY_TOKENS = 64
MESSAGE_TOKENS = 40


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--tokens", type=int, default=15_000, help="tokens of the first prompt")
    parser.add_argument("--sessions", type=int, default=16, help="sessions that share a system prompt")
    parser.add_argument("--shared", type=int, default=2_000, help="tokens of that system prompt")
    parser.add_argument("--lacuna", default=str(HERE.parents[1] / "target/release/lacuna"))
    parser.add_argument("--environment", default=str(HERE / "environment"), help="what `setup` made")
    parser.add_argument("--engines", default="lacuna,llama.cpp")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--as-llama", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def random_tokens(seed, count):
    draw = random.Random(seed)
    return [draw.randrange(1000, 100_000) for _ in range(count)]


class Lacuna:
    def __init__(self, args):
        context = args.tokens + 4 * (REPLY_TOKENS + MESSAGE_TOKENS) + 1024
        context = max(context, args.shared + 1024)
        command = [args.lacuna, "serve", args.model, "--port", str(PORT), "--ctx", str(context)]
        self.server = subprocess.Popen([*command, "--threads", str(args.threads)],
                                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=1).read()
                return
            except OSError:
                time.sleep(0.1)
        sys.exit("the server did not start")

    def generate(self, prompt, tokens=REPLY_TOKENS):
        """The reply's tokens, seconds to the first of them, and the request's usage."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "logprobs": 0, "return_tokens_as_token_ids": True,
                "stream": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/completions",
                                         json.dumps(body).encode(), {"Content-Type": "application/json"})
        began, first, reply, usage = time.perf_counter(), None, [], None
        with urllib.request.urlopen(request) as stream:
            for line in stream:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    first = first or time.perf_counter()
                    tokens = (choice["logprobs"] or {}).get("tokens", [])
                    reply += [int(name.removeprefix("token_id:")) for name in tokens]
        return reply, first - began, usage

    def stop(self):
        self.server.terminate()
        self.server.wait()


def report(engine, turn, seconds, computed, prompt, first):
    part = "" if first is None else f", {100 * seconds / first:.2f} % of the first turn's"
    print(f"{engine}: {turn}: first token after {seconds:.2f} s{part}; "
          f"{computed} of {prompt} tokens computed ({100 * computed / prompt:.2f} %)", flush=True)


def lacuna(args):
    engine = Lacuna(args)
    try:
        opening = random_tokens(1, args.tokens)
        engine.generate(random_tokens(0, 64), 1)
        reply, first, usage = engine.generate(opening)
        assert len(reply) == REPLY_TOKENS, reply
        report("lacuna", "first turn", first, usage["prompt_tokens"], usage["prompt_tokens"], None)
        other = random_tokens(9, REPLY_TOKENS)
        for turn, answer in [("second turn", reply), ("second turn, reply changed", other)]:
            _, seconds, usage = engine.generate(opening + answer + random_tokens(2, MESSAGE_TOKENS))
            prompt = usage["prompt_tokens"]
            computed = prompt - usage["prompt_tokens_details"]["cached_tokens"]
            report("lacuna", turn, seconds, computed, prompt, first)
        shared_sessions(args, engine)
    finally:
        engine.stop()


def shared_sessions(args, engine):
    common = random_tokens(3, args.shared)
    ask = lambda seed: engine.generate(common + random_tokens(100 + seed, MESSAGE_TOKENS))
    with ThreadPoolExecutor(args.sessions) as pool:
        usages = [usage for _, _, usage in pool.map(ask, range(args.sessions))]
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    computed = prompts - sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    print(f"lacuna: {args.sessions} sessions at once with {args.shared} tokens in common: "
          f"{computed} of {prompts} tokens computed", flush=True)


def as_llama(args):
    """In a process of its own, with the environment that has llama.cpp."""
    from llama_cpp import llama_cpp as llama

    from llama_cpp_engine import LlamaCpp

    partial_only = 1
    size = args.tokens + 4 * (REPLY_TOKENS + MESSAGE_TOKENS)
    engine = LlamaCpp(argparse.Namespace(
        model=args.model, no_repack=False, prompt=size, depth=0, generate=0, sequences=1,
        threads=args.threads, flash_attention=True, kv_type="f16"))

    def prefill(start, end):
        began = time.perf_counter()
        for at in range(start, end, 512):
            engine.decode([(0, position) for position in range(at, min(end, at + 512))])
        return time.perf_counter() - began

    prefill(0, 64)
    engine.clear()
    end = args.tokens
    first = prefill(0, end)
    report("llama.cpp", "first turn", first, end, end, None)
    context = engine.context
    length = llama.llama_state_seq_get_size_ext(context, 0, partial_only)
    kept = (ctypes.c_uint8 * length)()
    began = time.perf_counter()
    assert llama.llama_state_seq_get_data_ext(context, kept, length, 0, partial_only) == length
    print(f"llama.cpp: checkpoint of {length} bytes in {time.perf_counter() - began:.3f} s", flush=True)
    for position in range(end, end + REPLY_TOKENS):
        engine.decode([(0, position)])
    at = end + REPLY_TOKENS
    seconds = prefill(at, at + MESSAGE_TOKENS)
    report("llama.cpp", "second turn", seconds, MESSAGE_TOKENS, at + MESSAGE_TOKENS, first)
    began = time.perf_counter()
    memory = llama.llama_get_memory(context)
    llama.llama_memory_seq_rm(memory, 0, end, -1)
    assert llama.llama_state_seq_set_data_ext(context, kept, length, 0, partial_only) == length
    llama.llama_memory_seq_rm(memory, 0, end, -1)
    prefill(end, end + REPLY_TOKENS + MESSAGE_TOKENS)
    seconds = time.perf_counter() - began
    computed = REPLY_TOKENS + MESSAGE_TOKENS
    report("llama.cpp", "second turn, reply changed", seconds, computed, end + computed, first)


def main():
    args = arguments()
    if args.as_llama:
        sys.path.insert(0, str(HERE))
        as_llama(args)
        return
    for engine in args.engines.split(","):
        if engine == "lacuna":
            lacuna(args)
        else:
            python = str(Path(args.environment) / "bin/python")
            subprocess.run([python, *sys.argv, "--as-llama"], check=True)


if __name__ == "__main__":
    main()
