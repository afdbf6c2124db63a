"""Qwen's models that see: tiny random ones, what their encoders make of images of all shapes, what they say after text and
images, and what their preprocessing makes of files."""

import dataclasses
import json
import pathlib

import gguf
import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file
from transformers import (
    Qwen2_5_VLConfig, Qwen2VLConfig, Qwen2VLImageProcessor, Qwen3_5Config, Qwen3VLConfig, Qwen3VLMoeConfig,
)

from . import models, multimodal
from .families import delta, experts, fixture
from .families.fixture import Fixture

PATCH, MERGE = 4, 2
LEAST, MOST = 8 * 8, 64 * 64  # pixels
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
BEGIN, END, PAD, VIDEO = (SPECIAL.index(f"<|{name}|>") for name in ("vision_start", "vision_end", "image_pad", "video_pad"))
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = multimodal.Vocabulary(SPECIAL, multimodal.tokens_with(SPECIAL), TEMPLATE, eos="<|im_end|>", pad="<|endoftext|>")
PREPROCESSOR = multimodal.CLIP_PREPROCESSOR | {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2,
    "size": {"shortest_edge": LEAST, "longest_edge": MOST},
}
# Pixels of width and height: wide, tall, and as small as may be.
SIZES = [(64, 16), (16, 40), (8, 8)]
TEXT = {**fixture.SMALL, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 2, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKEN_IDS = {"image_token_id": PAD, "video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END}


@dataclasses.dataclass(frozen=True)
class Seeing:
    """A tiny model, and what is particular to its projector's file."""

    made: Fixture
    projector: str
    deepstack: int = 0


def rope(interleaved: bool) -> dict:
    """Heads of 16: eight pairs, in sections of four, two and two."""
    sections = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2]}
    return {"head_dim": 16, "rope_parameters": sections | ({"mrope_interleaved": True} if interleaved else {})}


def qwen3_vl() -> Seeing:
    vision = {
        "depth": 4, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE,
        "out_hidden_size": 16, "num_position_embeddings": 9, "deepstack_visual_indexes": [0, 2],
    }
    config = Qwen3VLConfig(text_config=TEXT | rope(True), vision_config=vision, tie_word_embeddings=True,
                           architectures=["Qwen3VLForConditionalGeneration"], **TOKEN_IDS)

    def parameters(writer, config):
        writer.add_num_deepstack_layers(len(config["vision_config"]["deepstack_visual_indexes"]))

    return Seeing(Fixture("qwen3-vl", config, 611, gguf.MODEL_ARCH.QWEN3VL, parameters), "qwen3vl_merger", 2)


def qwen3_vl_moe() -> Seeing:
    """Eight experts; in `hf/` their matrices lie the other way round, gates and ups in one."""
    text = TEXT | rope(True) | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE,
        "out_hidden_size": 16, "num_position_embeddings": 9, "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=True,
                              architectures=["Qwen3VLMoeForConditionalGeneration"], **TOKEN_IDS)

    def parameters(writer, config):
        experts.add_experts(writer, config)
        writer.add_num_deepstack_layers(len(config["vision_config"]["deepstack_visual_indexes"]))

    def convert(tensors):
        made = {}
        for name, values in tensors.items():
            block = name.removeprefix("model.layers.").split(".")[0]
            if name.endswith("experts.gate_up_proj.weight"):
                gate, up = np.split(values.swapaxes(1, 2), 2, axis=1)
                made |= {f"blk.{block}.ffn_gate_exps.weight": gate, f"blk.{block}.ffn_up_exps.weight": up}
            elif name.endswith("experts.down_proj.weight"):
                made[f"blk.{block}.ffn_down_exps.weight"] = values.swapaxes(1, 2)
            else:
                made[name] = values
        return made

    return Seeing(Fixture("qwen3-vl-moe", config, 615, gguf.MODEL_ARCH.QWEN3VLMOE, parameters, convert), "qwen3vl_merger", 1)


def qwen3_5() -> Seeing:
    """Layers with states; half of a head turns, four pairs."""
    sections = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
                "mrope_interleaved": True}
    text = delta.SIZES | {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 2, "rope_parameters": sections, "tie_word_embeddings": True}
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE,
        "out_hidden_size": 16, "num_position_embeddings": 16,
    }
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True,
                           architectures=["Qwen3_5ForConditionalGeneration"], **TOKEN_IDS)
    made = Fixture("qwen3.5", config, 614, gguf.MODEL_ARCH.QWEN35, delta.parameters, delta.convert(True), norm_center=0.0,
                   centers={"visual.": 1.0, **delta.CENTERS})
    return Seeing(made, "qwen3vl_merger")


