"""Qwen3 beyond its trained context, and the text of Qwen2-VL and Qwen3-VL."""

import gguf
from transformers import Qwen2VLConfig, Qwen3Config, Qwen3VLConfig

from .fixture import SMALL, Fixture

TEXT = SMALL | {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


def qwen3_yarn() -> Fixture:
    config = Qwen3Config(
        **TEXT, architectures=["Qwen3ForCausalLM"], head_dim=8, tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
        },
    )

    def old_spelling(config):
        del config["layer_types"]
        rope = config.pop("rope_parameters")
        theta = rope.pop("rope_theta")
        return config | {"rope_theta": theta, "rope_scaling": rope}

    return Fixture("qwen3-yarn", config, 117, gguf.MODEL_ARCH.QWEN3, old_spelling=old_spelling)


def qwen2_vl() -> Fixture:
    """Heads of 8: a rotation of three sections, which text turns alike."""
    text = TEXT | {
        "hidden_size": 32, "intermediate_size": 16, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]},
    }
    vision = {"depth": 1, "embed_dim": 8, "hidden_size": 32, "num_heads": 2, "patch_size": 2, "mlp_ratio": 1}
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, architectures=["Qwen2VLForConditionalGeneration"],
        image_token_id=63, video_token_id=62, vision_start_token_id=61, vision_end_token_id=60,
    )

    def old_spelling(config):
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        for key in ("layer_types", "dtype", "model_type"):
            text.pop(key, None)
        return config | text | {
            "rope_theta": rope["rope_theta"],
            "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        }

    return Fixture("qwen2-vl", config, 118, gguf.MODEL_ARCH.QWEN2VL, old_spelling=old_spelling, below=60)


def qwen3_vl() -> Fixture:
    """As Qwen2-VL, with query and key norms, sections that alternate, and inner features of the picture."""
    text = TEXT | {
        "head_dim": 8, "rope_parameters": {
            "rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "patch_size": 2,
        "spatial_merge_size": 1, "out_hidden_size": 16, "num_position_embeddings": 4,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, architectures=["Qwen3VLForConditionalGeneration"],
        image_token_id=63, video_token_id=62, vision_start_token_id=61, vision_end_token_id=60,
        tie_word_embeddings=True,
    )

    def parameters(writer, config):
        writer.add_num_deepstack_layers(len(config["vision_config"]["deepstack_visual_indexes"]))

    return Fixture("qwen3-vl", config, 119, gguf.MODEL_ARCH.QWEN3VL, parameters, below=60)
