"""Decoders with layer norms that have biases: StarCoder 2, StableLM and Nemotron 4."""

import gguf
from transformers import NemotronConfig, StableLmConfig, Starcoder2Config

from .fixture import SMALL, Fixture
from .gemma import whole_norms

SIZES = SMALL | {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
ROPE = {"rope_type": "default", "rope_theta": 100.0}


def starcoder2() -> Fixture:
    """All layers have a window in `hf/`, which the converter drops: it is longer than the text here, as it is in most use."""
    config = Starcoder2Config(**SIZES, architectures=["Starcoder2ForCausalLM"], sliding_window=64, rope_parameters=ROPE)

    def parameters(writer, config):
        writer.add_layer_norm_eps(config["norm_epsilon"])

    def old_spelling(config):
        rope = config.pop("rope_parameters")
        # Published ones say nothing of tied matrices.
        del config["tie_word_embeddings"]
        return config | {"rope_theta": rope["rope_theta"]}

    return Fixture("starcoder2", config, 170, gguf.MODEL_ARCH.STARCODER2, parameters, old_spelling=old_spelling)


def starcoder2_window() -> Fixture:
    config = Starcoder2Config(**SIZES, architectures=["Starcoder2ForCausalLM"], sliding_window=8, rope_parameters=ROPE)
    return Fixture("starcoder2-window", config, 171)


def stablelm_of(name: str, seed: int, parallel: bool) -> Fixture:
    config = StableLmConfig(
        **SIZES, architectures=["StableLmForCausalLM"], use_qkv_bias=True, use_parallel_residual=parallel,
        rope_parameters=ROPE | {"partial_rotary_factor": 0.25},
    )

    def parameters(writer, config):
        part = config["rope_parameters"]["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(part * (config["hidden_size"] // config["num_attention_heads"])))
        writer.add_parallel_residual(config["use_parallel_residual"])

    def old_spelling(config):
        rope = config.pop("rope_parameters")
        return config | {
            "rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"], "rope_scaling": None,
        }

    return Fixture(name, config, seed, gguf.MODEL_ARCH.STABLELM, parameters, old_spelling=old_spelling)


def stablelm() -> Fixture:
    return stablelm_of("stablelm", 172, parallel=False)


def stablelm_parallel() -> Fixture:
    return stablelm_of("stablelm-parallel", 173, parallel=True)


def nemotron() -> Fixture:
    """Norms are stored less one in `hf/`, their biases as they are."""
    config = NemotronConfig(
        **SIZES, architectures=["NemotronForCausalLM"], head_dim=8,
        rope_parameters=ROPE | {"partial_rotary_factor": 0.5},
    )

    def parameters(writer, config):
        writer.add_vocab_size(config["vocab_size"])
        writer.add_layer_norm_eps(config["norm_eps"])
        part = config["rope_parameters"]["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(part * config["hidden_size"]) // config["num_attention_heads"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)

    def old_spelling(config):
        rope = config.pop("rope_parameters")
        return config | {
            "rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"],
            "rope_percent": rope["partial_rotary_factor"],
        }

    return Fixture(
        "nemotron", config, 174, gguf.MODEL_ARCH.NEMOTRON, parameters, whole_norms, old_spelling=old_spelling,
        norm_center=0.0,
    )


FIXTURES = [starcoder2, starcoder2_window, stablelm, stablelm_parallel, nemotron]
