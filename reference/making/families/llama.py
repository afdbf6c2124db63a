"""Llama whose gates are rectified, as ProSparse and TurboSparse are trained: most of them are exactly zero."""

from transformers import LlamaConfig

from .fixture import SMALL, Fixture


def llama_relu() -> Fixture:
    """No GGUF: its keys do not say what gates go through."""
    config = LlamaConfig(
        **SMALL, architectures=["LlamaForCausalLM"], hidden_size=32, intermediate_size=288, num_hidden_layers=2,
        head_dim=8, hidden_act="relu", tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    return Fixture("llama-relu", config, 152)
