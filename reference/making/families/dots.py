"""dots.llm1: heads normed, a dense layer before the others, sigmoids with a bias for choosing only."""

import gguf
from transformers import Dots1Config

from .experts import EXPERTS, ROPE, SIZES, add_experts, stacked
from .fixture import Fixture


def dots1() -> Fixture:
    config = Dots1Config(
        **SIZES | {"num_key_value_heads": 4, "num_hidden_layers": 3}, architectures=["Dots1ForCausalLM"], head_dim=8,
        n_routed_experts=EXPERTS, num_experts_per_tok=3, moe_intermediate_size=12, n_shared_experts=2, first_k_dense_replace=1,
        norm_topk_prob=True, routed_scaling_factor=2.5, sliding_window=None, rope_parameters=ROPE,
    )

    def parameters(writer, config):
        add_experts(writer, config)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])

    def convert(tensors):
        return {
            name.replace("e_score_correction_bias.weight", "e_score_correction.bias"): values
            for name, values in stacked(tensors).items()
        }

    def old_spelling(config):
        del config["layer_types"]
        return config | {
            "rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None, "scoring_func": "noaux_tc",
            "moe_layer_freq": 1,
        }

    return Fixture("dots1", config, 232, gguf.MODEL_ARCH.DOTS1, parameters, convert, old_spelling=old_spelling)


FIXTURES = [dots1]
