"""Mistral's models that see: Pixtral with a row for each patch, and Mistral 3 with one for a square of them."""

import dataclasses
import json
import pathlib

import gguf
import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load_file
from transformers import LlavaConfig, Mistral3Config, PixtralImageProcessor

from . import models, multimodal
from .families import fixture
from .families.fixture import Fixture

PATCH, LONGEST = 4, 32  # pixels
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
IMG, BREAK, END = (SPECIAL.index(f"[{name}]") for name in ("IMG", "IMG_BREAK", "IMG_END"))
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST]{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}[IMG]{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'user' %}[/INST]{% else %}{{ eos_token }}{% endif %}{% endfor %}"
)
VOCABULARY = multimodal.Vocabulary(SPECIAL, multimodal.tokens_with(SPECIAL), TEMPLATE, eos="</s>", bos="<s>")
PREPROCESSOR = multimodal.CLIP_PREPROCESSOR | {
    "image_processor_type": "PixtralImageProcessor", "patch_size": {"height": PATCH, "width": PATCH}, "size": {"longest_edge": LONGEST},
}
TEXT = {**fixture.SMALL, "model_type": "mistral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8,
        "sliding_window": None, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
VISION = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": LONGEST, "patch_size": PATCH, "hidden_act": "silu"}


@dataclasses.dataclass(frozen=True)
class Seeing:
    """A tiny model, and the sizes of the images that it is shown: wide, tall, and small."""

    made: Fixture
    merged: int
    sizes: list[tuple[int, int]]


def pixtral() -> Seeing:
    config = LlavaConfig(text_config=TEXT, vision_config=VISION, architectures=["LlavaForConditionalGeneration"],
                         image_token_index=IMG, vision_feature_layer=-1, vision_feature_select_strategy="full")
    made = Fixture("pixtral", config, 621, gguf.MODEL_ARCH.LLAMA, multimodal.add_llama, fixture.permuted(4, 2))
    return Seeing(made, 1, [(24, 8), (8, 20), (4, 4)])


def mistral3() -> Seeing:
    vision = VISION | {"hidden_act": "gelu"}
    config = Mistral3Config(text_config=TEXT, vision_config=vision, architectures=["Mistral3ForConditionalGeneration"],
                            image_token_index=IMG, spatial_merge_size=2, tie_word_embeddings=False)
    made = Fixture("mistral3", config, 622, gguf.MODEL_ARCH.MISTRAL3, multimodal.add_llama, fixture.permuted(4, 2))
    # Of an image that is one row, transformers takes the row's elements for rows.
    return Seeing(made, 2, [(32, 16), (16, 24), (8, 16)])


# --- files -----------------------------------------------------------------------------------


def write_projector(seeing: Seeing, folder: pathlib.Path) -> None:
    """The encoder and the projector as the converter writes them: queries and keys permuted as those of decoders are, and
    a row of the decoder's table, unnamed."""
    config = json.loads((folder / "hf" / "config.json").read_text())
    vision = config["vision_config"]
    writer = multimodal.projector(folder / "mmproj.gguf", None, config)
    writer.add_vision_image_mean(multimodal.CLIP_MEAN)
    writer.add_vision_image_std(multimodal.CLIP_DEVIATION)
    writer.add_clip_projector_type(gguf.VisionProjectorType.PIXTRAL)
    writer.add_vision_attention_layernorm_eps(1e-5)
    if vision["hidden_act"] == "silu":
        writer.add_vision_use_silu(True)
    else:
        writer.add_vision_use_gelu(True)
    if "spatial_merge_size" in config:
        writer.add_vision_spatial_merge_size(config["spatial_merge_size"])
    # The two of the projector are numbered as blocks are.
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(vision["num_hidden_layers"], 3))
    for name, values in load_file(folder / "hf" / "model.safetensors").items():
        name = name.removeprefix("model.")
        if name.endswith("embed_tokens.weight"):
            writer.add_tensor("v.token_embd.img_break", np.ascontiguousarray(values[BREAK]))
        if not name.startswith(("vision_tower.", "multi_modal_projector.")):
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = models.permute(values, vision["num_attention_heads"])
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        writer.add_tensor(found, np.ascontiguousarray(values))
    models.close(writer)


