"""Hunyuan. 1: heads are normed once they are turned; the rotary base is stretched once, though its type is called dynamic.
3: heads are normed before, a dense layer first, sigmoids with a bias for choosing only."""

import gguf
from transformers import HunYuanDenseV1Config, HunYuanMoEV1Config, HYV3Config

from .experts import EXPERTS, ROPE, add_experts, stacked
from .fixture import SMALL, Fixture

SIZES = SMALL | {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
STRETCHED = {"rope_type": "dynamic", "rope_theta": 20.0, "alpha": 50.0, "factor": 1.0}


def add_stretched(writer: gguf.GGUFWriter, config: dict) -> None:
    """The converter writes the base that it comes to, and a context that it takes for granted."""
    rope, dim = config["rope_parameters"], config["head_dim"]
    writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2)))
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(1)


def old_spelling(config: dict) -> dict:
    """As published, with the numbers of YaRN that are not used."""
    rope = config.pop("rope_parameters")
    return config | {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {
            "alpha": rope["alpha"], "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0,
            "type": "dynamic",
        },
    }


def hunyuan() -> Fixture:
    config = HunYuanDenseV1Config(
        **SIZES, architectures=["HunYuanDenseV1ForCausalLM"], head_dim=8, tie_word_embeddings=True,
        rope_parameters=STRETCHED,
    )
    return Fixture(
        "hunyuan", config, 180, gguf.MODEL_ARCH.HUNYUAN_DENSE, add_stretched, old_spelling=old_spelling,
    )


def hunyuan_moe() -> Fixture:
    """Published folders say for each layer how many experts a token has and how wide they are."""
    config = HunYuanMoEV1Config(
        **SIZES, architectures=["HunYuanMoEV1ForCausalLM"], head_dim=8, num_experts=EXPERTS, moe_topk=3,
        tie_word_embeddings=True, rope_parameters=STRETCHED,
    )

    def parameters(writer, config):
        add_stretched(writer, config)
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(config["moe_topk"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_count(1)

    def published(config):
        config = old_spelling(config)
        config["num_experts"] = config.pop("num_local_experts", EXPERTS)
        layers = config["num_hidden_layers"]
        return config | {
            "moe_topk": [config["moe_topk"]] * layers, "num_shared_expert": [1] * layers,
            "moe_intermediate_size": [config["intermediate_size"]] * layers,
        }

    return Fixture(
        "hunyuan-moe", config, 181, gguf.MODEL_ARCH.HUNYUAN_MOE, parameters, stacked, old_spelling=published,
    )


NAMES = {"mlp.router.gate": "mlp.gate", "mlp.shared_mlp": "mlp.shared_experts"}


def hy_v3() -> Fixture:
    config = HYV3Config(
        **SIZES | {"num_hidden_layers": 3}, architectures=["HYV3ForCausalLM"], head_dim=8, num_experts=EXPERTS,
        num_experts_per_tok=3, moe_intermediate_size=12, num_shared_experts=1, router_scaling_factor=2.826,
        mlp_layer_types=["dense", "sparse", "sparse"], rope_parameters=ROPE,
    )

    def parameters(writer, config):
        add_experts(writer, config)
        writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["num_shared_experts"])
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(config["router_scaling_factor"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)

    def convert(tensors):
        made = {}
        for name, values in stacked(tensors).items():
            if name.endswith("mlp.expert_bias.weight"):
                made[f"blk.{name.split('.')[2]}.exp_probs_b"] = values
                continue
            for theirs, usual in NAMES.items():
                name = name.replace(theirs, usual)
            made[name] = values
        return made

    def old_spelling(config):
        del config["mlp_layer_types"]
        return config | {
            "first_k_dense_replace": 1, "qk_norm": True, "route_norm": True, "moe_router_use_sigmoid": True,
            "moe_router_enable_expert_bias": True, "expert_hidden_dim": config["moe_intermediate_size"],
        }

    return Fixture(
        "hy-v3", config, 237, gguf.MODEL_ARCH.DOTS1, parameters, convert, old_spelling=old_spelling, called="hy_v3",
    )


FIXTURES = [hunyuan, hunyuan_moe, hy_v3]
