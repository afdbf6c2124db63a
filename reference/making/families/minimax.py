"""MiniMax M2: norms over all of queries and of keys, half of each head turned, experts scored by sigmoids in every layer."""

import gguf
from transformers import MiniMaxM2Config

from .experts import EXPERTS, ROPE, SIZES, add_experts, stacked
from .fixture import Fixture

TURNED = 4


def minimax_m2() -> Fixture:
    config = MiniMaxM2Config(
        **SIZES, architectures=["MiniMaxM2ForCausalLM"], head_dim=8, num_local_experts=EXPERTS, num_experts_per_tok=3,
        rope_parameters=ROPE | {"partial_rotary_factor": TURNED / 8},
    )

    def parameters(writer, config):
        add_experts(writer, config)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_rope_dimension_count(TURNED)

    def convert(tensors):
        return {
            name.replace("e_score_correction_bias.weight", "e_score_correction.bias"): values
            for name, values in stacked(tensors).items()
        }

    def old_spelling(config):
        return config | {
            "rope_theta": config.pop("rope_parameters")["rope_theta"], "rotary_dim": TURNED, "scoring_func": "sigmoid",
            "attn_type_list": [1] * config["num_hidden_layers"], "use_qk_norm": True, "qk_norm_type": "per_layer",
            "use_routing_bias": True, "use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1,
            "shared_intermediate_size": 0,
        }

    return Fixture(
        "minimax-m2", config, 231, gguf.MODEL_ARCH.MINIMAXM2, parameters, convert, old_spelling=old_spelling,
    )


FIXTURES = [minimax_m2]
