"""Latent attention: DeepSeek V2 and V3, GLM 4.7 Flash. Keys and values of all heads are made of one row."""

import gguf
import numpy as np
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig

from .experts import EXPERTS, add_experts, stacked
from .fixture import SMALL, Fixture, Tensors

# Every size another, so that none can stand for another.
SIZES = SMALL | {
    "num_key_value_heads": 4, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "kv_lora_rank": 20,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10, "num_experts_per_tok": 3,
    "moe_intermediate_size": 12, "n_routed_experts": EXPERTS,
}
HEADS = SIZES["num_attention_heads"]
PLAIN, RANK = SIZES["qk_nope_head_dim"], SIZES["kv_lora_rank"]
QUERY = PLAIN + SIZES["qk_rope_head_dim"]


def yarn(magnitude: float) -> dict:
    return {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 4.0, "beta_slow": 1.0, "mscale": magnitude, "mscale_all_dim": magnitude,
    }


def add_attention(writer: gguf.GGUFWriter, config: dict) -> None:
    """What the converter writes of heads and rotation, whatever else it writes."""
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    if (magnitude := config["rope_parameters"].get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * magnitude)


def add_latent_rows(writer: gguf.GGUFWriter, config: dict) -> None:
    add_attention(writer, config)
    writer.add_head_count_kv(1)
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(QUERY)
    writer.add_value_length_mla(config["v_head_dim"])


def add_heads(writer: gguf.GGUFWriter, config: dict) -> None:
    """As converters did it before latent rows were kept."""
    add_attention(writer, config)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(QUERY)
    writer.add_value_length(config["v_head_dim"])


def add_mixture(writer: gguf.GGUFWriter, config: dict, gating: gguf.ExpertGatingFuncType, dense: int) -> None:
    add_experts(writer, config)
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(dense)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_gating_func(gating)
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if (config["n_group"] or 1) > 1:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def renamed(tensors: Tensors) -> Tensors:
    return {
        name.replace("e_score_correction_bias.weight", "e_score_correction.bias"): values
        for name, values in stacked(tensors).items()
    }


def split(tensors: Tensors) -> Tensors:
    """What makes keys of latent rows, each head's the other way round, apart from what makes values."""
    made: Tensors = {}
    for name, values in renamed(tensors).items():
        if "kv_b_proj" not in name:
            made[name] = values
            continue
        block = name.split(".self_attn")[0].replace("model.layers.", "blk.")
        heads = values.reshape(HEADS, -1, RANK)
        made[f"{block}.attn_k_b.weight"] = np.ascontiguousarray(heads[:, :PLAIN].swapaxes(1, 2))
        made[f"{block}.attn_v_b.weight"] = np.ascontiguousarray(heads[:, PLAIN:])
    return made


def described(name: str, config, seed: int, gating: gguf.ExpertGatingFuncType, dense: int, **more) -> Fixture:
    def parameters(add):
        def write(writer, config):
            add(writer, config)
            add_mixture(writer, config, gating, dense)

        return write

    return Fixture(
        name, config, seed, gguf.MODEL_ARCH.DEEPSEEK2, parameters(add_latent_rows), split,
        older=(parameters(add_heads), renamed), says_heads=True, **more,
    )


def deepseek_v2_lite() -> Fixture:
    """One matrix for queries; experts by softmax, weights that do not sum to 1."""
    config = DeepseekV2Config(
        **SIZES, architectures=["DeepseekV2ForCausalLM"], q_lora_rank=None, n_shared_experts=2, first_k_dense_replace=1,
        topk_method="greedy", norm_topk_prob=False, routed_scaling_factor=1.0, n_group=1, topk_group=1,
        rope_parameters=yarn(0.707),
    )

    def old_spelling(config):
        rope = config.pop("rope_parameters")
        theta = rope.pop("rope_theta")
        return config | {
            "rope_theta": theta, "rope_scaling": rope | {"type": rope.pop("rope_type")}, "moe_layer_freq": 1,
            "scoring_func": "softmax",
        }

    softmax = gguf.ExpertGatingFuncType.SOFTMAX
    return described("deepseek-v2-lite", config, 160, softmax, 1, old_spelling=old_spelling)


def deepseek_v2() -> Fixture:
    """Two matrices for queries; groups by their best expert."""
    config = DeepseekV2Config(
        **SIZES, architectures=["DeepseekV2ForCausalLM"], q_lora_rank=14, n_shared_experts=1, first_k_dense_replace=1,
        topk_method="group_limited_greedy", norm_topk_prob=False, routed_scaling_factor=3.0, n_group=4, topk_group=2,
        rope_parameters=yarn(1.0),
    )
    return described("deepseek-v2", config, 161, gguf.ExpertGatingFuncType.SOFTMAX, 1)


def deepseek_v3() -> Fixture:
    """Sigmoids, a bias for choosing only, groups by their best two."""
    config = DeepseekV3Config(
        **SIZES, architectures=["DeepseekV3ForCausalLM"], q_lora_rank=14, n_shared_experts=1, first_k_dense_replace=1,
        norm_topk_prob=True, routed_scaling_factor=2.5, n_group=4, topk_group=2, rope_parameters=yarn(1.0),
    )
    return described("deepseek-v3", config, 162, gguf.ExpertGatingFuncType.SIGMOID, 1)


def glm4_moe_lite() -> Fixture:
    """GLM 4.7 Flash: no stretched rotation, no groups, biases, an epsilon that norms of latent rows do not have."""
    config = Glm4MoeLiteConfig(
        **SIZES, architectures=["Glm4MoeLiteForCausalLM"], q_lora_rank=14, n_shared_experts=1, norm_topk_prob=True,
        routed_scaling_factor=1.8, n_group=1, topk_group=1, rms_norm_eps=1e-5, attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    return described("glm4-moe-lite", config, 163, gguf.ExpertGatingFuncType.SIGMOID, 1)


FIXTURES = [deepseek_v2_lite, deepseek_v2, deepseek_v3, glm4_moe_lite]