def qwen2_text() -> dict:
    """Without `head_dim`, which its class does not know: heads of 8, in sections of two, one and one."""
    sections = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
    return TEXT | {"hidden_size": 32, "rope_parameters": sections, "tie_word_embeddings": False}


def qwen2_5_vl() -> Seeing:
    """Windows of 16 pixels, which are two by two squares of patches, in all but every second layer."""
    vision = {
        "depth": 4, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE,
        "window_size": 16, "fullatt_block_indexes": [1, 3], "out_hidden_size": 32,
    }
    config = Qwen2_5_VLConfig(text_config=qwen2_text(), vision_config=vision,
                              architectures=["Qwen2_5_VLForConditionalGeneration"], **TOKEN_IDS)
    return Seeing(Fixture("qwen2.5-vl", config, 612, gguf.MODEL_ARCH.QWEN2VL), "qwen2.5vl_merger")


def qwen2_vl() -> Seeing:
    vision = {"depth": 3, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE,
              "mlp_ratio": 3}
    config = Qwen2VLConfig(text_config=qwen2_text(), vision_config=vision, architectures=["Qwen2VLForConditionalGeneration"],
                           **TOKEN_IDS)
    return Seeing(Fixture("qwen2-vl", config, 613, gguf.MODEL_ARCH.QWEN2VL), "qwen2vl_merger")


# --- files -----------------------------------------------------------------------------------


def turn_experts(file: pathlib.Path) -> None:
    """As the mixtures are published, which transformers turns round when it loads them and not when it saves them."""
    tensors = {name: np.ascontiguousarray(values.swapaxes(1, 2)) if ".experts." in name else values
               for name, values in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def projector_name(name: str, deepstack: list[int], names) -> str:
    """As the converter calls a tensor of the encoder."""
    if name.startswith("visual.deepstack_merger_list."):
        number, part, suffix = name.removeprefix("visual.deepstack_merger_list.").split(".")
        return f"v.deepstack.{deepstack[int(number)]}.{part.replace('linear_', '')}.{suffix}"
    for theirs, converted in (("visual.merger.norm", "v.post_ln"), ("visual.merger.linear_fc1", "mm.0"),
                              ("visual.merger.linear_fc2", "mm.2")):
        if name.startswith(theirs):
            return converted + name.removeprefix(theirs)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def projector_tensors(name: str, values: np.ndarray, apart: bool):
    """The two frames of patches apart, and queries, keys and values where the converter takes those apart."""
    if name == "visual.patch_embed.proj.weight":
        yield from (("v.patch_embd.weight", values[:, :, 0]), ("v.patch_embd.weight.1", values[:, :, 1]))
    elif ".qkv." in name and apart:
        yield from ((name.replace("qkv", part), values) for part, values in zip("qkv", np.split(values, 3)))
    else:
        yield name, values


def write_projector(seeing: Seeing, folder: pathlib.Path) -> None:
    """The encoder and the merger as the converter writes them."""
    config = json.loads((folder / "hf" / "config.json").read_text())
    vision = config["vision_config"]
    positions = vision.get("num_position_embeddings")
    writer = multimodal.projector(
        folder / "mmproj.gguf", seeing.projector, config,
        image_size=560 if positions is None else int(positions**0.5 * PATCH),
        hidden_size=vision.get("embed_dim", vision["hidden_size"]),
        # Of Qwen2-VL it writes the width of the decoder.
        intermediate_size=vision.get("intermediate_size", vision["hidden_size"]),
        num_hidden_layers=vision["depth"], num_attention_heads=vision["num_heads"],
    )
    writer.add_vision_image_mean(multimodal.CLIP_MEAN)
    writer.add_vision_image_std(multimodal.CLIP_DEVIATION)
    writer.add_vision_min_pixels(LEAST)
    writer.add_vision_max_pixels(MOST)
    writer.add_vision_attention_layernorm_eps(1e-6)
    deepstack = vision.get("deepstack_visual_indexes", [])
    if newer := seeing.projector == "qwen3vl_merger":
        writer.add_vision_use_gelu(True)
        writer.add_vision_spatial_merge_size(MERGE)
        writer.add_vision_is_deepstack_layers([layer in deepstack for layer in range(vision["depth"])])
    if "fullatt_block_indexes" in vision:
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
        writer.add_vision_window_size(vision["window_size"])  # written where it is not 112
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["depth"])
    for name, values in load_file(folder / "hf" / "model.safetensors").items():
        name = name.removeprefix("model.")
        if not name.startswith("visual."):
            continue
        for name, values in projector_tensors(name, values, apart=not newer):
            found = name if name.startswith("v.") else projector_name(name, deepstack, names)
            writer.add_tensor(found, np.ascontiguousarray(values))
    models.close(writer)


