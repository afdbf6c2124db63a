"""OLMo 2 and 3: norms after each branch, and over the whole width of queries and keys."""

import gguf
from transformers import Olmo2Config, Olmo3Config

from .fixture import SMALL, Fixture


def olmo2() -> Fixture:
    config = Olmo2Config(
        **SMALL, architectures=["Olmo2ForCausalLM"], hidden_size=32, intermediate_size=8, num_hidden_layers=2,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    return Fixture("olmo2", config, 112, gguf.MODEL_ARCH.OLMO2)


def olmo3() -> Fixture:
    """Windowed layers rotate plainly, full ones by YaRN. The factor that YaRN implies is also written out."""
    yarn = {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4.0,
        "beta_slow": 0.5, "attention_factor": 1.2079441541679836,
    }
    config = Olmo3Config(
        **SMALL, architectures=["Olmo3ForCausalLM"], hidden_size=32, intermediate_size=8, num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8,
        rope_parameters={
            "full_attention": {**yarn, "rope_theta": 100.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    )

    def parameters(writer, config):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])

    return Fixture("olmo3", config, 113, gguf.MODEL_ARCH.OLMO2, parameters)