# --- expected --------------------------------------------------------------------------------


def parts_of(image: int, rows: int) -> list:
    """An image row by row, with the marks between."""
    parts = [part for row in range(rows) for part in ({"image": image, "row": row}, BREAK)]
    return [*parts[:-1], END]


@torch.no_grad()
def expected(folder: pathlib.Path, seeing: Seeing) -> None:
    loaded, random, images = multimodal.load_and_draw(folder, seeing.made, seeing.sizes)
    processor = PixtralImageProcessor.from_pretrained(folder / "hf")
    unit = PATCH * seeing.merged
    grids = [(height // unit, width // unit) for width, height in seeing.sizes]
    pixels = []
    for image in images:
        channels = torch.from_numpy(image.transpose(2, 0, 1).copy())
        pixels.append(multimodal.normed(channels.flatten(1)).reshape(channels.shape))
        made = processor(Image.fromarray(image), patch_size={"height": unit, "width": unit}, return_tensors="pt")["pixel_values"][0]
        assert made.shape == pixels[-1].shape and torch.allclose(pixels[-1], made.double(), atol=1e-6)
    rows = []
    for values in pixels:
        found = loaded.model.get_image_features(values[None], image_sizes=torch.tensor([values.shape[-2:]]), return_dict=True)
        rows.append(found.pooler_output[0])
    multimodal.write_rows(folder / "features.f32", rows)

    def logits_of(parts, which):
        tokens = torch.tensor([multimodal.tokens_of(parts, IMG, lambda image: grids[image][1])])
        sizes = torch.tensor([pixels[image].shape[-2:] for image in which])
        padded = torch.zeros(len(which), 3, *sizes.max(dim=0).values, dtype=torch.float64)
        for slot, image in zip(padded, which):
            slot[:, : pixels[image].shape[1], : pixels[image].shape[2]] = pixels[image]
        return loaded(input_ids=tokens, pixel_values=padded, image_sizes=sizes, use_cache=False).logits[0]

    cases = multimodal.write_cases(folder, random, VOCABULARY, lambda image: parts_of(image, grids[image][0]), logits_of)
    about = [{"size": size, "grid": grid} for size, grid in zip(seeing.sizes, grids)]
    multimodal.write_expected(folder, loaded.config.text_config.hidden_size, about, cases)


@fixture.in_double()
def make_one(folder: pathlib.Path, seeing: Seeing) -> None:
    torch.manual_seed(0)
    multimodal.write_hf(folder / "hf", seeing.made, VOCABULARY, PREPROCESSOR)
    multimodal.write_text(folder, seeing.made, VOCABULARY)
    write_projector(seeing, folder)
    expected(folder, seeing)


# --- preprocessing ---------------------------------------------------------------------------

UNIT = 8  # pixels
EDGES = [16, 40]


def preprocessing(images: pathlib.Path) -> None:
    """Files whose longer side is bounded."""

    def bounded(longest: int):
        processor = PixtralImageProcessor(patch_size={"height": UNIT, "width": UNIT}, size={"longest_edge": longest})

        def processed(image: Image.Image) -> np.ndarray:
            made = processor(image, do_normalize=False, do_rescale=False, return_tensors="np")["pixel_values"][0]
            return made.transpose(1, 2, 0)

        return {"longest_edge": longest}, processed

    multimodal.write_resized(images, "longest-edge", [bounded(longest) for longest in EDGES])


def make(out: pathlib.Path) -> None:
    for seeing in (pixtral(), mistral3()):
        make_one(out / "vision" / seeing.made.name, seeing)
    preprocessing(out / "images")
