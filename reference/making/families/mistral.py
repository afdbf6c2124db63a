"""Mistral with its window, and Ministral 3."""

import gguf
from transformers import Ministral3Config, MistralConfig

from .fixture import SMALL, Fixture, permuted


def mistral_window() -> Fixture:
    """Every layer windowed. No GGUF: llama.cpp's converter drops the window."""
    config = MistralConfig(
        **SMALL, architectures=["MistralForCausalLM"], hidden_size=32, intermediate_size=24, num_hidden_layers=2,
        sliding_window=8, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )

    def old_spelling(config):
        del config["head_dim"]
        return config | {"rope_theta": config.pop("rope_parameters")["rope_theta"]}

    return Fixture("mistral-window", config, 107, old_spelling=old_spelling)


def ministral3() -> Fixture:
    """Queries that grow with every 16 positions; a YaRN whose two scales cancel."""
    config = Ministral3Config(
        **SMALL, architectures=["Ministral3ForCausalLM"], hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        head_dim=8, tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16,
            "max_position_embeddings": 512, "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.0,
            "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
        },
    )

    def parameters(writer, config):
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_rope_scaling_yarn_log_mul(config["rope_parameters"]["mscale_all_dim"])
        writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])

    return Fixture("ministral3", config, 108, gguf.MODEL_ARCH.MISTRAL3, parameters, permuted(4, 2))
