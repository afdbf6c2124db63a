"""Cohere 1 and 2: attention and feed-forward side by side, LayerNorm without bias; 2 rotates only in windows."""

import gguf
from transformers import Cohere2Config, CohereConfig

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
