"""Tiny quantized qwen3 models and their logits from the dequantized weights.

`gguf` quantizes and dequantizes the older types; for the K types, which it only dequantizes,
blocks are drawn directly and its dequantization says what they mean.
"""

import json
import pathlib

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from . import blocks, models

Type = gguf.GGMLQuantizationType
OLDER = blocks.OLDER
FILE_TYPES = {
    Type.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    Type.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
    Type.Q4_1: gguf.LlamaFileType.MOSTLY_Q4_1,
    Type.Q5_0: gguf.LlamaFileType.MOSTLY_Q5_0,
    Type.Q5_1: gguf.LlamaFileType.MOSTLY_Q5_1,
    Type.Q4_K: gguf.LlamaFileType.MOSTLY_Q4_K_M,
    Type.Q2_K: gguf.LlamaFileType.MOSTLY_Q2_K,
    Type.IQ2_XXS: gguf.LlamaFileType.MOSTLY_IQ2_XXS,
    Type.IQ4_XS: gguf.LlamaFileType.MOSTLY_IQ4_XS,
}
# Files that mix types, as such files do: what is not the type they are called after, and where rows are
# too short for it.
MIXTURES = {
    Type.Q4_K: ("Q4_K_M", Type.Q4_0, {
        "embed_tokens": Type.Q6_K, "v_proj": Type.Q6_K, "k_proj": Type.Q5_K, "up_proj": Type.Q5_K,
    }),
    Type.Q2_K: ("dynamic-Q2_K", Type.IQ4_NL, {
        "embed_tokens": Type.IQ4_XS, "q_proj": Type.IQ3_S, "k_proj": Type.IQ2_S, "v_proj": Type.Q3_K,
        "up_proj": Type.IQ3_XXS,
    }),
    Type.IQ2_XXS: ("dynamic-IQ2_XXS", Type.MXFP4, {
        "embed_tokens": Type.Q3_K, "q_proj": Type.IQ2_XS, "k_proj": Type.TQ1_0, "v_proj": Type.TQ2_0,
    }),
    Type.IQ4_XS: ("dynamic-tables", Type.MXFP4, {
        "q_proj": Type.IQ4_NL, "v_proj": Type.MXFP4, "gate_proj": Type.IQ4_NL, "up_proj": Type.MXFP4,
    }),
}  # fmt: skip


def tiny(kind: Type, seed: int) -> models.Model:
    """Rows of 32 and 64 for the types with blocks of 32; of 256 for mixtures."""
    wide = kind in MIXTURES
    return models.Model(
        MIXTURES[kind][0] if wide else kind.name, "qwen3", heads=4 if wide else 2, kv_heads=1, head_dim=8 if wide else 16, layers=1,
        tied=True, theta=1e4, vocabulary=models.QWEN, hf_type=torch.float32, gguf_type=kind,
        tokens=12, seed=seed, hidden=256 if wide else 32, ffn=32 if wide else 64,
        vocab=16 if wide else 32, on_grid=False,
    )  # fmt: skip


# --- models ----------------------------------------------------------------------------------


def quantized(random, name: str, values: np.ndarray, kind: Type) -> tuple[np.ndarray, Type]:
    """A tensor in the type, or in that of the mixture; vectors are F32."""
    if values.ndim == 1:
        return values, Type.F32
    if kind in MIXTURES:
        _, short, mixed = MIXTURES[kind]
        kind = next((other for part, other in mixed.items() if part in name), kind)
        kind = kind if values.shape[1] % 256 == 0 else short
    if kind in OLDER:
        return gguf.quants.quantize(values, kind), kind
    count = values.size // gguf.GGML_QUANT_SIZES[kind][0]
    return blocks.draw(random, kind, count).reshape(values.shape[0], -1), kind


def make_model(folder: pathlib.Path, kind: Type, seed: int) -> tuple[str, dict]:
    model = tiny(kind, seed)
    random = np.random.default_rng(seed + 100)
    data = {name: quantized(random, name, values, kind) for name, values in models.draw(model).items()}
    writer = gguf.GGUFWriter(folder / f"{model.name}.gguf", "qwen3")
    add_metadata(writer, model, kind)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 1)
    for name, (values, stored_as) in data.items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values, raw_dtype=stored_as)
    models.close(writer)
    weights = {name: gguf.quants.dequantize(values, stored_as) for name, (values, stored_as) in data.items()}
    return model.name, expected(folder, model, weights)


def add_metadata(writer: gguf.GGUFWriter, model: models.Model, kind: Type) -> None:
    """Hyperparameters, and a stub vocabulary: letters, far from all bytes."""
    writer.add_type("model")
    writer.add_name(f"Tiny random {model.name}")
    writer.add_block_count(model.layers)
    writer.add_context_length(512)
    writer.add_embedding_length(model.hidden)
    writer.add_feed_forward_length(model.ffn)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_rope_freq_base(model.theta)
    writer.add_layer_norm_rms_eps(model.eps)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    tokens = [chr(ord("A") + index) for index in range(model.vocab - 2)] + ["AB", "<|im_end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (model.vocab - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["A B"])
    writer.add_eos_token_id(model.vocab - 1)
    writer.add_add_bos_token(False)


def expected(folder: pathlib.Path, model: models.Model, weights: dict[str, np.ndarray]) -> dict:
    settings = models.config(model) | {"eos_token_id": model.vocab - 1}
    built = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**settings), attn_implementation="eager", dtype=torch.float32
    )
    state = {name: torch.from_numpy(np.array(values)) for name, values in weights.items()}
    missing, unexpected = built.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    built.tie_weights()
    tokens = [int(token) for token in np.random.default_rng(model.seed).integers(0, model.vocab, model.tokens)]
    rows = [0, 5, model.tokens - 1]
    models.logits(built.eval().double(), tokens)[rows].astype("<f4").tofile(folder / f"{model.name}.f32")
    return {"vocab": model.vocab, "tokens": tokens, "rows": rows}


def make(out: pathlib.Path) -> None:
    folder = out / "qwen3-types"
    folder.mkdir(parents=True, exist_ok=True)
    about = dict(make_model(folder, kind, seed) for seed, kind in enumerate([*OLDER, *MIXTURES], 20))
    (folder / "expected.json").write_text(json.dumps(about) + "\n")
    blocks.make(folder)
