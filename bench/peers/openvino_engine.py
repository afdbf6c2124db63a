"""Times OpenVINO GenAI on one GGUF file, which it turns into its own format while loading.

One process measures one combination of settings and prints one JSON object.
"""

import argparse
import json
import statistics

import numpy
import openvino
import openvino_genai


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-type", choices=["f16", "u8"], default="u8")
    return parser.parse_args()


def main():
    args = arguments()
    properties = {"INFERENCE_NUM_THREADS": args.threads}
    if args.kv_type == "f16":
        properties["KV_CACHE_PRECISION"] = openvino.Type.f16
    pipeline = openvino_genai.LLMPipeline(args.model, "CPU", **properties)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = max(2, args.generate)
    config.ignore_eos = True
    config.do_sample = False
    generator = numpy.random.default_rng(0)
    prefill, decode = [], []
    for repeat in range(args.repeats + 1):
        # New tokens every time: it keeps what it computed for a prompt it has seen.
        ids = generator.integers(0, 100_000, (args.sequences, args.prompt), dtype=numpy.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids))
        )
        metrics = pipeline.generate(inputs, config).perf_metrics
        if repeat > 0:
            prefill.append(args.prompt * 1000 / metrics.get_ttft().mean)
            # Of a step of several sequences it counts its share for each token, prompts apart.
            decode.append(1000 / metrics.get_tpot().mean)
    print(json.dumps({
        "prefill_tokens_per_second": statistics.median(prefill),
        "decode_tokens_per_second": statistics.median(decode),
    }))


main()
