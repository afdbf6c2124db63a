#!/usr/bin/env python3
"""Compare what llama.cpp computes of the families' GGUF files with the reference: that its loader takes our keys and names of
tensors for what we do is seen nowhere else.

    python3 -m venv venv && venv/bin/pip install xllamacpp==2026.10 numpy
    venv/bin/python against_llama_cpp.py [family ...]

A line for each file: by how much log-probabilities of the next token differ at most, over all tokens and the rows of
`logits.f32`; of files that it does not load, why.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import numpy as np

def main() -> None:
    here = pathlib.Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="default: all that have a GGUF file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(f"differs by {difference(here / 'families' / arguments.families[0]):.2e}")
        return
    names = arguments.families or sorted(path.parent.name for path in here.glob("families/*/model.gguf"))
    for name in names:
        # Each in a process of its own: the library ends the process for files that it does not take.
        run = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, timeout=120)
        found = [line for line in run.stdout.splitlines() if line.startswith("differs by ")]
        errors = [line for line in (run.stdout + run.stderr).splitlines() if "rror" in line or "ssert" in line]
        print(f"{name}: {found[0] if found else 'not computed: ' + (errors[0] if errors else 'no reason given')[:160]}", flush=True)


def difference(folder: pathlib.Path) -> float:
    import xllamacpp

    about = json.loads((folder / "expected.json").read_text())
    expected = np.fromfile(folder / "logits.f32", "<f4").reshape(-1, about["vocab"]).astype(np.float64)
    expected -= expected.max(-1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
    server = xllamacpp.Server(parameters(xllamacpp, folder / "model.gguf"))
    worst = 0.0
    for row, wanted in zip(about["rows"], expected):
        if row == 0:
            continue  # a prompt of one token is not taken
        reply = server.handle_completions({
            "prompt": about["tokens"][: row + 1], "n_predict": 1, "n_probs": about["vocab"], "temperature": 0.0, "cache_prompt": False,
        })
        reply = json.loads(reply) if isinstance(reply, str) else reply
        found = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        worst = max(worst, *(abs(token["logprob"] - wanted[token["id"]]) for token in found))
    return worst


def parameters(xllamacpp, path: pathlib.Path):
    made = xllamacpp.CommonParams()
    made.model.path = str(path)
    made.n_ctx, made.n_parallel, made.n_gpu_layers, made.warmup = 256, 1, 0, False
    made.cpuparams.n_threads = 2
    made.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    made.cache_type_k = made.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return made


if __name__ == "__main__":
    main()
