"""EXAONE 4, and K-EXAONE with experts: heads normed, windows; full layers do not rotate."""

import gguf
from transformers import Exaone4Config, ExaoneMoeConfig

from .experts import EXPERTS, ROPE, SIZES, add_experts, stacked
from .fixture import SMALL, Fixture


def exaone4() -> Fixture:
    """Norms after each branch."""
    config = Exaone4Config(
        **SMALL, architectures=["Exaone4ForCausalLM"], hidden_size=16, intermediate_size=12, num_hidden_layers=8,
        head_dim=8, sliding_window=8, sliding_window_pattern=4,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )

    def parameters(writer, config):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])

    def old_spelling(config):
        del config["layer_types"]
        return config | {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None}

    return Fixture("exaone4", config, 131, gguf.MODEL_ARCH.EXAONE4, parameters, old_spelling=old_spelling)


def exaone_moe() -> Fixture:
    """K-EXAONE: norms before the branches; the first layer is dense, the others have experts scored by sigmoids."""
    config = ExaoneMoeConfig(
        **SIZES | {"num_hidden_layers": 4}, architectures=["ExaoneMoeForCausalLM"], head_dim=8, sliding_window=8,
        sliding_window_pattern="LLLG", layer_types=["sliding_attention"] * 3 + ["full_attention"], num_experts=EXPERTS,
        num_experts_per_tok=3, moe_intermediate_size=12, num_shared_experts=2, first_k_dense_replace=1,
        routed_scaling_factor=2.5, rope_parameters=ROPE,
    )

    def parameters(writer, config):
        add_experts(writer, config)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_vocab_size(config["vocab_size"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        writer.add_expert_shared_count(config["num_shared_experts"])
        writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["num_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_nextn_predict_layers(0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)

    def convert(tensors):
        return {
            name.replace("e_score_correction_bias.weight", "e_score_correction.bias"): values
            for name, values in stacked(tensors).items()
        }

    def old_spelling(config):
        del config["mlp_layer_types"]
        return config | {
            "architectures": ["ExaoneMoEForCausalLM"], "rope_theta": config.pop("rope_parameters")["rope_theta"],
            "rope_scaling": None, "scoring_func": "sigmoid",
            "is_moe_layer": [layer > 0 for layer in range(config["num_hidden_layers"])],
            "first_last_k_dense_replace": 1,
        }

    return Fixture("exaone-moe", config, 233, gguf.MODEL_ARCH.EXAONE_MOE, parameters, convert, old_spelling=old_spelling)
