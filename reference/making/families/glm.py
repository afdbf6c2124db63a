"""GLM-4: norms on both sides of each branch, half of each head rotated, gate and up in one matrix."""

import gguf
from transformers import Glm4Config

from .fixture import SMALL, Fixture


def glm4() -> Fixture:
    """Rotation pairs neighbours in both forms, so nothing is permuted."""
    config = Glm4Config(
        **SMALL, architectures=["Glm4ForCausalLM"], hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        head_dim=8, rms_norm_eps=1e-5, attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    )

    def parameters(writer, config):
        part = config["rope_parameters"]["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(part * config["head_dim"]))

    def old_spelling(config):
        rope = config.pop("rope_parameters")
        return config | {
            "rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"],
            "rope_scaling": None,
        }

    return Fixture("glm4", config, 116, gguf.MODEL_ARCH.GLM4, parameters, old_spelling=old_spelling)
