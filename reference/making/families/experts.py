"""Mixtures of experts: eight experts of which a token has two, or three."""

import re

import gguf
import numpy as np
from transformers import (
    AfmoeConfig, Ernie4_5_MoeConfig, Glm4MoeConfig, GptOssConfig, GraniteMoeSharedConfig, LagunaConfig, MixtralConfig,
    OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig, SolarOpenConfig,
)

from .fixture import SMALL, Fixture, Tensors, permuted

SIZES = SMALL | {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
EXPERTS = 8
ROPE = {"rope_type": "default", "rope_theta": 100.0}


def stacked(tensors: Tensors) -> Tensors:
    """The matrices of a layer's experts in one tensor, as GGUF has them."""
    made: Tensors = {}
    for name, values in tensors.items():
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if found is None:
            made[name] = values
            continue
        block, expert, part = found.groups()
        full = f"{block}.{part}.weight"
        made.setdefault(full, np.zeros((EXPERTS, *values.shape), np.float32))[int(expert)] = values
    return made


def add_experts(writer: gguf.GGUFWriter, config: dict) -> None:
    """What the converter writes of every mixture whose file says it."""
    count = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.get("num_experts_per_tok") or config["top_k_experts"])
    if (width := config.get("moe_intermediate_size")) is not None:
        writer.add_expert_feed_forward_length(width)
    if (width := config.get("shared_expert_intermediate_size")) is not None:
        writer.add_expert_shared_feed_forward_length(width)


def qwen3_moe_dense_layer() -> Fixture:
    """Layer 1 is dense; no GGUF file can say that, so there is none."""
    config = Qwen3MoeConfig(
        **SIZES | {"num_hidden_layers": 3}, architectures=["Qwen3MoeForCausalLM"], head_dim=8, num_experts=EXPERTS,
        num_experts_per_tok=3, moe_intermediate_size=12, norm_topk_prob=True, mlp_only_layers=[1], rope_parameters=ROPE,
    )
    return Fixture("qwen3-moe-dense-layer", config, 140)


def qwen3_moe() -> Fixture:
    config = Qwen3MoeConfig(
        **SIZES, architectures=["Qwen3MoeForCausalLM"], head_dim=8, num_experts=EXPERTS,
        num_experts_per_tok=3, moe_intermediate_size=12, norm_topk_prob=True, rope_parameters=ROPE,
    )

    def old_spelling(config):
        config["num_experts"] = config.pop("num_local_experts")
        return config | {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None}

    return Fixture(
        "qwen3-moe", config, 141, gguf.MODEL_ARCH.QWEN3MOE, add_experts, stacked, old_spelling=old_spelling,
    )


def qwen2_moe() -> Fixture:
    """Weights do not sum to 1; a gated block that all tokens have."""
    config = Qwen2MoeConfig(
        **SIZES, architectures=["Qwen2MoeForCausalLM"], num_experts=EXPERTS, num_experts_per_tok=2,
        moe_intermediate_size=12, shared_expert_intermediate_size=20, rope_parameters=ROPE,
    )
    return Fixture("qwen2-moe", config, 142, gguf.MODEL_ARCH.QWEN2MOE, add_experts, stacked)


def mixtral() -> Fixture:
    config = MixtralConfig(
        **SIZES, architectures=["MixtralForCausalLM"], num_local_experts=EXPERTS, num_experts_per_tok=2,
        rope_parameters=ROPE,
    )

    def parameters(writer, config):
        add_experts(writer, config)
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])

    turn = permuted(SMALL["num_attention_heads"], SMALL["num_key_value_heads"])
    return Fixture(
        "mixtral", config, 143, gguf.MODEL_ARCH.LLAMA, parameters, lambda tensors: turn(stacked(tensors)),
    )


def olmoe() -> Fixture:
    """Norms over all of queries and of keys; weights do not sum to 1."""
    config = OlmoeConfig(
        **SIZES, architectures=["OlmoeForCausalLM"], num_experts=EXPERTS, num_experts_per_tok=2, rope_parameters=ROPE,
    )
    return Fixture("olmoe", config, 144, gguf.MODEL_ARCH.OLMOE, add_experts, stacked)


