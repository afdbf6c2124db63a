"""Gemma 1, 2, 3, 3n and 4. Norms of 1, 2 and 3 are stored less one in `hf/`, and whole in GGUF."""

import gguf
import numpy as np
from transformers import GemmaConfig, Gemma2Config, Gemma3Config, Gemma3nTextConfig, Gemma3TextConfig, Gemma4TextConfig

from .fixture import SMALL, VOCAB, Fixture, Tensors, each

WINDOW = 8


@each
def whole_norms(name: str, values: np.ndarray) -> np.ndarray:
    return values + np.float32(1) if name.endswith("norm.weight") else values


def alternating(count: int, full_every: int) -> list[str]:
    return ["full_attention" if (layer + 1) % full_every == 0 else "sliding_attention" for layer in range(count)]


def gemma1() -> Fixture:
    """Published folders say `gelu` for the approximation that it is computed with."""
    config = GemmaConfig(
        **SMALL, architectures=["GemmaForCausalLM"], hidden_size=16, intermediate_size=24, num_hidden_layers=2, head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )

    def old_spelling(config):
        rope = config.pop("rope_parameters")
        del config["use_bidirectional_attention"]
        # Published ones say nothing of tied matrices.
        del config["tie_word_embeddings"]
        return config | {"rope_theta": rope["rope_theta"], "rope_scaling": None}

    return Fixture(
        "gemma", config, 160, gguf.MODEL_ARCH.GEMMA, convert=whole_norms, old_spelling=old_spelling, norm_center=0.0,
    )


def gemma2() -> Fixture:
    """Caps small enough to bend the scores; the pattern (every second layer full) is not in GGUF."""
    config = Gemma2Config(
        **SMALL, architectures=["Gemma2ForCausalLM"], hidden_size=16, intermediate_size=24, num_hidden_layers=4,
        head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
    )

    def parameters(writer, config):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_sliding_window(config["sliding_window"])

    def old_spelling(config):
        del config["layer_types"]
        return config | {"rope_theta": config.pop("rope_parameters")["rope_theta"]}

    return Fixture(
        "gemma2", config, 101, gguf.MODEL_ARCH.GEMMA2, parameters, whole_norms,
        old_spelling=old_spelling, norm_center=0.0,
    )


def gemma3() -> Fixture:
    """Twelve layers, because the pattern of six is not in GGUF."""
    config = Gemma3TextConfig(
        **SMALL, architectures=["Gemma3ForCausalLM"], hidden_size=8, intermediate_size=8, num_hidden_layers=12,
        head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 2000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    )

    def parameters(writer, config):
        writer.add_sliding_window(config["sliding_window"])

    def old_spelling(config):
        del config["layer_types"]
        rope = config.pop("rope_parameters")
        return config | {
            "sliding_window_pattern": 6,
            "rope_theta": rope["full_attention"]["rope_theta"],
            "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
            "rope_scaling": None,
        }

    return Fixture(
        "gemma3", config, 102, gguf.MODEL_ARCH.GEMMA3, parameters, whole_norms,
        old_spelling=old_spelling, norm_center=0.0,
    )


def gemma3_multimodal() -> Fixture:
    """The text inside the wrapper: a linear factor on full layers only, and a scale that no GGUF key can say."""
    text = Gemma3TextConfig(
        **SMALL, hidden_size=16, intermediate_size=24, num_hidden_layers=4, head_dim=8,
        query_pre_attn_scalar=13, sliding_window=WINDOW, layer_types=alternating(4, 2),
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 8, "patch_size": 4, "model_type": "siglip_vision_model",
    }
    config = Gemma3Config(
        text_config=text, vision_config=vision, architectures=["Gemma3ForConditionalGeneration"],
        mm_tokens_per_image=4, image_token_index=63, boi_token_index=62, eoi_token_index=61,
    )

    def old_spelling(config):
        text = config["text_config"]
        del text["layer_types"]
        rope = text.pop("rope_parameters")
        text |= {
            "sliding_window_pattern": 2,
            "rope_theta": rope["full_attention"]["rope_theta"],
            "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
            "rope_scaling": {"rope_type": "linear", "factor": rope["full_attention"]["factor"]},
        }
        return config

    return Fixture("gemma3-multimodal", config, 103, old_spelling=old_spelling, norm_center=0.0, below=60)


def gemma3n() -> Fixture:
    """Two sparse layers, two that use the keys and values of earlier ones, fewer per-layer rows than tokens."""
    rows = 56
    config = Gemma3nTextConfig(
        **SMALL, architectures=["Gemma3nForCausalLM"], hidden_size=32, intermediate_size=64, num_hidden_layers=6,
        head_dim=8, sliding_window=WINDOW, layer_types=alternating(6, 2), num_kv_shared_layers=2,
        vocab_size_per_layer_input=rows, hidden_size_per_layer_input=4, laurel_rank=4,
        activation_sparsity_pattern=[0.8, 0.8, 0.0, 0.0, 0.0, 0.0], final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 2000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    )

    def parameters(writer, config):
        from statistics import NormalDist

        writer.add_sliding_window(config["sliding_window"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_altup_active_idx(config["altup_active_idx"])
        writer.add_altup_num_inputs(config["altup_num_inputs"])
        writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
        writer.add_shared_kv_layers(config["num_kv_shared_layers"])
        parts = config["activation_sparsity_pattern"]
        writer.add_activation_sparsity_scale([NormalDist().inv_cdf(part) if part > 0 else -np.inf for part in parts])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])

    def convert(tensors: Tensors) -> Tensors:
        """Three matrices of a kind become one tensor; missing per-layer rows are zeros."""
        for kind in ("altup_projections", "altup_unembed_projections"):
            parts = [tensors.pop(f"model.{kind}.{place}.weight") for place in range(3)]
            tensors[f"model.{kind}.weight"] = np.stack(parts)
        table = "model.embed_tokens_per_layer.weight"
        tensors[table] = np.pad(tensors[table], ((0, config.vocab_size - rows), (0, 0)))
        return tensors

    return Fixture("gemma3n", config, 104, gguf.MODEL_ARCH.GEMMA3N, parameters, convert, below=rows)


