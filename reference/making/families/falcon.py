"""Falcon-H1: attention and Mamba-2 side by side, and multipliers that the converter folds into weights."""

import gguf
import numpy as np
from transformers import FalconH1Config

from .fixture import SMALL, Fixture, Tensors
from .mamba import CENTERS, GROUPS, HEAD_DIM, HEADS, STATE, TAPS, of_state, state_tensor

INNER = HEADS * HEAD_DIM
# All of them fractions of powers of two, so that folding them in is exact.
MULTIPLIERS = {
    "embedding_multiplier": 1.5, "lm_head_multiplier": 0.75, "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.875, "key_multiplier": 0.625, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.75,
    "mlp_multipliers": [1.5, 0.875], "ssm_multipliers": [0.75, 1.25, 0.5, 1.5, 0.875],
}


def parameters(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    of_state(writer)


def folded(name: str, values: np.ndarray) -> np.ndarray:
    """The weights of a product, times what the product is multiplied by."""
    of = MULTIPLIERS
    gate, down = of["mlp_multipliers"]
    factors = {
        "down_proj": down, "gate_proj": gate, "k_proj": of["key_multiplier"] * of["attention_in_multiplier"],
        "q_proj": of["attention_in_multiplier"], "v_proj": of["attention_in_multiplier"],
        "o_proj": of["attention_out_multiplier"], "out_proj": of["ssm_out_multiplier"],
        "lm_head": of["lm_head_multiplier"], "embed_tokens": of["embedding_multiplier"],
    }
    if "mamba.in_proj" in name:
        rows = np.repeat(of["ssm_multipliers"], [INNER, INNER, GROUPS * STATE, GROUPS * STATE, HEADS])
        return (values * of["ssm_in_multiplier"] * rows[:, None]).astype(np.float32)
    return (values * factors.get(name.split(".")[-2], 1.0)).astype(np.float32)


def convert(tensors: Tensors) -> Tensors:
    made: Tensors = {}
    for name, values in tensors.items():
        values = folded(name, values)
        _, _, part = name.partition(".mamba.")
        layer = name.split("layers.")[-1].split(".")[0]
        if part:
            part, values = state_tensor(part, values)
            made[f"blk.{layer}.{part}"] = values.astype(np.float32)
        elif name.endswith("pre_ff_layernorm.weight"):
            made[f"blk.{layer}.ffn_norm"] = values  # that has no ending in the converter's files
        else:
            made[name.replace("feed_forward.", "mlp.")] = values
    return made


def described(name: str, seed: int, architecture: gguf.MODEL_ARCH | None, **settings) -> Fixture:
    config = FalconH1Config(
        **SMALL, **MULTIPLIERS, architectures=["FalconH1ForCausalLM"], hidden_size=32, num_hidden_layers=2, head_dim=8,
        intermediate_size=20, mamba_d_ssm=INNER, mamba_n_heads=HEADS, mamba_d_head=HEAD_DIM, mamba_n_groups=GROUPS,
        mamba_d_state=STATE, mamba_d_conv=TAPS, mamba_chunk_size=16, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e11}, **settings,
    )
    return Fixture(name, config, seed, architecture, parameters, convert, says_heads=True, centers=CENTERS, tokens=150)


def falcon_h1() -> Fixture:
    return described("falcon-h1", 191, gguf.MODEL_ARCH.FALCON_H1, mamba_rms_norm=False)


def falcon_h1_norm() -> Fixture:
    return described(
        "falcon-h1-norm", 192, gguf.MODEL_ARCH.FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=False,
    )


def falcon_h1_norm_first() -> Fixture:
    """No GGUF file can say that the norm comes first, nor what time steps are held between."""
    return described(
        "falcon-h1-norm-first", 193, None, mamba_rms_norm=True, mamba_norm_before_gate=True, time_step_limit=(0.4, 0.9),
    )


FIXTURES = [falcon_h1, falcon_h1_norm, falcon_h1_norm_first]