def granite_moe() -> Fixture:
    """Gate and up in one tensor of all experts in `hf/`, and apart in GGUF; a block that all tokens have."""
    config = GraniteMoeSharedConfig(
        **SIZES, architectures=["GraniteMoeSharedForCausalLM"], num_local_experts=EXPERTS, num_experts_per_tok=2,
        shared_intermediate_size=20, embedding_multiplier=6.0, attention_multiplier=0.4, residual_multiplier=0.3,
        logits_scaling=3.0, rope_parameters=ROPE,
    )

    def parameters(writer, config):
        add_experts(writer, config)
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])

    def convert(tensors):
        turn = permuted(SMALL["num_attention_heads"], SMALL["num_key_value_heads"])
        made = {}
        for name, values in turn(tensors).items():
            block = name.rsplit(".", 2)[0].replace("model.layers.", "blk.")
            if "input_linear" in name:
                ending = "exps" if "block_sparse_moe" in name else "shexp"
                gate, up = np.split(values, 2, axis=-2)
                block = block.rsplit(".", 1)[0]
                made |= {f"{block}.ffn_gate_{ending}.weight": gate, f"{block}.ffn_up_{ending}.weight": up}
            else:
                made[name] = values
        return made

    return Fixture("granite-moe", config, 145, gguf.MODEL_ARCH.GRANITE_MOE, parameters, convert)


def gpt_oss() -> Fixture:
    """Sinks, windows on even layers, YaRN whose ends are not rounded, biases everywhere, gates that are clamped.

    In `hf/` experts are transposed, gates and what they gate in turns.
    """
    config = GptOssConfig(
        **SIZES | {"num_hidden_layers": 4}, architectures=["GptOssForCausalLM"], head_dim=8,
        num_local_experts=EXPERTS, num_experts_per_tok=3, sliding_window=8, rope_parameters={
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False,
        },
    )

    def parameters(writer, config):
        add_experts(writer, config)
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])

    def convert(tensors):
        made = {}
        for name, values in tensors.items():
            if "experts." not in name:
                made[name] = values
                continue
            block, part = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\w+)\.weight", name).groups()
            ending = "bias" if part.endswith("_bias") else "weight"
            if ending == "weight":
                values = values.swapaxes(1, 2)
            parts = {"down": values} if part.startswith("down") else {"gate": values[:, ::2], "up": values[:, 1::2]}
            made |= {f"blk.{block}.ffn_{which}_exps.{ending}": rows for which, rows in parts.items()}
        return made

    # Rows that are large enough for gates to be clamped.
    return Fixture(
        "gpt-oss", config, 146, gguf.MODEL_ARCH.GPT_OSS, parameters, convert,
        centers={"post_attention_layernorm": 3.0},
    )


def ernie4_5_moe() -> Fixture:
    """The first layer and every other one are dense; a softmax with a bias for choosing only, a block that all tokens have."""
    config = Ernie4_5_MoeConfig(
        **SIZES | {"num_hidden_layers": 4, "head_dim": 8}, architectures=["Ernie4_5_MoeForCausalLM"], moe_num_experts=EXPERTS, moe_k=3,
        moe_intermediate_size=12, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_interval=2,
        tie_word_embeddings=True, rope_parameters=ROPE,
    )

    def parameters(writer, config):
        writer.add_expert_count(config["moe_num_experts"])
        writer.add_expert_used_count(config["moe_k"])
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])

    def convert(tensors):
        return {
            name.replace("e_score_correction_bias.weight", "e_score_correction.bias"): np.squeeze(values)
            for name, values in stacked(tensors).items()
        }

    return Fixture("ernie4-5-moe", config, 148, gguf.MODEL_ARCH.ERNIE4_5_MOE, parameters, convert)


def glm4_moe() -> Fixture:
    """The first layer is dense; sigmoids, a bias for choosing only, groups, a scale, a block that all tokens have."""
    config = Glm4MoeConfig(
        **SIZES | {"num_hidden_layers": 3}, architectures=["Glm4MoeForCausalLM"], head_dim=8, attention_bias=True,
        use_qk_norm=True, n_routed_experts=EXPERTS, num_experts_per_tok=3, moe_intermediate_size=12,
        n_shared_experts=2, first_k_dense_replace=1, n_group=4, topk_group=2, norm_topk_prob=True,
        routed_scaling_factor=1.8, num_nextn_predict_layers=0,
        rope_parameters=ROPE | {"partial_rotary_factor": 0.5},
    )

    def parameters(writer, config):
        add_experts(writer, config)
        writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])

    def convert(tensors):
        return {
            name.replace("e_score_correction_bias.weight", "e_score_correction.bias"): values
            for name, values in stacked(tensors).items()
        }

    return Fixture("glm4-moe", config, 147, gguf.MODEL_ARCH.GLM4_MOE, parameters, convert)


