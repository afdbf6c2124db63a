"""LFM2: short convolutions between gates, and attention in some layers."""

import gguf
from transformers import Lfm2Config, Lfm2MoeConfig

from .experts import add_experts, stacked
from .fixture import SMALL, Fixture, Tensors

KINDS = ["conv", "full_attention", "conv", "conv", "full_attention"]
SIZES = SMALL | {
    "hidden_size": 32, "num_hidden_layers": len(KINDS), "layer_types": KINDS, "norm_eps": 1e-5, "conv_L_cache": 3,
    "conv_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}


def parameters(writer: gguf.GGUFWriter, config: dict) -> None:
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config["layer_types"]])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_layer_norm_rms_eps(config["norm_eps"])


def convert(tensors: Tensors) -> Tensors:
    made = {}
    for name, values in stacked(tensors).items():
        layer = name.removeprefix("model.layers.").split(".")[0]
        if name.endswith("conv.conv.weight"):
            values = values.squeeze(1)
        if name.endswith("expert_bias.weight"):
            name = f"blk.{layer}.exp_probs_b.bias"
        for part, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            if name.endswith(f"experts.{theirs}.weight"):
                name = f"blk.{layer}.ffn_{part}_exps.weight"
        made[name] = values
    return made


def lfm2() -> Fixture:
    config = Lfm2Config(
        **SIZES, architectures=["Lfm2ForCausalLM"], intermediate_size=24, block_auto_adjust_ff_dim=False,
        tie_word_embeddings=True,
    )
    return Fixture(
        "lfm2", config, 183, gguf.MODEL_ARCH.LFM2, parameters, convert, says_heads=True, tokens=150,
    )


def lfm2_moe() -> Fixture:
    """The first layer is dense."""
    config = Lfm2MoeConfig(
        **SIZES, architectures=["Lfm2MoeForCausalLM"], intermediate_size=24, moe_intermediate_size=12, num_experts=8,
        num_experts_per_tok=3, num_dense_layers=1, use_expert_bias=True, norm_topk_prob=True,
        routed_scaling_factor=1.5, tie_word_embeddings=True,
    )

    def with_experts(writer, config):
        parameters(writer, config)
        add_experts(writer, config)
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])

    return Fixture(
        "lfm2-moe", config, 184, gguf.MODEL_ARCH.LFM2MOE, with_experts, convert, says_heads=True, tokens=150,
    )


FIXTURES = [lfm2, lfm2_moe]
