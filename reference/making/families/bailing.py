"""Ling and Ring (Bailing), whose classes transformers does not have.

Layers of the first are Granite's with experts under other names, with factors of one, and those of the second (2.0) GLM 4.5's:
heads normed, half of each turned, sigmoids with a bias for choosing only, groups, a block that all tokens have, dense first
layers. So transformers' own Granite and GLM compute them.
"""

import re

import gguf
import numpy as np
from transformers import Glm4MoeConfig, GraniteMoeSharedConfig

from .experts import EXPERTS, ROPE, SIZES, add_experts, stacked
from .fixture import Fixture, Tensors, permuted

NAMES = {
    "model.embed_tokens": "model.word_embeddings", "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm", "self_attn.o_proj": "attention.dense",
    "gate.e_score_correction_bias": "gate.expert_bias", "block_sparse_moe.router.layer": "mlp.gate",
}
# Those of Granite that hold several of Ling's matrices.
JOINED = {"block_sparse_moe": "mlp.experts", "shared_mlp": "mlp.shared_experts"}
FIELDS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def rename(tensors: Tensors) -> Tensors:
    """Queries, keys and values of a layer are one tensor."""
    made = {}
    for name, values in tensors.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if "self_attn.q_proj" in name:
            parts = (tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj"))
            made[name.replace("self_attn.q_proj", "attention.query_key_value")] = np.concatenate(list(parts))
        elif "self_attn" not in name:
            made[name] = values
    return made


def apart(tensors: Tensors) -> Tensors:
    """Granite's experts, one by one, and their gates beside what these gate."""
    made = {}
    for name, values in tensors.items():
        found = re.fullmatch(r"(.*)\.(block_sparse_moe|shared_mlp)\.(in|out)put_linear\.weight", name)
        if found is None:
            made[name] = values
            continue
        block, kind, side = found.groups()
        at = f"{block}.{JOINED[kind]}"
        blocks = {f"{at}.{expert}": one for expert, one in enumerate(values)} if values.ndim == 3 else {at: values}
        for at, matrix in blocks.items():
            parts = {"gate": matrix[: len(matrix) // 2], "up": matrix[len(matrix) // 2 :]} if side == "in" else {"down": matrix}
            made |= {f"{at}.{part}_proj.weight": np.ascontiguousarray(rows) for part, rows in parts.items()}
    return made


def bailing_moe() -> Fixture:
    heads, kv_heads, inner = SIZES["num_attention_heads"], SIZES["num_key_value_heads"], 12
    head_dim = SIZES["hidden_size"] // heads
    config = GraniteMoeSharedConfig(
        **SIZES | {"intermediate_size": inner}, architectures=["GraniteMoeSharedForCausalLM"], num_local_experts=EXPERTS,
        num_experts_per_tok=3, shared_intermediate_size=2 * inner, attention_multiplier=head_dim**-0.5, rope_parameters=ROPE,
    )

    def describe(config):
        rope = config.pop("rope_parameters")
        gone = ("multiplier", "logits_scaling", "num_local_experts", "shared_intermediate_size", "router_", "attention_bias", "dtype")
        config = {name: value for name, value in config.items() if not any(part in name for part in gone)}
        return config | {
            "architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe", "head_dim": head_dim,
            "intermediate_size": SIZES["intermediate_size"], "moe_intermediate_size": inner, "num_experts": EXPERTS,
            "num_shared_experts": 2, "norm_topk_prob": True, "norm_head": False, "norm_softmax": False, "first_k_dense_replace": 0,
            "use_bias": False, "use_qkv_bias": False, "rope_theta": rope["rope_theta"], "rope_scaling": None,
        }

    def parameters(writer, config):
        add_experts(writer, config)
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_expert_weights_scale(1.0)
        writer.add_expert_shared_count(config["num_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])

    def convert(tensors):
        made = {}
        for name, values in stacked(tensors).items():
            block = name.removesuffix("attention.query_key_value.weight")
            if block == name:
                made[name.replace("attention.dense", "self_attn.o_proj")] = values
                continue
            parts = np.split(values, np.cumsum([heads * head_dim, kv_heads * head_dim]))
            made |= {f"{block}self_attn.{part}_proj.weight": rows for part, rows in zip("qkv", parts)}
        return permuted(heads, kv_heads)(made)

    return Fixture(
        "bailing-moe", config, 235, gguf.MODEL_ARCH.BAILINGMOE, parameters, convert,
        published=(lambda tensors: rename(apart(tensors)), describe),
    )


def bailing_moe_v2() -> Fixture:
    config = Glm4MoeConfig(
        **SIZES | {"hidden_size": 32, "num_hidden_layers": 3}, architectures=["Glm4MoeForCausalLM"], head_dim=8,
        use_qk_norm=True, n_routed_experts=EXPERTS, num_experts_per_tok=3, moe_intermediate_size=12, n_shared_experts=1,
        first_k_dense_replace=1, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
        num_nextn_predict_layers=0, rope_parameters=ROPE | {"partial_rotary_factor": 0.5},
    )

    def describe(config):
        rope = config.pop("rope_parameters")
        config = {FIELDS.get(name, name): value for name, value in config.items() if name not in ("attention_bias", "use_qk_norm")}
        return config | {
            "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "use_qk_norm": True, "use_bias": False,
            "use_qkv_bias": False, "use_rmsnorm": True, "score_function": "sigmoid", "moe_router_enable_expert_bias": True,
            "moe_shared_expert_intermediate_size": config["moe_intermediate_size"], "router_dtype": "fp32",
            "rope_theta": rope["rope_theta"], "rope_scaling": None, "partial_rotary_factor": rope["partial_rotary_factor"],
        }

    def parameters(writer, config):
        add_experts(writer, config)
        writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_shared_count(config["num_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])

    def convert(tensors):
        return {name.replace("expert_bias.weight", "expert_bias.bias"): values for name, values in stacked(tensors).items()}

    return Fixture(
        "bailing-moe-v2", config, 230, gguf.MODEL_ARCH.BAILINGMOE2, parameters, convert, published=(rename, describe),
    )


FIXTURES = [bailing_moe, bailing_moe_v2]
