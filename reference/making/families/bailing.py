"""Ling 2.0 and Ring 2.0 (Bailing, second version), whose class transformers does not have.

Its layers are those of GLM 4.5 with experts under other names: heads normed, half of each turned, sigmoids with a bias for
choosing only, groups, a block that all tokens have, dense first layers. So transformers' own GLM computes them.
"""

import gguf
import numpy as np
from transformers import Glm4MoeConfig

from .experts import EXPERTS, ROPE, SIZES, add_experts, stacked
from .fixture import Fixture, Tensors

NAMES = {
    "model.embed_tokens": "model.word_embeddings", "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm", "self_attn.o_proj": "attention.dense",
    "gate.e_score_correction_bias": "gate.expert_bias",
}
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


def describe(config: dict) -> dict:
    rope = config.pop("rope_parameters")
    config = {FIELDS.get(name, name): value for name, value in config.items() if name not in ("attention_bias", "use_qk_norm")}
    return config | {
        "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "use_qk_norm": True, "use_bias": False,
        "use_qkv_bias": False, "use_rmsnorm": True, "score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"], "router_dtype": "fp32",
        "rope_theta": rope["rope_theta"], "rope_scaling": None, "partial_rotary_factor": rope["partial_rotary_factor"],
    }


def bailing_moe_v2() -> Fixture:
    config = Glm4MoeConfig(
        **SIZES | {"hidden_size": 32, "num_hidden_layers": 3}, architectures=["Glm4MoeForCausalLM"], head_dim=8,
        use_qk_norm=True, n_routed_experts=EXPERTS, num_experts_per_tok=3, moe_intermediate_size=12, n_shared_experts=1,
        first_k_dense_replace=1, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
        num_nextn_predict_layers=0, rope_parameters=ROPE | {"partial_rotary_factor": 0.5},
    )

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


FIXTURES = [bailing_moe_v2]
