"""SmolLM3: no rotation in every fourth layer."""

import gguf
from transformers import SmolLM3Config

from .fixture import SMALL, Fixture, permuted


def smollm3() -> Fixture:
    """Eight layers, because which ones do not rotate is not in GGUF."""
    config = SmolLM3Config(
        **SMALL, architectures=["SmolLM3ForCausalLM"], hidden_size=8, intermediate_size=12, num_hidden_layers=8,
        head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )

    def parameters(writer, config):
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config["head_dim"])

    def old_spelling(config):
        del config["layer_types"], config["no_rope_layers"]
        return config | {
            "no_rope_layer_interval": 4, "rope_scaling": None,
            "rope_theta": config.pop("rope_parameters")["rope_theta"],
        }

    return Fixture(
        "smollm3", config, 111, gguf.MODEL_ARCH.SMOLLM3, parameters, permuted(4, 2), old_spelling=old_spelling
    )
