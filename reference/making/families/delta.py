"""Gated delta nets: Qwen3-Next, Qwen3.5 dense and with experts.

Two heads of keys and four of values, so that the order in which heads are paired shows; 150 tokens are two chunks of
transformers' 64 and a ragged third.
"""

import gguf
import numpy as np
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

from .experts import add_experts, stacked
from .fixture import SMALL, Fixture, Tensors

KEY_HEADS, VALUE_HEADS, DIM, TAPS = 2, 4, 8, 4
SIZES = SMALL | {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "head_dim": 16,
    "linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": VALUE_HEADS, "linear_key_head_dim": DIM,
    "linear_value_head_dim": DIM, "linear_conv_kernel_dim": TAPS,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
}
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
    "norm_topk_prob": True,
}
# States that last: of most heads half is left after five tokens, of some after fifty. The norm of results is whole.
CENTERS = {"A_log": -2.5, "linear_attn.norm": 1.0}
SHAPED = {"norm_center": 0.0, "centers": CENTERS, "tokens": 150}


def parameters(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))
    kinds = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", kinds)


def with_experts(writer: gguf.GGUFWriter, config: dict) -> None:
    parameters(writer, config)
    add_experts(writer, config)


def tiled(values: np.ndarray, dim: int, axis: int = 0) -> np.ndarray:
    """Heads of values by turns: those of the first place in each group, then those of the second."""
    values = np.moveaxis(values, axis, 0)
    each = VALUE_HEADS // KEY_HEADS
    turned = values.reshape(KEY_HEADS, each, dim, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
    return np.moveaxis(turned, 0, axis)


def convert(turn: bool):
    """What the converter makes of tensors; Qwen3.5's has heads of values by turns."""

    def heads(values, dim, axis=0):
        return tiled(values, dim, axis) if turn else values

    def behind_keys(values):
        keys = 2 * KEY_HEADS * DIM
        return np.concatenate([values[:keys], heads(values[keys:], DIM)])

    def of_state(part: str, values: np.ndarray) -> tuple[str, np.ndarray] | None:
        match part:
            case "A_log.weight":
                return "ssm_a", heads(-np.exp(values), 1)
            case "dt_bias.weight":
                return "ssm_dt.bias", heads(values, 1)
            case "conv1d.weight":
                return "ssm_conv1d.weight", behind_keys(values.squeeze(1))
            case "in_proj_qkv.weight":
                return "attn_qkv.weight", behind_keys(values)
            case "in_proj_z.weight":
                return "attn_gate.weight", heads(values, DIM)
            case "in_proj_a.weight":
                return "ssm_alpha.weight", heads(values, 1)
            case "in_proj_b.weight":
                return "ssm_beta.weight", heads(values, 1)
            case "in_proj_ba.weight":
                return "ssm_ba.weight", values
            case "norm.weight":
                return "ssm_norm.weight", values
            case "out_proj.weight":
                return "ssm_out.weight", heads(values, DIM, axis=1)
        raise ValueError(part)

    def change(tensors: Tensors) -> Tensors:
        made: Tensors = {}
        for name, values in stacked(tensors).items():
            _, _, part = name.partition(".linear_attn.")
            layer = name.removeprefix("model.layers.").split(".")[0]
            if part == "in_proj_qkvz.weight":
                by_head = np.split(values, KEY_HEADS)
                each = VALUE_HEADS // KEY_HEADS * DIM
                parts = zip(*(np.split(one, [DIM, 2 * DIM, 2 * DIM + each]) for one in by_head))
                q, k, v, z = (np.concatenate(part) for part in parts)
                made[f"blk.{layer}.attn_qkv.weight"] = np.concatenate([q, k, v])
                made[f"blk.{layer}.attn_gate.weight"] = z
            elif part:
                part, values = of_state(part, values)
                made[f"blk.{layer}.{part}"] = values.astype(np.float32)
            elif name.endswith("norm.weight"):
                made[name] = values + 1
            elif name.endswith("mlp.experts.gate_up_proj.weight"):
                gate, up = np.split(values, 2, axis=1)
                made[f"blk.{layer}.ffn_gate_exps.weight"] = gate
                made[f"blk.{layer}.ffn_up_exps.weight"] = up
            else:
                made[name] = values
        return made

    return change


def older(tensors: Tensors) -> Tensors:
    """Of Qwen3-Next: queries, keys, values and `z` in one matrix, head by head, as in `hf/`."""
    made = {name: values for name, values in convert(False)(tensors).items() if ".attn_qkv." not in name and "attn_gate" not in name}
    for name, values in tensors.items():
        if name.endswith("in_proj_qkvz.weight"):
            made[f"blk.{name.removeprefix('model.layers.').split('.')[0]}.ssm_in.weight"] = values
    return made


def qwen3_next() -> Fixture:
    config = Qwen3NextConfig(**SIZES, **EXPERTS, architectures=["Qwen3NextForCausalLM"])
    return Fixture(
        "qwen3-next", config, 180, gguf.MODEL_ARCH.QWEN3NEXT, with_experts, convert(False),
        older=(with_experts, older), **SHAPED,
    )


def qwen3_5() -> Fixture:
    config = Qwen3_5TextConfig(**SIZES, architectures=["Qwen3_5ForCausalLM"], tie_word_embeddings=True)
    return Fixture("qwen3.5", config, 181, gguf.MODEL_ARCH.QWEN35, parameters, convert(True), **SHAPED)


def qwen3_5_moe() -> Fixture:
    config = Qwen3_5MoeTextConfig(**SIZES, **EXPERTS, architectures=["Qwen3_5MoeForCausalLM"])
    return Fixture("qwen3.5-moe", config, 182, gguf.MODEL_ARCH.QWEN35MOE, with_experts, convert(True), **SHAPED)


FIXTURES = [qwen3_next, qwen3_5, qwen3_5_moe]
