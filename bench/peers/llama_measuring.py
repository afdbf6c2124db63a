"""What engines with llama.cpp's C interface are timed by: the same tokens, places and figures for each.

One process measures one combination of settings and prints one JSON object. Tokens are random:
their values do not change the work.
"""

import argparse
import json
import random
import statistics
import time

KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "iq4_nl": 20}
MICRO_BATCH = 512


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-type", choices=KV_TYPES, default="f16")
    parser.add_argument("--no-repack", action="store_true")
    parser.add_argument("--flash-attention", action="store_true")
    return parser.parse_args()


class Engine:
    """One context of an engine. `llama` is the module of its C functions; `model` and `context` are its settings, to which
    what all engines are told in the same words is added. Each engine says how it clears."""

    def __init__(self, llama, args, model, context):
        model.n_gpu_layers = 0
        self.llama = llama
        self.model = llama.llama_model_load_from_file(args.model.encode(), model)
        assert self.model, f"it cannot load {args.model}"
        longest = max(args.prompt, args.depth + args.generate + 1)
        context.n_ctx = (longest + 256) * args.sequences
        context.n_batch = context.n_ubatch = MICRO_BATCH
        context.n_seq_max = args.sequences
        context.n_threads = context.n_threads_batch = args.threads
        context.type_k = context.type_v = KV_TYPES[args.kv_type]
        self.context = llama.llama_init_from_model(self.model, context)
        assert self.context, "it refuses these settings"
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(MICRO_BATCH, 0, 1)
        self.random = random.Random(0)

    def clear(self):
        """Forgets all tokens."""
        raise NotImplementedError

    def wait(self):
        """Returns when the last call is computed."""

    def decode(self, places):
        """One call for tokens at (sequence, position) places; logits of the last one of each."""
        last = {sequence: index for index, (sequence, _) in enumerate(places)}
        batch = self.batch
        batch.n_tokens = len(places)
        for index, (sequence, position) in enumerate(places):
            batch.token[index] = self.random.randrange(self.vocabulary)
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = last[sequence] == index
        code = self.llama.llama_decode(self.context, batch)
        assert code == 0, f"llama_decode returned {code}"
        self.wait()

    def prefill(self, sequence, tokens):
        for start in range(0, tokens, MICRO_BATCH):
            end = min(tokens, start + MICRO_BATCH)
            self.decode([(sequence, position) for position in range(start, end)])

    def step(self, sequences, position):
        self.decode([(sequence, position) for sequence in range(sequences)])


def measure(engine, args):
    engine.prefill(0, min(args.prompt, MICRO_BATCH))
    prefill, decode, whole = [], [], None
    for _ in range(args.repeats if args.prompt else 0):
        engine.clear()
        start = time.perf_counter()
        engine.prefill(0, args.prompt)
        prefill.append(args.prompt / (time.perf_counter() - start))
    if args.generate:
        engine.clear()
        began = time.perf_counter()
        for sequence in range(args.sequences):
            engine.prefill(sequence, args.depth)
        steps = []
        for position in range(args.depth, args.depth + args.generate + 1):
            start = time.perf_counter()
            engine.step(args.sequences, position)
            steps.append(time.perf_counter() - start)
        # The first step warms up what the prompt does not use.
        decode.append(args.sequences / statistics.median(steps[1:]))
        whole = args.sequences * len(steps) / (time.perf_counter() - began)
    print(json.dumps({
        "prefill_tokens_per_second": statistics.median(prefill) if prefill else None,
        "decode_tokens_per_second": statistics.median(decode) if decode else None,
        "generated_tokens_per_second_with_prompts": whole,
    }))
