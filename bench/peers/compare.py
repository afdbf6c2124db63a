#!/usr/bin/env python3
"""Runs the same model file through Lacuna and other engines, in turn and repeatedly, and prints a
table of medians and ratios. `setup` beside it installs the others.

    bench/peers/setup
    target/release/lacuna synth qwen3-0.6b --dtype q8_0 -o m.gguf
    bench/peers/compare.py m.gguf --rounds 3

A round runs every engine once for every figure, one after another, so that a machine that slows
down slows all of them. Each engine has the settings it is best with: all listed ones are run, and
the ratio is to the best.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Tokens of each prompt where several sequences run.
CHAT_PROMPT = 128
LLAMA_SETTINGS = {
    "llama.cpp": [],
    "llama.cpp, no repack": ["--no-repack"],
    "llama.cpp, flash attention": ["--flash-attention"],
    "llama.cpp, no repack, flash attention": ["--no-repack", "--flash-attention"],
}
IK_SETTINGS = {setting.replace("llama.cpp", "ik_llama.cpp"): flags for setting, flags in LLAMA_SETTINGS.items()}
LACUNA = "Lacuna"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--lacuna", default=str(HERE.parents[1] / "target/release/lacuna"))
    parser.add_argument("--environment", default=str(HERE / "environment"), help="what `setup` made")
    parser.add_argument("--engines", default="llama.cpp,ik_llama.cpp,openvino", help="others to run")
    parser.add_argument("--figures", default="prefill-512,decode-0,decode-4096,batch-8")
    parser.add_argument("--kv-type", default="f16", help="element type of the KV cache, of all but OpenVINO")
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def lacuna_settings():
    """The default, and both precisions where the processor multiplies numbers rounded to bf16."""
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features")))
    precisions = ["f32", "bf16"] if "avx512_bf16" in flags else []
    return {LACUNA: []} | {f"{LACUNA}, --matmul-precision {name}": ["--matmul-precision", name] for name in precisions}


def output(command):
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        missing = "ModuleNotFoundError" in result.stderr
        advice = "\n`bench/peers/setup` installs what is missing; `--engines` leaves engines out." if missing else ""
        sys.exit(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}{advice}")
    return result.stdout


def run(command, args):
    python = [str(Path(args.environment) / "bin/python"), str(HERE / command[0])]
    return json.loads(output(python + command[1:]).strip().splitlines()[-1])


def served(figure, size, flags, args):
    """Through our HTTP server and a client of it. Replies begin one after the other, as prompts are
    computed: they are longer by what it takes until all of them flow."""
    reply = args.generate + (3 * size if figure == "serve" else 0)
    command = [args.lacuna, "bench", "serve", "--model", args.model, "--json", "--threads", str(args.threads)]
    command += flags
    command += ["--kv-type", args.kv_type, "--ctx", str(CHAT_PROMPT * 2 + reply), "--sessions", str(size)]
    command += ["--max-running", str(size), "--rate", "0", "--spread", "0"]
    command += ["--prompt-tokens", str(CHAT_PROMPT), "--reply-tokens", str(reply)]
    # Weights may be random, whose replies repeat themselves as no text does.
    command += ["--speculate", "off"]
    report = json.loads(output(command))
    if figure == "chats":
        return report["generated_tokens_per_second"]
    if not report["steady"]:
        sys.exit("no moment at which all replies flowed: ask for more with --generate")
    return report["steady"]["tokens_per_second"]


def lacuna(figure, size, args):
    return {setting: lacuna_with(figure, size, flags, args) for setting, flags in lacuna_settings().items()}


def lacuna_with(figure, size, flags, args):
    if figure in ("serve", "chats"):
        return served(figure, size, flags, args)
    command = [args.lacuna, "bench", "speed", args.model, "--json", "--threads", str(args.threads)]
    command += flags
    command += ["--kv-type", args.kv_type, "--repeats", "3"]
    command += {
        "prefill": ["-p", str(size), "-n", "0"],
        "decode": ["-p", "0", "-n", str(args.generate), "--depth", str(size)],
        "batch": ["-p", "0", "-n", str(args.generate), "--depth", str(CHAT_PROMPT), "--batch", str(size)],
    }[figure]
    report = json.loads(output(command))
    return (report["prefill"] or report["decode"])[0]["tokens_per_second"]


def llama_cpp(figure, size, args):
    return like_llama_cpp("llama_cpp_engine.py", LLAMA_SETTINGS, figure, size, args)


def ik_llama_cpp(figure, size, args):
    return like_llama_cpp("ik_llama_cpp_engine.py", IK_SETTINGS, figure, size, args)


def like_llama_cpp(engine, settings, figure, size, args):
    common = [engine, args.model, "--threads", str(args.threads)]
    common += ["--kv-type", args.kv_type]
    common += {
        "prefill": ["--prompt", str(size), "--generate", "0"],
        "decode": ["--prompt", "0", "--depth", str(size), "--generate", str(args.generate)],
    }.get(figure, ["--prompt", "0", "--depth", str(CHAT_PROMPT), "--sequences", str(size),
                   "--generate", str(args.generate)])
    name = {
        "prefill": "prefill_tokens_per_second",
        "chats": "generated_tokens_per_second_with_prompts",
    }.get(figure, "decode_tokens_per_second")
    # They take quantized values with flash attention only.
    needed = {"--flash-attention"} if args.kv_type.startswith(("q", "iq")) else set()
    settings = {setting: flags for setting, flags in settings.items() if needed <= set(flags)}
    return {setting: run(common + flags, args)[name] for setting, flags in settings.items()}


def openvino(figure, size, args):
    """It computes every prompt, so an empty context is one of sixteen tokens."""
    if figure in ("serve", "chats"):
        return {}
    prompt, generate, sequences = {
        "prefill": (size, 2, 1),
        "decode": (max(size, 16), args.generate, 1),
        "batch": (CHAT_PROMPT, args.generate, size),
    }[figure]
    command = ["openvino_engine.py", args.model, "--threads", str(args.threads)]
    command += ["--prompt", str(prompt), "--generate", str(generate), "--sequences", str(sequences)]
    command += ["--repeats", "1" if prompt > 1024 else "3"]
    name = "prefill_tokens_per_second" if figure == "prefill" else "decode_tokens_per_second"
    return {"OpenVINO GenAI": run(command, args)[name]}


ENGINES = {"llama.cpp": llama_cpp, "ik_llama.cpp": ik_llama_cpp, "openvino": openvino}


def measure(args):
    """{figure: {engine and setting: [tokens per second of each round]}}"""
    figures = {name: {} for name in args.figures.split(",")}
    engines = [lacuna] + [ENGINES[name] for name in args.engines.split(",") if name]
    for round_number in range(args.rounds):
        for name, found in figures.items():
            figure, size = name.rsplit("-", 1)
            for engine in engines:
                print(f"round {round_number + 1}: {name}, {engine.__name__}", file=sys.stderr)
                for setting, speed in engine(figure, int(size), args).items():
                    found.setdefault(setting, []).append(speed)
    return figures


def machine():
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    name = names[0].split(":", 1)[1].strip() if names else platform.machine()
    return f"{name}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, {date.today()}"


def report(figures, args):
    rows = []
    for name, found in figures.items():
        medians = {setting: statistics.median(speeds) for setting, speeds in found.items()}
        ours = {setting: speed for setting, speed in medians.items() if setting.startswith(LACUNA)}
        others = {setting: speed for setting, speed in medians.items() if setting not in ours}
        best = max(others, key=others.get) if others else None
        ratios = {setting: speed / others[best] for setting, speed in ours.items()} if best else {}
        rows.append({"figure": name, "tokens_per_second": medians, "best_other": best, "ratios": ratios})
    return {"machine": machine(), "model": Path(args.model).name, "threads": args.threads,
            "kv_type": args.kv_type, "rounds": args.rounds, "rows": rows}


def print_table(result):
    print(f"{result['machine']}\n{result['model']}, {result['threads']} threads, "
          f"{result['kv_type']} KV, medians of {result['rounds']} rounds, tokens per second\n")
    for row in result["rows"]:
        print(row["figure"])
        for setting, speed in sorted(row["tokens_per_second"].items(), key=lambda item: -item[1]):
            print(f"  {setting:<60}{speed:9.1f}")
        for setting, ratio in row["ratios"].items():
            print(f"  {setting + ', over the best other':<60}{ratio:9.2f}x")


def main():
    args = arguments()
    result = report(measure(args), args)
    print(json.dumps(result)) if args.json else print_table(result)


main()
