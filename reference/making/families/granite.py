"""Granite without experts: four multipliers. And MiniCPM, which says three of them in other numbers."""

import gguf
from transformers import GraniteConfig

from .fixture import SMALL, Fixture, permuted


def granite() -> Fixture:
    config = GraniteConfig(
        **SMALL, architectures=["GraniteForCausalLM"], hidden_size=32, intermediate_size=24, num_hidden_layers=2,
        embedding_multiplier=3.0, residual_multiplier=0.3, attention_multiplier=0.2, logits_scaling=0.5,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )

    def parameters(writer, config):
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])

    def old_spelling(config):
        return config | {"rope_scaling": None, "rope_theta": config.pop("rope_parameters")["rope_theta"]}

    return Fixture(
        "granite", config, 114, gguf.MODEL_ARCH.GRANITE, parameters, permuted(4, 2), old_spelling=old_spelling
    )


def minicpm() -> Fixture:
    """transformers has no MiniCPM: it computes what Granite does. The converter writes what its numbers come to."""
    layers, width, base, depth = 2, 32, 64, 1.4
    config = GraniteConfig(
        **SMALL, architectures=["GraniteForCausalLM"], hidden_size=width, intermediate_size=24, num_hidden_layers=layers,
        embedding_multiplier=2.0, residual_multiplier=depth / layers**0.5, attention_multiplier=(width // 4) ** -0.5,
        logits_scaling=width / base, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )

    def parameters(writer, config):
        writer.add_embedding_scale(float(config["scale_emb"]))
        writer.add_residual_scale(config["scale_depth"] / config["num_hidden_layers"] ** 0.5)
        writer.add_logit_scale(config["hidden_size"] / config["dim_model_base"])

    def described(config):
        for name in ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "tie_word_embeddings"):
            del config[name]
        return config | {
            "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 2, "scale_depth": depth,
            "dim_model_base": base, "rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None,
        }

    return Fixture(
        "minicpm", config, 198, gguf.MODEL_ARCH.MINICPM, parameters, permuted(4, 2),
        published=(lambda tensors: tensors, described),
    )
