#!/usr/bin/env python3
"""Texts per second that become embeddings: Lacuna, ONNX Runtime and llama.cpp, in turn, on the same threads.

    bench/peers/embedding.py target/models/all-minilm-l6-v2 --threads 2 --rounds 5

Embeds the same short texts with each, tokens included, and prints medians and the ratio to the best of the others; and
how alike their vectors are. Where the processor multiplies bf16, Lacuna takes turns with itself at `--matmul-precision bf16`. Needs numpy, onnxruntime and tokenizers, and for a model without an ONNX file torch,
transformers and onnx (its weights are exported once, beside the texts in --scratch). llama.cpp runs if llama-cpp-python
and gguf are there, with the weights of a BERT model in F32 and in F16 (files made once, there too), or with the file that
--gguf names. ONNX Runtime pads: it gets texts sorted by length, in batches of each size in
BATCHES, and the best of them counts.
"""

import argparse
import importlib.util
import json
import pathlib
import statistics
import subprocess
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXTS = 1000
BATCHES = (8, 32, 64)


def texts() -> list[str]:
    """Pieces of prose of three to sixteen words."""
    words = (ROOT / "models" / "demo" / "heldout.txt").read_text(encoding="utf-8").split()
    made, at = [], 0
    while len(made) < TEXTS:
        length = 3 + len(made) * 7 % 14
        made.append(" ".join(words[(at + index) % len(words)] for index in range(length)))
        at += length
    return made


class OnnxRuntime:
    name = "onnxruntime"

    def __init__(self, folder: pathlib.Path, scratch: pathlib.Path, threads: int):
        import onnxruntime
        import tokenizers

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        path = exported(folder, scratch)
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.inputs = {one.name for one in self.session.get_inputs()}
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(256)

    def embed(self, texts: list[str], batch: int) -> np.ndarray:
        encoded = [one.ids for one in self.tokenizer.encode_batch(texts)]
        order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
        made = [None] * len(encoded)
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            longest = max(len(encoded[index]) for index in part)
            ids = np.zeros((len(part), longest), dtype=np.int64)
            mask = np.zeros_like(ids)
            for row, index in enumerate(part):
                ids[row, : len(encoded[index])] = encoded[index]
                mask[row, : len(encoded[index])] = 1
            given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            hidden = self.session.run(None, {name: given[name] for name in self.inputs})[0]
            vectors = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            for row, index in enumerate(part):
                made[index] = vectors[row]
        return np.stack(made)

    def seconds(self, texts: list[str]) -> float:
        return min(timed(lambda size=size: self.embed(texts, size)) for size in BATCHES)


