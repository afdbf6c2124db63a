"""Llama whose gates are rectified, as ProSparse and TurboSparse are trained: most of them are exactly zero. And what is built like
Llama but for a little: AFM, which has no gates, ERNIE 4.5, which turns neighbours, Seed-OSS, which has biases, and others under names of their own."""

import gguf
import numpy as np
from transformers import ArceeConfig, Ernie4_5Config, LlamaConfig, MinistralConfig, SeedOssConfig

from .fixture import SMALL, Fixture, permuted

ROPE = {"rope_type": "default", "rope_theta": 100.0}
SIZES = SMALL | {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


def llama_relu() -> Fixture:
    """No GGUF: its keys do not say what gates go through."""
    config = LlamaConfig(
        **SMALL, architectures=["LlamaForCausalLM"], hidden_size=32, intermediate_size=288, num_hidden_layers=2,
        head_dim=8, hidden_act="relu", tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    return Fixture("llama-relu", config, 152)


def arcee() -> Fixture:
    config = ArceeConfig(
        **SIZES, architectures=["ArceeForCausalLM"], head_dim=8,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "beta_fast": 4.0, "beta_slow": 0.5,
        },
    )

    def parameters(writer, config):
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config["head_dim"])

    def old_spelling(config):
        rope = config.pop("rope_parameters")
        return config | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}

    return Fixture(
        "arcee", config, 163, gguf.MODEL_ARCH.ARCEE, parameters, permuted(4, 2), old_spelling=old_spelling,
    )


def ernie4_5() -> Fixture:
    """Rotation pairs neighbours in both forms, so nothing is permuted."""
    config = Ernie4_5Config(**SIZES, architectures=["Ernie4_5ForCausalLM"], head_dim=8, rope_parameters=ROPE)

    def old_spelling(config):
        rope = config.pop("rope_parameters")
        return config | {"rope_theta": rope["rope_theta"], "rope_scaling": None}

    return Fixture("ernie4-5", config, 164, gguf.MODEL_ARCH.ERNIE4_5, old_spelling=old_spelling)


def seed_oss() -> Fixture:
    config = SeedOssConfig(
        **SIZES, architectures=["SeedOssForCausalLM"], head_dim=8, attention_dropout=0.0, residual_dropout=0.0,
        rope_parameters=ROPE,
    )

    def old_spelling(config):
        rope = config.pop("rope_parameters")
        return config | {"rope_theta": rope["rope_theta"], "rope_scaling": {"rope_type": "default"}}

    return Fixture("seed-oss", config, 165, gguf.MODEL_ARCH.SEED_OSS, old_spelling=old_spelling)


def ministral() -> Fixture:
    """Some layers have a window, which the converter drops."""
    config = MinistralConfig(
        **SIZES, architectures=["MinistralForCausalLM"], head_dim=8, sliding_window=8,
        layer_types=["full_attention", "sliding_attention"], rope_parameters=ROPE,
    )
    return Fixture("ministral", config, 166)


# --- Models whose own code is not part of transformers ---------------------------------------

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
EXAONE_NAMES = {
    "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "model.layers": "transformer.h",
    "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn": "attn.attention", "o_proj": "out_proj",
    "mlp.gate_proj": "mlp.c_fc_0", "mlp.up_proj": "mlp.c_fc_1", "mlp.down_proj": "mlp.c_proj",
}


def llama3_factors(rope: dict, dim: int) -> np.ndarray:
    """What frequencies are divided by, as the converter writes it."""
    turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-np.arange(0, dim, 2) / dim) / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def exaone3() -> Fixture:
    """Llama with other names of everything."""
    config = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], rope_parameters=LLAMA3)

    def renamed(tensors):
        made = {}
        for name, values in tensors.items():
            for theirs, own in EXAONE_NAMES.items():
                name = name.replace(theirs, own)
            made[name] = values
        return made

    def described(config):
        rope = config.pop("rope_parameters")
        return config | {
            "architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "activation_function": config.pop("hidden_act"),
            "num_layers": config.pop("num_hidden_layers"), "layer_norm_epsilon": config.pop("rms_norm_eps"),
            "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope,
        }

    def parameters(writer, config):
        writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
        writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])

    return Fixture(
        "exaone3", config, 167, gguf.MODEL_ARCH.EXAONE, parameters, published=(renamed, described),
        extra={"rope_freqs.weight": llama3_factors(LLAMA3, 4)},
    )


def internlm2() -> Fixture:
    """Llama too. Its folders are not read, so there is none."""
    config = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], rope_parameters=ROPE)
    return Fixture("internlm2", config, 168, gguf.MODEL_ARCH.INTERNLM2, convert=permuted(4, 2), in_folder=False)
