"""Asks Lacuna and llama.cpp the same of one GGUF file: how well it predicts a text, and what it
writes after some prompts. `setup` beside it installs llama.cpp.

    bench/peers/environment/bin/python bench/peers/agreement.py m.gguf models/demo/heldout.txt

llama.cpp answers by both of its attention paths, plain and flash: they round differently, and what
they differ by from each other is no fault of anyone. A window begins with the token that the
vocabulary begins texts with, if any, and that is not scored.
"""

import argparse
import ctypes
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy
from llama_cpp import llama_cpp as llama

HERE = Path(__file__).resolve().parent
PATHS = {"plain": 0, "flash": 1}
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "The three most important inventions of the nineteenth century were",
]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("text", help="a text file in UTF-8")
    parser.add_argument("--lacuna", default=str(HERE.parents[1] / "target/release/lacuna"))
    parser.add_argument("--ctx", type=int, default=512, help="tokens of a window, 512 at most")
    parser.add_argument("--generate", type=int, default=64, help="tokens after each prompt")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


class Model:
    def __init__(self, args):
        llama.llama_backend_init()
        self.log = []
        keep = lambda level, text, data: self.log.append(text.decode(errors="replace"))
        self.callback = llama.llama_log_callback(keep)
        llama.llama_log_set(self.callback, ctypes.c_void_p(0))
        parameters = llama.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = llama.llama_model_load_from_file(args.model.encode(), parameters)
        assert self.model, f"llama.cpp cannot load {args.model}"
        self.vocabulary = llama.llama_model_get_vocab(self.model)
        self.size = llama.llama_vocab_n_tokens(self.vocabulary)

    def context(self, args, path, tokens, sequences=1):
        """With f16 KV and passes of 512 tokens."""
        context = llama.llama_context_default_params()
        context.n_ctx = tokens * sequences
        context.n_batch = context.n_ubatch = 512
        context.n_seq_max = sequences
        context.n_threads = context.n_threads_batch = args.threads
        context.flash_attn_type = PATHS[path]
        # A window's rows and no others, as its programs have it by default.
        context.swa_full = False
        made = llama.llama_init_from_model(self.model, context)
        assert made, "llama.cpp refuses these settings"
        return made

    def kv_log(self, args, tokens, sequences):
        """What llama.cpp says of the KV it reserves."""
        self.log.clear()
        llama.llama_free(self.context(args, "plain", tokens, sequences))
        lines = "".join(self.log).splitlines()
        return [line for line in lines if "kv_cache" in line and "layers" in line]


class LlamaCpp:
    """Logits of every token, by one of its paths."""

    def __init__(self, model, args, path):
        self.vocabulary, self.size = model.vocabulary, model.size
        self.context = model.context(args, path, max(args.ctx, 512))
        self.batch = llama.llama_batch_init(max(args.ctx, 512), 0, 1)

    def tokens(self, text, special):
        encoded = text.encode()
        ids = (llama.llama_token * (len(encoded) + 8))()
        count = llama.llama_tokenize(self.vocabulary, encoded, len(encoded), ids, len(ids), special, False)
        assert count >= 0
        return list(ids[:count])

    def clear(self):
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def logits(self, tokens, start=0):
        """A row of logits for each of `tokens`, which follow `start` others."""
        self.batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            self.batch.token[index] = token
            self.batch.pos[index] = start + index
            self.batch.n_seq_id[index] = 1
            self.batch.seq_id[index][0] = 0
            self.batch.logits[index] = True
        code = llama.llama_decode(self.context, self.batch)
        assert code == 0, f"llama_decode returned {code}"
        rows = llama.llama_get_logits(self.context)
        return numpy.ctypeslib.as_array(rows, shape=(len(tokens), self.size))

    def perplexity(self, windows):
        nats, scored = 0.0, 0
        for window in windows:
            self.clear()
            rows = self.logits(window)
            for row, token in zip(rows, window[1:]):
                row = row.astype(numpy.float64)
                highest = row.max()
                nats += math.log(numpy.exp(row - highest).sum()) - (row[token] - highest)
                scored += 1
        return math.exp(nats / scored), scored

    def greedy(self, prompt, count):
        self.clear()
        tokens, found = list(prompt), []
        row = self.logits(tokens)[-1]
        while len(found) < count:
            found.append(int(row.argmax()))
            if llama.llama_vocab_is_eog(self.vocabulary, found[-1]):
                break
            row = self.logits(found[-1:], len(prompt) + len(found) - 1)[-1]
        return found


def lacuna(args, *command):
    result = subprocess.run([args.lacuna, *command], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
    return json.loads(result.stdout)


def same(left, right):
    """Tokens until two lists part."""
    pairs = enumerate(zip(left, right))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def compare_perplexity(args, engines):
    text = Path(args.text).read_text()
    engine = engines["plain"]
    first = engine.tokens("", True)[:1]
    tokens = engine.tokens(text, False)
    room = args.ctx - len(first)
    windows = [first + tokens[start:start + room] for start in range(0, len(tokens), room)]
    windows = [window for window in windows if len(window) > 1]
    ours = lacuna(args, "perplexity", args.model, args.text, "--ctx", str(args.ctx), "--kv-type", "f16",
                  "--threads", str(args.threads), "--json")
    print(f"{args.text}: {ours['tokens']} tokens scored in {ours['windows']} windows of {args.ctx}")
    print(f"  {'Lacuna':<24}{ours['perplexity']:10.4f}")
    for name, engine in engines.items():
        perplexity, scored = engine.perplexity(windows)
        assert scored == ours["tokens"], "the same tokens"
        print(f"  {'llama.cpp, ' + name:<24}{perplexity:10.4f}   {ours['perplexity'] / perplexity - 1:+.3%}")


def compare_greedy(args, engines):
    print(f"greedy text of {args.generate} tokens: those that are the same as llama.cpp's plain path")
    for prompt in PROMPTS:
        ids = engines["plain"].tokens(prompt, True)
        theirs = {name: engine.greedy(ids, args.generate) for name, engine in engines.items()}
        ours = lacuna(args, "run", args.model, "--raw", "-p", prompt, "-n", str(args.generate), "--temp", "0",
                      "--kv-type", "f16", "--threads", str(args.threads), "--json")["tokens"]
        apart = same(theirs["plain"], theirs["flash"])
        print(f"  flash {apart:3}, Lacuna {max(same(ours, other) for other in theirs.values()):3} "
              f"of {len(theirs['plain']):3}: {prompt!r}")


def main():
    args = arguments()
    model = Model(args)
    engines = {name: LlamaCpp(model, args, name) for name in PATHS}
    compare_perplexity(args, engines)
    compare_greedy(args, engines)
    for sequences in (1, 16):
        print(f"llama.cpp's KV for {sequences} x 32,768 tokens, by its log")
        print("\n".join("  " + line for line in model.kv_log(args, 32_768, sequences)))


main()
