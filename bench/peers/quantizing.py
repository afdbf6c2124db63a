"""Quantizes one GGUF file by Lacuna and by llama.cpp, and asks how well what comes of it predicts a text: the
same program scores both files, in the same windows. llama.cpp also loads Lacuna's file and writes a few tokens.
`setup` beside it installs llama.cpp.

    bench/peers/environment/bin/python bench/peers/quantizing.py f16.gguf models/demo/heldout.txt --types q8_0 q4_k_m

Prints a row of a table for each type. Seconds are of processor time, all threads together.
"""

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from llama_cpp import Llama
from llama_cpp import llama_cpp as llama

HERE = Path(__file__).resolve().parent
# `enum llama_ftype`.
NUMBERS = {
    "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13,
    "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18, "iq4_nl": 25, "iq4_xs": 30, "bf16": 32,
}  # fmt: skip


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a GGUF file in F16, BF16 or F32")
    parser.add_argument("text", help="a text file in UTF-8")
    parser.add_argument("--types", nargs="+", choices=NUMBERS, default=["q8_0", "q4_k_m", "iq4_nl"])
    parser.add_argument("--lacuna", default=str(HERE.parents[1] / "target/release/lacuna"))
    parser.add_argument("--ctx", type=int, default=512, help="tokens of a window")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


def by_lacuna(args, name, out):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [args.lacuna, "quantize", args.model, out, "--type", name, "--threads", str(args.threads), "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime, report["seconds"]


def by_llama_cpp(args, name, out):
    parameters = llama.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = NUMBERS[name], args.threads
    before = resource.getrusage(resource.RUSAGE_SELF)
    failed = llama.llama_model_quantize(args.model.encode(), out.encode(), ctypes.byref(parameters))
    assert not failed, f"llama.cpp does not quantize to {name}"
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime - before.ru_utime


def perplexity(args, model):
    command = [args.lacuna, "perplexity", model, args.text, "--ctx", str(args.ctx), "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["perplexity"]


def generates(args, model):
    model = Llama(model, n_ctx=256, n_threads=1, verbose=False)
    return model("The capital of France is", max_tokens=12, temperature=0)["choices"][0]["text"]


def main():
    args = arguments()
    quiet = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    megabytes = os.path.getsize(args.model) / 1e6
    print("| type | MB, Lacuna | MB, llama.cpp | perplexity, Lacuna | perplexity, llama.cpp | ratio | CPU s, Lacuna | CPU s, llama.cpp |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.types:
            ours, theirs = f"{folder}/ours.gguf", f"{folder}/theirs.gguf"
            (seconds, wall), others = by_lacuna(args, name, ours), by_llama_cpp(args, name, theirs)
            sizes = [os.path.getsize(path) / 1e6 for path in (ours, theirs)]
            scores = [perplexity(args, path) for path in (ours, theirs)]
            row = [f"{size:.1f}" for size in sizes] + [f"{score:.3f}" for score in scores]
            row += [f"{scores[0] / scores[1]:.4f}", f"{seconds:.1f}", f"{others:.1f}"]
            print(f"| {name} | {' | '.join(row)} |", flush=True)
            print(f"{name}: {megabytes / wall:.0f} MB/s read; llama.cpp writes {generates(args, ours)!r}", file=sys.stderr, flush=True)
            for path in (ours, theirs):
                os.remove(path)
    print(f"\n{args.model}: {megabytes:.1f} MB, perplexity {perplexity(args, args.model):.3f}")


if __name__ == "__main__":
    main()