def gemma4_parameters(writer, config) -> None:
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    shared = config["num_kv_shared_layers"]
    writer.add_sliding_window(config["sliding_window"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern(windowed)
    full = config["per_layer_config"][str(windowed.index(False))]
    writer.add_key_length(full["head_dim"])
    writer.add_value_length(full["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    if config["use_double_wide_mlp"]:
        first_shared, width = config["num_hidden_layers"] - shared, config["intermediate_size"]
        widths = [width if layer < first_shared else 2 * width for layer in range(config["num_hidden_layers"])]
        writer.add_feed_forward_length(widths)
    if "num_key_value_heads" in full:
        kv_heads = (full["num_key_value_heads"], config["num_key_value_heads"])
        writer.add_head_count_kv([kv_heads[window] for window in windowed])
    writer.add_rope_dimension_count(full["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])


def proportional(head_dim: int, rotated_part: float) -> dict[str, np.ndarray]:
    """Divisors of the full layers' rotation: 1 for the pairs that turn, 1e30 for those that do not."""
    turned = int(head_dim * rotated_part / 2)
    factors = np.full(head_dim // 2, 1e30, np.float32)
    factors[:turned] = 1
    return {"rope_freqs.weight": factors}


def gemma4_rope(rotated_part: float) -> dict:
    return {
        "full_attention": {
            "rope_type": "proportional", "partial_rotary_factor": rotated_part, "rope_theta": 2000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    }


def gemma4_old_spelling(config: dict) -> dict:
    layers = config.pop("per_layer_config")
    full = next(iter(layers.values()))
    return config | {
        "global_head_dim": full["head_dim"],
        "num_global_key_value_heads": full.get("num_key_value_heads"),
    }


def gemma4() -> Fixture:
    """An E-model: per-layer embeddings, the last four layers without keys and values and twice as wide."""
    config = Gemma4TextConfig(
        **SMALL, architectures=["Gemma4ForCausalLM"], hidden_size=8, intermediate_size=8, num_hidden_layers=8,
        head_dim=8, global_head_dim=16, sliding_window=WINDOW, final_logit_softcapping=3.0,
        layer_types=alternating(8, 2), rope_parameters=gemma4_rope(0.5),
        vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8,
        num_kv_shared_layers=4, use_double_wide_mlp=True,
    )
    return Fixture(
        "gemma4", config, 121, gguf.MODEL_ARCH.GEMMA4, gemma4_parameters,
        extra=proportional(16, 0.5), old_spelling=gemma4_old_spelling,
        centers={".post_": 0.4, "q_norm": 0.5},
    )


def gemma4_dense() -> Fixture:
    """Full layers with heads of another size and count, whose keys before norm and rotation are the values."""
    config = Gemma4TextConfig(
        **SMALL, architectures=["Gemma4ForCausalLM"], hidden_size=16, intermediate_size=12, num_hidden_layers=4,
        head_dim=8, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True,
        sliding_window=WINDOW, final_logit_softcapping=3.0, layer_types=alternating(4, 2),
        rope_parameters=gemma4_rope(0.25), hidden_size_per_layer_input=0,
    )
    return Fixture(
        "gemma4-dense", config, 106, gguf.MODEL_ARCH.GEMMA4, gemma4_parameters,
        extra=proportional(16, 0.25), old_spelling=gemma4_old_spelling,
    )


def gemma4_experts() -> Fixture:
    """A block that all tokens have and chosen experts, with norms of their own."""
    config = Gemma4TextConfig(
        **SMALL, architectures=["Gemma4ForCausalLM"], hidden_size=16, intermediate_size=12, num_hidden_layers=4,
        head_dim=8, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True,
        sliding_window=WINDOW, final_logit_softcapping=3.0, layer_types=alternating(4, 2),
        rope_parameters=gemma4_rope(0.25), hidden_size_per_layer_input=0,
        enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=8,
    )

    def parameters(writer, config):
        gemma4_parameters(writer, config)
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])

    def convert(tensors):
        made = {}
        for name, values in tensors.items():
            block = ".".join(["blk", *name.split(".")[2:3]])
            scales = {"router.scale.weight": "ffn_gate_inp.scale", "router.per_expert_scale.weight": "ffn_down_exps.scale"}
            scale = next((gguf for theirs, gguf in scales.items() if name.endswith(theirs)), None)
            made[name if scale is None else f"{block}.{scale}"] = values
        return made

    return Fixture(
        "gemma4-experts", config, 148, gguf.MODEL_ARCH.GEMMA4, parameters, convert,
        extra=proportional(16, 0.25), old_spelling=gemma4_old_spelling,
    )
