"""Llama whose gates are rectified, as ProSparse and TurboSparse are trained: most of them are exactly zero. And what is built like
Llama but for a little: AFM, which has no gates, ERNIE 4.5, which turns neighbours, and Seed-OSS, which has biases."""

import gguf
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
