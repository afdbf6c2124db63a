"""Cohere 1 and 2, and 2 with experts: attention and feed-forward side by side, LayerNorm without bias; 2 rotates only in windows."""

import gguf
from transformers import Cohere2Config, Cohere2MoeConfig, CohereConfig

from .experts import EXPERTS, stacked
from .fixture import SMALL, Fixture


def command_r() -> Fixture:
    """Rotation pairs neighbours in both forms, so nothing is permuted."""
    config = CohereConfig(
        **SMALL, architectures=["CohereForCausalLM"], hidden_size=16, intermediate_size=12, num_hidden_layers=2,
        logit_scale=0.25, rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )

    def parameters(writer, config):
        writer.add_logit_scale(config["logit_scale"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)

    def old_spelling(config):
        rope = config.pop("rope_parameters")
        # Published ones say nothing of tied matrices.
        del config["tie_word_embeddings"]
        return config | {"rope_theta": rope["rope_theta"]}

    return Fixture("command-r", config, 161, gguf.MODEL_ARCH.COMMAND_R, parameters, old_spelling=old_spelling)


def cohere2() -> Fixture:
    """Rotation pairs neighbours in both forms, so nothing is permuted. Every fourth layer is full, in no key."""
    config = Cohere2Config(
        **SMALL, architectures=["Cohere2ForCausalLM"], hidden_size=16, intermediate_size=12, num_hidden_layers=8,
        sliding_window=8, logit_scale=0.25, rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )

    def parameters(writer, config):
        writer.add_logit_scale(config["logit_scale"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)

    def old_spelling(config):
        del config["layer_types"], config["head_dim"]
        return config | {
            "sliding_window_pattern": 4, "rotary_pct": 1.0, "use_qk_norm": False, "rope_scaling": None,
            "rope_theta": config.pop("rope_parameters")["rope_theta"],
        }

    return Fixture("cohere2", config, 115, gguf.MODEL_ARCH.COHERE2, parameters, old_spelling=old_spelling)


def cohere2_moe_of(name: str, seed: int, **more) -> Fixture:
    """The first layer is dense, sees everything and rotates all the same; of the others every fourth does neither."""
    config = Cohere2MoeConfig(
        **SMALL, architectures=["Cohere2MoeForCausalLM"], hidden_size=16, intermediate_size=12, num_hidden_layers=6, head_dim=8,
        sliding_window=8, logit_scale=0.25, num_experts=EXPERTS, num_experts_per_tok=3, prefix_dense_intermediate_size=24,
        first_k_dense_replace=1, expert_selection_fn="sigmoid", norm_topk_prob=False,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0}, **more,
    )

    def parameters(writer, config):
        experts = config["intermediate_size"]
        writer.add_feed_forward_length(config["prefix_dense_intermediate_size"])
        writer.add_logit_scale(config["logit_scale"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(experts)
        writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if (shared := config["num_shared_experts"]) > 0:
            writer.add_expert_shared_count(shared)
            writer.add_expert_shared_feed_forward_length(experts * shared)
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)

    def old_spelling(config):
        del config["layer_types"], config["mlp_layer_types"], config["tie_word_embeddings"]
        return config | {"first_k_dense_replace": 1, "sliding_window_pattern": 4, "rope_theta": config.pop("rope_parameters")["rope_theta"]}

    return Fixture(
        name, config, seed, gguf.MODEL_ARCH.DOTS1, parameters, stacked, old_spelling=old_spelling, called="cohere2moe",
    )


def cohere2_moe() -> Fixture:
    """Norms by the root of the mean square, as in North Mini Code."""
    return cohere2_moe_of("cohere2-moe", 118, rms_norm_eps=1e-6)


def cohere2_moe_shared() -> Fixture:
    return cohere2_moe_of("cohere2-moe-shared", 119, num_shared_experts=2)
