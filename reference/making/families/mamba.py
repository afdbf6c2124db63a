"""Mamba-2 by itself, and with attention in some layers: Granite 4 H with experts and without."""

import gguf
import numpy as np
from transformers import GraniteMoeHybridConfig, Mamba2Config

from .experts import add_experts
from .fixture import SMALL, Fixture, Tensors

HEADS, HEAD_DIM, STATE, GROUPS, TAPS = 4, 16, 12, 2, 4
# Steps of which most leave more than half of a state.
CENTERS = {"A_log": -2.0}


def of_state(writer: gguf.GGUFWriter) -> None:
    writer.add_ssm_conv_kernel(TAPS)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_group_count(GROUPS)
    writer.add_ssm_time_step_rank(HEADS)
    writer.add_ssm_inner_size(HEADS * HEAD_DIM)


def state_tensor(part: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    match part:
        case "A_log.weight":
            return "ssm_a", -np.exp(values).reshape(-1, 1)
        case "D.weight":
            return "ssm_d", values.reshape(-1, 1)
        case "dt_bias.weight":
            return "ssm_dt.bias", values
        case "conv1d.weight":
            return "ssm_conv1d.weight", values.squeeze(1)
        case "norm.weight":
            return "ssm_norm.weight", values.reshape(GROUPS, -1)
    return {"in_proj.weight": "ssm_in.weight", "out_proj.weight": "ssm_out.weight", "conv1d.bias": "ssm_conv1d.bias"}[part], values


def convert(mixer: str):
    def change(tensors: Tensors) -> Tensors:
        made: Tensors = {}
        for name, values in tensors.items():
            _, _, part = name.partition(f".{mixer}.")
            layer = name.split("layers.")[-1].split(".")[0]
            if part:
                part, values = state_tensor(part, values)
                made[f"blk.{layer}.{part}"] = values.astype(np.float32)
            elif name.endswith("block_sparse_moe.input_linear.weight"):
                gate, up = np.split(values, 2, axis=1)
                made[f"blk.{layer}.ffn_gate_exps.weight"], made[f"blk.{layer}.ffn_up_exps.weight"] = gate, up
            elif name.endswith("shared_mlp.input_linear.weight"):
                ending = "_shexp" if f"model.layers.{layer}.block_sparse_moe.input_linear.weight" in tensors else ""
                gate, up = np.split(values, 2)
                made[f"blk.{layer}.ffn_gate{ending}.weight"], made[f"blk.{layer}.ffn_up{ending}.weight"] = gate, up
            elif name.endswith("shared_mlp.output_linear.weight"):
                ending = "_shexp" if f"model.layers.{layer}.block_sparse_moe.input_linear.weight" in tensors else ""
                made[f"blk.{layer}.ffn_down{ending}.weight"] = values
            else:
                made[name] = values
        return made

    return change


def mamba2() -> Fixture:
    config = Mamba2Config(
        architectures=["Mamba2ForCausalLM"], num_heads=HEADS, head_dim=HEAD_DIM, vocab_size=64, hidden_size=32,
        state_size=STATE, num_hidden_layers=3, expand=2, conv_kernel=TAPS, n_groups=GROUPS, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, chunk_size=16, tie_word_embeddings=False, time_step_limit=(0.0, 1e4),
    )

    def parameters(writer, config):
        writer.add_context_length(2**20)
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
        of_state(writer)

    return Fixture(
        "mamba2", config, 185, gguf.MODEL_ARCH.MAMBA2, parameters, convert("mixer"), centers=CENTERS, tokens=150,
    )


def granite(name: str, seed: int, experts: int) -> Fixture:
    config = GraniteMoeHybridConfig(
        **SMALL, architectures=["GraniteMoeHybridForCausalLM"], hidden_size=32,
        intermediate_size=12 if experts else 20, num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        num_local_experts=experts, num_experts_per_tok=3, shared_intermediate_size=20, position_embedding_type="nope",
        mamba_n_heads=HEADS, mamba_n_groups=GROUPS, mamba_d_state=STATE, mamba_d_head=HEAD_DIM, mamba_d_conv=TAPS,
        mamba_expand=2, mamba_chunk_size=16, time_step_limit=(0.0, 1e4), embedding_multiplier=2.0,
        attention_multiplier=0.4, residual_multiplier=0.8, logits_scaling=0.5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )

    def parameters(writer, config):
        heads = config["num_key_value_heads"]
        writer.add_head_count_kv([heads if "full" in kind else 0 for kind in config["layer_types"]])
        writer.add_rope_scaling_finetuned(False)
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
        of_state(writer)
        if experts:
            add_experts(writer, config)
            writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])

    return Fixture(
        name, config, seed, gguf.MODEL_ARCH.GRANITE_HYBRID, parameters, convert("mamba"), says_heads=True,
        centers=CENTERS, tokens=150,
    )


def granite_hybrid() -> Fixture:
    return granite("granite-hybrid", 186, 0)


def granite_hybrid_moe() -> Fixture:
    return granite("granite-hybrid-moe", 187, 8)


FIXTURES = [mamba2, granite_hybrid, granite_hybrid_moe]
