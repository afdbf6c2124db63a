"""The two networks as GGUF files and transformers have them: Qwen3, and for the sibling Nemotron-H without states."""

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM, Qwen3Config, Qwen3ForCausalLM

SOURCE = (
    "Trained from random weights on the documentation that ships with the Rust toolchain, "
    "by The Rust Project Developers and contributors, used under MIT or Apache-2.0."
)
WHOLE = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}


class Qwen3:
    """The demo."""

    architecture = "qwen3"
    name = "Lacuna demo"
    description = "A very small Qwen3 language model that explains Rust, made to demonstrate and test Lacuna. " + SOURCE
    file = "lacuna-demo-q8_0.gguf"
    reference = "reference.json"
    parts = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }

    @classmethod
    def tensor_name(cls, name):
        """The GGUF name of a parameter."""
        if name in WHOLE:
            return WHOLE[name]
        _, layer, part = name.split(".", 2)
        return f"blk.{layer}.{cls.parts[part.removesuffix('.weight')]}.weight"

    @staticmethod
    def add_sizes(writer, shape):
        """What the file says of layers."""
        writer.add_block_count(shape.num_hidden_layers)
        writer.add_feed_forward_length(shape.intermediate_size)
        writer.add_head_count_kv(shape.num_key_value_heads)
        writer.add_rope_freq_base(shape.rope_theta)

    @staticmethod
    def reference_model(shape, weights):
        """That of transformers with the given weights."""
        config = Qwen3Config(
            **sizes(shape),
            num_hidden_layers=shape.num_hidden_layers,
            rms_norm_eps=shape.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            tie_word_embeddings=True,
            attention_bias=False,
            use_cache=False,
        )
        model = Qwen3ForCausalLM(config)
        named = {"model." + name: value for name, value in weights.items()}
        missing, unexpected = model.load_state_dict(named, strict=False)
        assert missing in ([], ["lm_head.weight"]) and not unexpected
        model.tie_weights()
        return model.eval()


class NemotronH:
    """The sibling. A layer of this family is one thing, so that each of ours is two: attention, and what follows it."""

    architecture = "nemotron_h"
    name = "Lacuna demo, sparse"
    description = (
        "A very small language model that explains Rust, most of whose activations are exactly zero, made to test Lacuna. "
        + SOURCE
    )
    file = "lacuna-demo-sparse-q8_0.gguf"
    reference = "reference-sparse.json"
    # By part of our layer, which of the two it is in, and its names in GGUF and in transformers.
    parts = {
        "input_layernorm": (0, "attn_norm", "norm"),
        "self_attn.q_proj": (0, "attn_q", "mixer.q_proj"),
        "self_attn.k_proj": (0, "attn_k", "mixer.k_proj"),
        "self_attn.v_proj": (0, "attn_v", "mixer.v_proj"),
        "self_attn.o_proj": (0, "attn_output", "mixer.o_proj"),
        "post_attention_layernorm": (1, "attn_norm", "norm"),
        "mlp.up_proj": (1, "ffn_up", "mixer.up_proj"),
        "mlp.down_proj": (1, "ffn_down", "mixer.down_proj"),
    }

    @classmethod
    def place(cls, name):
        """The layer of a parameter, and its names there."""
        _, layer, part = name.split(".", 2)
        second, gguf, transformers = cls.parts[part.removesuffix(".weight")]
        return 2 * int(layer) + second, gguf, transformers

    @classmethod
    def tensor_name(cls, name):
        """The GGUF name of a parameter."""
        if name in WHOLE:
            return WHOLE[name]
        layer, part, _ = cls.place(name)
        return f"blk.{layer}.{part}.weight"

    @staticmethod
    def add_sizes(writer, shape):
        """What the file says of layers."""
        layers = shape.num_hidden_layers
        writer.add_block_count(2 * layers)
        writer.add_feed_forward_length([0, shape.intermediate_size] * layers)
        writer.add_head_count_kv([shape.num_key_value_heads, 0] * layers)
        writer.add_rope_dimension_count(shape.head_dim)
        # Says to readers of the family that attention has no rotary positions.
        writer.add_rope_scaling_finetuned(False)
        # No layer has a state, but every file of the family says how large they are.
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(16)
        writer.add_ssm_group_count(1)
        writer.add_ssm_time_step_rank(shape.num_attention_heads)
        writer.add_ssm_inner_size(shape.num_attention_heads * shape.head_dim)

    @classmethod
    def reference_model(cls, shape, weights):
        """That of transformers with the given weights."""
        config = NemotronHConfig(
            **sizes(shape),
            layers_block_type=["full_attention", "mlp"] * shape.num_hidden_layers,
            layer_norm_epsilon=shape.rms_norm_eps,
            tie_word_embeddings=False,
            use_cache=False,
        )
        model = NemotronHForCausalLM(config)
        embedding = weights["embed_tokens.weight"]
        # It ties nothing by itself.
        named = {"model.embeddings.weight": embedding, "lm_head.weight": embedding, "model.norm_f.weight": weights["norm.weight"]}
        for name, value in weights.items():
            if name not in WHOLE:
                layer, _, part = cls.place(name)
                named[f"model.layers.{layer}.{part}.weight"] = value
        model.load_state_dict(named)
        return model.eval()


def sizes(shape):
    """Those that both configurations call the same."""
    names = (
        "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
        "max_position_embeddings",
    )
    return {name: getattr(shape, name) for name in names}


def family_of(shape):
    """That of a network of this shape."""
    return NemotronH if shape.sparse else Qwen3