# --- expected --------------------------------------------------------------------------------


@torch.no_grad()
def expected(folder: pathlib.Path, seeing: Seeing) -> None:
    loaded, random, images = multimodal.load_and_draw(folder, seeing.made, SIZES)
    processor = Qwen2VLImageProcessor.from_pretrained(folder / "hf")
    pixels, grids = [], []
    for image in images:
        made = processor(Image.fromarray(image), return_tensors="pt")
        grids.append(made["image_grid_thw"])
        # The same pixels in the same order.
        order = processor(Image.fromarray(image), do_normalize=False, do_rescale=False, return_tensors="pt")["pixel_values"]
        pixels.append(multimodal.normed(order.reshape(len(order), 3, -1)).reshape(len(order), -1))
        assert torch.allclose(pixels[-1], made["pixel_values"].double(), atol=1e-6)
    rows = []
    for values, grid in zip(pixels, grids):
        found = loaded.model.get_image_features(values, grid, return_dict=True)
        parts = [found.pooler_output[0]] + [one[0] for one in getattr(found, "deepstack_features", [])]
        rows.append(torch.cat(parts, dim=-1))
    multimodal.write_rows(folder / "features.f32", rows)

    def logits_of(parts, which):
        tokens = torch.tensor([multimodal.tokens_of(parts, PAD, lambda image: len(rows[image]))])
        return loaded(
            input_ids=tokens, pixel_values=torch.cat([pixels[image] for image in which]),
            image_grid_thw=torch.cat([grids[image] for image in which]), mm_token_type_ids=(tokens == PAD).int(), use_cache=False,
        ).logits[0]

    cases = multimodal.write_cases(folder, random, VOCABULARY, lambda image: [BEGIN, {"image": image}, END], logits_of)
    about = [{"size": size, "grid": [grid[0, 1].item() // MERGE, grid[0, 2].item() // MERGE]} for size, grid in zip(SIZES, grids)]
    multimodal.write_expected(folder, loaded.config.text_config.hidden_size, about, cases, deepstack=seeing.deepstack)


@fixture.in_double()
def make_one(folder: pathlib.Path, seeing: Seeing) -> None:
    torch.manual_seed(0)
    multimodal.write_hf(folder / "hf", seeing.made, VOCABULARY, PREPROCESSOR)
    if "moe" in seeing.made.config.model_type.split("_"):
        turn_experts(folder / "hf" / "model.safetensors")
    multimodal.write_text(folder, seeing.made, VOCABULARY)
    write_projector(seeing, folder)
    expected(folder, seeing)


# --- preprocessing ---------------------------------------------------------------------------

SQUARE = 14 * 14  # pixels, of two by two patches of 7
BOUNDS = [(4 * SQUARE, 16 * SQUARE), (SQUARE, 4 * SQUARE), (20 * SQUARE, 64 * SQUARE)]


def preprocessing(images: pathlib.Path) -> None:
    """Files within bounds that make them smaller, larger, or neither."""

    def within(least: int, most: int):
        processor = Qwen2VLImageProcessor(patch_size=7, size={"shortest_edge": least, "longest_edge": most})

        def processed(image: Image.Image) -> np.ndarray:
            made = processor(image, do_normalize=False, do_rescale=False, return_tensors="np")
            _, rows, columns = (int(count) for count in made["image_grid_thw"][0])
            blocks = made["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, 2, 7, 7)[:, :, :, :, :, 0]
            return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 7, columns * 7, 3)

        return {"least_pixels": least, "most_pixels": most}, processed

    multimodal.write_resized(images, "own-size", [within(*bounds) for bounds in BOUNDS])


def make(out: pathlib.Path) -> None:
    for seeing in (qwen3_vl(), qwen3_vl_moe(), qwen3_5(), qwen2_5_vl(), qwen2_vl()):
        make_one(out / "vision" / seeing.made.name, seeing)
    preprocessing(out / "images")
