"""EXAONE 4: norms after each branch, heads normed, windows; full layers do not rotate."""

import gguf
from transformers import Exaone4Config

from .fixture import SMALL, Fixture


def exaone4() -> Fixture:
    config = Exaone4Config(
        **SMALL, architectures=["Exaone4ForCausalLM"], hidden_size=16, intermediate_size=12, num_hidden_layers=8,
        head_dim=8, sliding_window=8, sliding_window_pattern=4,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )

    def parameters(writer, config):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])

    def old_spelling(config):
        del config["layer_types"]
        return config | {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None}

    return Fixture("exaone4", config, 131, gguf.MODEL_ARCH.EXAONE4, parameters, old_spelling=old_spelling)
