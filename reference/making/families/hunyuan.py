"""Hunyuan 3: heads normed, a dense layer before the others, sigmoids with a bias for choosing only."""

import gguf
from transformers import HYV3Config

from .experts import EXPERTS, ROPE, SIZES, add_experts, stacked
from .fixture import Fixture

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


FIXTURES = [hy_v3]
