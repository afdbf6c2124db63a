"""GLM-4: half of each head rotated, gate and up in one matrix; of 2025, norms on both sides of each branch."""

import gguf
import numpy as np
from transformers import Glm4Config, GlmConfig

from .fixture import SMALL, Fixture, Tensors


def with_fused_heads(tensors: Tensors) -> Tensors:
    """Queries, keys and values in one matrix and one bias, as the folders of before `transformers` knew the family have them."""
    made: Tensors = {}
    for name, values in tensors.items():
        if "q_proj" in name:
            layer, suffix = name.split(".")[2], name.rsplit(".", 1)[1]
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            made[f"blk.{layer}.attn_qkv.{suffix}"] = np.concatenate(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            made[name] = values
    return made


def glm() -> Fixture:
    """The converter writes no size of heads; `model-older.gguf` has their matrices in one."""
    config = GlmConfig(
        **SMALL, architectures=["GlmForCausalLM"], hidden_size=32, intermediate_size=24, num_hidden_layers=2,
        head_dim=8, rms_norm_eps=1e-5, attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    )

    def parameters(writer, config):
        writer.add_head_count_kv(config["num_key_value_heads"])
        part = config["rope_parameters"]["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(part * config["head_dim"]))
        writer.add_add_bos_token(False)

    def old_spelling(config):
        rope = config.pop("rope_parameters")
        return config | {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"]}

    return Fixture(
        "glm", config, 162, gguf.MODEL_ARCH.CHATGLM, parameters, old_spelling=old_spelling, says_heads=True,
        older=(parameters, with_fused_heads),
    )


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
