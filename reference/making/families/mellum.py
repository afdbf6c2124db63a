"""Mellum 2: experts by a softmax; layers with windows rotate plainly, full ones by YaRN."""

import gguf
from transformers import MellumConfig

from .experts import EXPERTS, SIZES, add_experts, stacked
from .fixture import Fixture


def mellum() -> Fixture:
    yarn = {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
        "attention_factor": 1.2079441541679836,
    }
    config = MellumConfig(
        **SIZES | {"num_hidden_layers": 4}, architectures=["MellumForCausalLM"], head_dim=8, num_local_experts=EXPERTS,
        num_experts_per_tok=3, moe_intermediate_size=12, sliding_window=8,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], rope_parameters={
            "full_attention": {**yarn, "rope_theta": 100.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    )

    def parameters(writer, config):
        add_experts(writer, config)
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])

    return Fixture("mellum", config, 236, gguf.MODEL_ARCH.QWEN3MOE, parameters, stacked, called="mellum")


FIXTURES = [mellum]