def solar_open() -> Fixture:
    """GGUF files say GLM; all of each head turns, heads are not normed, every layer has experts."""
    config = SolarOpenConfig(
        **{name: value for name, value in SIZES.items() if name != "intermediate_size"}, architectures=["SolarOpenForCausalLM"],
        head_dim=8, n_routed_experts=EXPERTS, num_experts_per_tok=3, moe_intermediate_size=12, n_shared_experts=1,
        routed_scaling_factor=1.0, rope_parameters=ROPE | {"partial_rotary_factor": 1.0},
    )

    def parameters(writer, config):
        writer.add_feed_forward_length(SIZES["intermediate_size"])
        add_experts(writer, config)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(0)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])

    def convert(tensors):
        return {
            name.replace("e_score_correction_bias.weight", "e_score_correction.bias"): values
            for name, values in stacked(tensors).items()
        }

    def old_spelling(config):
        return config | {
            "rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None, "partial_rotary_factor": 1.0,
            "intermediate_size": SIZES["intermediate_size"], "first_k_dense_replace": 0,
        }

    return Fixture("solar-open", config, 234, gguf.MODEL_ARCH.GLM4_MOE, parameters, convert, old_spelling=old_spelling)


def afmoe() -> Fixture:
    """Gated attention; windows and rotation on three layers of four; a dense layer before the others."""
    config = AfmoeConfig(
        **SIZES | {"num_hidden_layers": 4}, architectures=["AfmoeForCausalLM"], head_dim=8, num_experts=EXPERTS,
        num_experts_per_tok=3, moe_intermediate_size=12, num_shared_experts=2, num_dense_layers=1, route_scale=1.8,
        sliding_window=8, mup_enabled=True, rope_parameters=ROPE,
    )

    def parameters(writer, config):
        add_experts(writer, config)
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_shared_count(config["num_shared_experts"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["route_scale"])
        writer.add_expert_weights_norm(True)

    def convert(tensors):
        made = {}
        for name, values in stacked(tensors).items():
            made[name.replace("expert_bias.weight", "expert_bias.bias")] = values
        return made

    return Fixture("afmoe", config, 148, gguf.MODEL_ARCH.AFMOE, parameters, convert)


def laguna_of(name: str, seed: int, gating: bool | str) -> Fixture:
    """The first of four layers sees everything, has fewer heads, and turns half of each by YaRN. Published tensors are called
    otherwise than transformers calls them."""
    config = LagunaConfig(
        **SIZES | {"num_hidden_layers": 5}, architectures=["LagunaForCausalLM"], head_dim=8, num_experts=EXPERTS,
        num_experts_per_tok=3, moe_intermediate_size=12, shared_expert_intermediate_size=8, sliding_window=8, gating=gating,
        layer_types=[("sliding" if layer % 4 else "full") + "_attention" for layer in range(5)],
        num_attention_heads_per_layer=[6 if layer % 4 else 4 for layer in range(5)], moe_routed_scaling_factor=2.5,
        mlp_layer_types=["dense"] + ["sparse"] * 4,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
                "beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 1.1386294361119891, "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0, "partial_rotary_factor": 1.0},
        },
    )

    def parameters(writer, config):
        writer.add_vocab_size(config["vocab_size"])
        writer.add_head_count(config["num_attention_heads_per_layer"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(config["moe_routed_scaling_factor"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(1)
        writer.add_rope_dimension_count(config["head_dim"] // 2)
        writer.add_rope_dimension_count_swa(config["head_dim"])

    def convert(tensors):
        made = {}
        for name, values in stacked(tensors).items():
            layer = name.split("layers.")[-1].split(".")[0]
            if name.endswith("g_proj.weight"):
                name = f"blk.{layer}.attn_gate.weight"
            if "e_score_correction_bias" in name:
                name = f"blk.{layer}.exp_probs_b.bias"
            made[name.replace("shared_expert.", "shared_experts.")] = values
        return made

    return Fixture(name, config, seed, gguf.MODEL_ARCH.DOTS1, parameters, convert, called="laguna")


def laguna() -> Fixture:
    return laguna_of("laguna", 190, True)


def laguna_elements() -> Fixture:
    return laguna_of("laguna-elements", 191, "per-element")


FIXTURES = [
    afmoe, laguna, laguna_elements, qwen3_moe, qwen3_moe_dense_layer, qwen2_moe, mixtral, olmoe, granite_moe, gpt_oss, ernie4_5_moe, glm4_moe,
    solar_open,
]
