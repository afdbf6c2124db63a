"""Phi-3 with longrope, a window and partial rotation; Phi-4 with none of them; Phi-2, which is of another kind."""

import gguf
import numpy as np
from transformers import Phi3Config, PhiConfig

from .fixture import SMALL, Fixture

ORIGINAL, LONGEST = 24, 96
SHORT, LONG = [1.0, 1.25, 1.5], [2.0, 3.5, 6.0]


def phi_parameters(writer, config) -> None:
    """No scaling type: that the file has the factors says it."""
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * head_dim))
    writer.add_sliding_window(config["sliding_window"] or 0)
    if rope["rope_type"] == "longrope":
        grown = config["max_position_embeddings"] / config["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(np.sqrt(1 + np.log(grown) / np.log(ORIGINAL)))


def phi3_longrope(name: str, tokens: int, context: int, prompt: int) -> Fixture:
    settings = SMALL | {"max_position_embeddings": LONGEST}
    config = Phi3Config(
        **settings, architectures=["Phi3ForCausalLM"], hidden_size=32, intermediate_size=24, num_hidden_layers=2,
        original_max_position_embeddings=ORIGINAL, sliding_window=8, tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75,
            "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": ORIGINAL,
            "factor": LONGEST / ORIGINAL,
        },
    )
    factors = {
        "rope_factors_long.weight": np.array(LONG, np.float32),
        "rope_factors_short.weight": np.array(SHORT, np.float32),
    }

    def old_spelling(config):
        rope = config.pop("rope_parameters")
        return config | {
            "rope_theta": rope["rope_theta"],
            "partial_rotary_factor": rope["partial_rotary_factor"],
            "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
        }

    return Fixture(
        name, config, 109, gguf.MODEL_ARCH.PHI3, phi_parameters, extra=factors,
        old_spelling=old_spelling, tokens=tokens, context=context, prompt=prompt,
    )


def phi3() -> Fixture:
    """A context longer than the original: the long factors, at every position."""
    return phi3_longrope("phi3", 40, LONGEST, ORIGINAL + 1)


def phi3_short() -> Fixture:
    """The same model with a context that the short factors serve."""
    return phi3_longrope("phi3-short", 22, ORIGINAL, 8)


def phi4() -> Fixture:
    """What the converter writes where there is no window: a window of 0."""
    config = Phi3Config(
        **SMALL, architectures=["Phi3ForCausalLM"], hidden_size=32, intermediate_size=24, num_hidden_layers=1,
        original_max_position_embeddings=512, sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    )
    return Fixture("phi4", config, 110, gguf.MODEL_ARCH.PHI3, phi_parameters)


def phi2() -> Fixture:
    """Logits have a bias."""
    config = PhiConfig(
        **SMALL, architectures=["PhiForCausalLM"], hidden_size=32, intermediate_size=24, num_hidden_layers=2,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    )

    def parameters(writer, config):
        part = config["rope_parameters"]["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(part * config["hidden_size"]) // config["num_attention_heads"])

    def old_spelling(config):
        rope = config.pop("rope_parameters")
        return config | {
            "rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"], "rope_scaling": None,
        }

    return Fixture("phi2", config, 196, gguf.MODEL_ARCH.PHI2, parameters, old_spelling=old_spelling)
