"""Llama 4 without experts: attention within chunks, layers that do not rotate and whose queries grow."""

import gguf
from transformers import Llama4TextConfig

from .fixture import SMALL, Fixture

SIZES = SMALL | {"hidden_size": 16, "intermediate_size": 20, "intermediate_size_mlp": 24, "num_hidden_layers": 4}
ROPE = {"rope_type": "default", "rope_theta": 100.0}


def llama4_chunks() -> Fixture:
    """Chunks of eight tokens and queries that grow every five; GGUF has no keys for either, so there is none."""
    config = Llama4TextConfig(
        **SIZES, architectures=["Llama4ForCausalLM"], head_dim=8, moe_layers=[], attention_chunk_size=8,
        attn_scale=0.5, floor_scale=5, rope_parameters=ROPE,
    )
    return Fixture("llama4-chunks", config, 150)


def mobilellm() -> Fixture:
    """As MobileLLM R1 is published: all layers rotate and see everything, and the output is tied."""
    layers = SIZES["num_hidden_layers"]
    config = Llama4TextConfig(
        **SIZES, architectures=["Llama4ForCausalLM"], head_dim=8, moe_layers=[], interleave_moe_layer_step=0,
        no_rope_layers=[1] * layers, layer_types=["full_attention"] * layers, attention_chunk_size=512,
        attn_temperature_tuning=False, tie_word_embeddings=True, rope_parameters=ROPE,
    )

    def parameters(writer, config):
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_feed_forward_length(config["intermediate_size_mlp"])
        writer.add_sliding_window(0)

    return Fixture("mobilellm", config, 151, gguf.MODEL_ARCH.LLAMA4, parameters)