def exported(folder: pathlib.Path, scratch: pathlib.Path) -> str:
    """The folder's own ONNX file, or one made of its weights."""
    for own in (folder / "onnx" / "model.onnx", folder / "model.onnx"):
        if own.exists():
            return str(own)
    path = scratch / "model.onnx"
    if not path.exists():
        import torch
        from transformers import AutoModel

        class ByName(torch.nn.Module):
            """The exporter passes inputs by place, and the model's places are others."""

            def __init__(self):
                super().__init__()
                self.model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

            def forward(self, ids, mask, types):
                return self.model(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

        ids = torch.ones((2, 8), dtype=torch.long)
        names = ["input_ids", "attention_mask", "token_type_ids"]
        axes = {name: {0: "batch", 1: "tokens"} for name in [*names, "hidden"]}
        torch.onnx.export(
            ByName(), (ids, ids, ids * 0), path, input_names=names, output_names=["hidden"], dynamic_axes=axes, dynamo=False
        )
    return str(path)


def converted(folder: pathlib.Path, scratch: pathlib.Path, kind: str) -> pathlib.Path:
    """A GGUF file of a BERT model, as llama.cpp's converter makes it: norms, biases and small tables stay F32."""
    path = scratch / f"{folder.name}-{kind}.gguf"
    if path.exists():
        return path
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_type("model")
    writer.add_name(folder.name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if kind == "f32" else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    words = [token if token in special else token[2:] if token.startswith("##") else "▁" + token for token in tokens]
    writer.add_token_list(words)
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if token in special else kinds.NORMAL for token in tokens])
    writer.add_token_type_count(config["type_vocab_size"])
    for add, token in [
        (writer.add_unk_token_id, "[UNK]"), (writer.add_bos_token_id, "[CLS]"), (writer.add_sep_token_id, "[SEP]"),
        (writer.add_eos_token_id, "[SEP]"), (writer.add_pad_token_id, "[PAD]"),
    ]:
        add(vocabulary[token])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, values in load_file(folder / "model.safetensors").items():
        if name.startswith("pooler.") or name.endswith("position_ids"):
            continue
        matrix = values.ndim == 2 and not name.startswith(("embeddings.position", "embeddings.token_type"))
        kept = np.float16 if matrix and kind == "f16" else np.float32
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values.astype(kept))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class LlamaCpp:
    def __init__(self, path: pathlib.Path, threads: int, name: str):
        import llama_cpp

        self.name = name
        self.model = llama_cpp.Llama(
            str(path), embedding=True, n_threads=threads, n_threads_batch=threads, n_ctx=512, n_batch=512, verbose=False
        )

    def embed(self, texts: list[str]) -> np.ndarray:
        return np.array(self.model.embed(texts, normalize=True))

    def seconds(self, texts: list[str]) -> float:
        return timed(lambda: self.embed(texts))


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def lacuna(arguments, path: pathlib.Path, rounds: int, precision: str = "f32") -> dict:
    command = [arguments.lacuna, "bench", "embed", arguments.model, "--input", path, "--json"]
    command += ["--threads", arguments.threads, "--rounds", rounds, "--matmul-precision", precision]
    done = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def alike(arguments, path: pathlib.Path, others: list, precision: str) -> None:
    """The lowest cosine between Lacuna's vectors and each of the others'."""
    command = [str(arguments.lacuna), "embed", str(arguments.model), "--json", "--matmul-precision", precision]
    done = subprocess.run(command, check=True, capture_output=True, text=True, input=path.read_text(encoding="utf-8"))
    ours = np.array([json.loads(line)["embedding"] for line in done.stdout.splitlines()])
    for other in others:
        theirs = other.embed(texts(), 32) if other.name == "onnxruntime" else other.embed(texts())
        print(f"  lowest cosine of {precision} to {other.name}: {(ours * theirs).sum(1).min():.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path, help="a folder of sentence-transformers")
    parser.add_argument("--gguf", type=pathlib.Path, help="the same model for llama.cpp")
    parser.add_argument("--lacuna", type=pathlib.Path, default=ROOT / "target" / "release" / "lacuna")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", type=pathlib.Path, default=ROOT / "target" / "embedding")
    arguments = parser.parse_args()
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    path = arguments.scratch / "texts.txt"
    path.write_text("\n".join(texts()) + "\n", encoding="utf-8")
    others = [OnnxRuntime(arguments.model, arguments.scratch, arguments.threads)]
    if arguments.gguf:
        others.append(LlamaCpp(arguments.gguf, arguments.threads, "llama.cpp"))
    elif importlib.util.find_spec("llama_cpp"):
        for kind in ("f32", "f16"):
            path_of_kind = converted(arguments.model, arguments.scratch, kind)
            others.append(LlamaCpp(path_of_kind, arguments.threads, f"llama.cpp {kind}"))
    precisions = ["f32"]
    if "avx512_bf16" in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        precisions.append("bf16")
    for precision in precisions:
        alike(arguments, path, others, precision)
    rates = {name: [] for name in (*(f"lacuna {precision}" for precision in precisions), *(other.name for other in others))}
    for _ in range(arguments.rounds):
        for precision in precisions:
            rates[f"lacuna {precision}"].append(lacuna(arguments, path, 3, precision)["texts_per_second"])
        for other in others:
            rates[other.name].append(TEXTS / other.seconds(texts()))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    for name, rate in medians.items():
        print(f"  {name:<13} {rate:8.0f} texts/s, by {arguments.threads} threads")
    best = max(medians[other.name] for other in others)
    for precision in precisions:
        print(f"  lacuna {precision} is {medians[f'lacuna {precision}'] / best:.2f} times the best of the others")
    report = lacuna(arguments, path, 10)
    for when in ("early", "late"):
        kept = report[when]
        print(f"  after {kept['texts']:>6} texts: {kept['pss_bytes'] / 2**20:.1f} MiB resident")


main()
