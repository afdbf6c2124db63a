"""Models that see: tiny random ones, what their encoders make of images and what they say after text and images."""

import json
import pathlib

import gguf
import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.numpy import load_file
from transformers import Gemma3Config, Gemma3ImageProcessor, Gemma3TextConfig

from . import models, multimodal, tiled, vision_gemma4, vision_pixtral, vision_qwen
from .families import fixture, gemma
from .families.fixture import Fixture

SIDE, PATCH, KERNEL = 16, 4, 2  # pixels of an image and of a patch, and patches of a row of embeddings, a side
IMAGE_TOKENS = (SIDE // PATCH // KERNEL) ** 2
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_image>", "<end_of_image>", "<image_soft_token>",
           "<start_of_turn>", "<end_of_turn>"]
BEGIN, END, SOFT = (SPECIAL.index(name) for name in ("<start_of_image>", "<end_of_image>", "<image_soft_token>"))
# As bytes are written in vocabularies: line breaks, spaces, and what templates and tests write.
TOKENS = SPECIAL + [*"ĊĠ<>_", *multimodal.LETTERS[:-3], "AB"]
IMAGES = 3
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<start_of_image>{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
VOCABULARY = multimodal.Vocabulary(SPECIAL, TOKENS, TEMPLATE, eos="<eos>", bos="<bos>", pad="<pad>")
PREPROCESSOR = {
    "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 2,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "rescale_factor": 1 / 255,
    "image_processor_type": "Gemma3ImageProcessor", "size": {"height": SIDE, "width": SIDE},
}


def gemma3() -> Fixture:
    text = Gemma3TextConfig(
        **{**fixture.SMALL, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
        hidden_size=16, intermediate_size=24, num_hidden_layers=4, head_dim=8,
        query_pre_attn_scalar=8, sliding_window=gemma.WINDOW, layer_types=gemma.alternating(4, 2),
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    vision = {
        "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 3,
        "image_size": SIDE, "patch_size": PATCH, "model_type": "siglip_vision_model", "vision_use_head": False,
    }
    config = Gemma3Config(
        text_config=text, vision_config=vision, architectures=["Gemma3ForConditionalGeneration"],
        mm_tokens_per_image=IMAGE_TOKENS, image_token_index=SOFT, boi_token_index=BEGIN, eoi_token_index=END,
    )

    def parameters(writer, config):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])

    return Fixture("gemma3", config, 601, gguf.MODEL_ARCH.GEMMA3, parameters, gemma.whole_norms, norm_center=0.0,
                   centers={"vision_tower": 1.0})


# --- files -----------------------------------------------------------------------------------


def write_projector(folder: pathlib.Path) -> None:
    """The encoder and the projection as the converter writes them: names of their own, one norm whole."""
    config = json.loads((folder / "hf" / "config.json").read_text())
    vision = config["vision_config"]
    writer = multimodal.projector(folder / "mmproj.gguf", "gemma3", config)
    writer.add_vision_attention_layernorm_eps(vision["layer_norm_eps"])
    writer.add_vision_image_mean([0.5] * 3)
    writer.add_vision_image_std([0.5] * 3)
    writer.add_vision_use_gelu(True)
    writer.add_vision_projector_scale_factor(KERNEL)  # written where it is not 4
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["num_hidden_layers"])
    for name, values in load_file(folder / "hf" / "model.safetensors").items():
        if not name.startswith(("vision_tower.", "multi_modal_projector.")):
            continue
        name = name.replace("vision_tower.", "vision_tower.vision_model.")
        if "soft_emb_norm" in name:
            values = values + np.float32(1)
        plain = name.removesuffix("_weight") + ".weight" if name.endswith("projection_weight") else name
        found = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(found or {"multi_modal_projector.mm_input_projection.weight": "mm.input_projection.weight"}[plain],
                          np.ascontiguousarray(values))
    models.close(writer)


# --- expected --------------------------------------------------------------------------------


@torch.no_grad()
def expected(folder: pathlib.Path, made: Fixture) -> None:
    loaded, random, images = multimodal.load_and_draw(folder, made, [(SIDE, SIDE)] * IMAGES)
    pixels = torch.from_numpy(np.stack(images).transpose(0, 3, 1, 2)).double() / 255 * 2 - 1
    multimodal.write_rows(folder / "features.f32", [loaded.model.get_image_features(pixels).pooler_output])

    def logits_of(parts, which):
        tokens = torch.tensor([multimodal.tokens_of(parts, SOFT, lambda image: IMAGE_TOKENS)])
        return loaded(
            input_ids=tokens, pixel_values=pixels[which], token_type_ids=(tokens == SOFT).long(), use_cache=False,
        ).logits[0]

    cases = multimodal.write_cases(folder, random, VOCABULARY, lambda image: [BEGIN, {"image": image}, END], logits_of)
    side = SIDE // PATCH // KERNEL
    about = [{"size": [SIDE, SIDE], "grid": [side, side]}] * IMAGES
    multimodal.write_expected(folder, loaded.config.text_config.hidden_size, about, cases)


@fixture.in_double()
def make_one(folder: pathlib.Path, made: Fixture) -> None:
    torch.manual_seed(0)
    multimodal.write_hf(folder / "hf", made, VOCABULARY, PREPROCESSOR)
    multimodal.write_text(folder, made, VOCABULARY)
    write_projector(folder)
    expected(folder, made)


# --- preprocessing ---------------------------------------------------------------------------

TARGET = 24  # pixels of a side of what preprocessing makes


def photo(random, width: int, height: int) -> Image.Image:
    """Waves of all lengths and an edge, which resizing would show what is wrong with it."""
    row, column = np.mgrid[0:height, 0:width]
    channels = []
    for _ in range(3):
        waves = [np.sin(row * random.uniform(0, 2) + column * random.uniform(0, 2)) for _ in range(3)]
        channels.append(128 + 35 * sum(waves) + 60 * (row * 3 > column * 2 + random.uniform(0, 20)))
    return Image.fromarray(np.clip(np.stack(channels, axis=-1), 0, 255).astype(np.uint8))


def preprocessing(folder: pathlib.Path) -> None:
    """Files of all kinds, and what Pillow and transformers make of them."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(602)
    large, small, tall = photo(random, 67, 41), photo(random, 11, 13), photo(random, 30, 90)
    alpha = large.copy()
    alpha.putalpha(Image.fromarray(random.integers(0, 256, (41, 67), dtype=np.uint8)))
    turned = Image.Exif()
    turned[0x0112] = 6
    smooth = photo(np.random.default_rng(603), 160, 120).resize((64, 48), Image.Resampling.BICUBIC)
    files = {
        "large.png": large, "small.png": small, "tall.png": tall, "alpha.png": alpha, "gray.png": large.convert("L"),
        "palette.png": large.quantize(16), "two.gif": large.quantize(64), "lossless.webp": large, "lossy.webp": smooth,
        "photo.jpg": smooth, "progressive.jpg": smooth, "turned.jpg": smooth, "gray.jpg": smooth.convert("L"),
    }
    options = {
        "lossless.webp": {"lossless": True}, "lossy.webp": {"quality": 90}, "photo.jpg": {"quality": 90},
        "progressive.jpg": {"quality": 90, "progressive": True}, "turned.jpg": {"quality": 90, "exif": turned},
        "two.gif": {"save_all": True, "append_images": [small.resize((67, 41)).quantize(8)]},
    }
    processor = Gemma3ImageProcessor(size={"height": TARGET, "width": TARGET}, do_pan_and_scan=False)
    about, pixels = {}, b""
    for name, image in files.items():
        image.save(folder / name, **options.get(name, {}))
        read = ImageOps.exif_transpose(Image.open(folder / name)).convert("RGB")
        made = {"Pillow": np.asarray(read.resize((TARGET, TARGET), Image.Resampling.BILINEAR)).tobytes()}
        values = processor(read, return_tensors="np")["pixel_values"][0]
        made["transformers"] = np.clip(np.round((values.transpose(1, 2, 0) * 0.5 + 0.5) * 255), 0, 255).astype(np.uint8).tobytes()
        about[name] = {"size": list(read.size), "lossy": name.endswith(".jpg")}
        pixels += b"".join(made.values())
    (folder / "expected.u8").write_bytes(pixels)  # of each file: Pillow's, and as transformers has it
    (folder / "expected.json").write_text(json.dumps({"side": TARGET, "files": about}) + "\n")


def make(out: pathlib.Path) -> None:
    made = gemma3()
    make_one(out / "vision" / made.name, made)
    preprocessing(out / "images")
    vision_qwen.make(out)
    vision_pixtral.make(out)
    vision_gemma4.make(out)
    tiled.make(out)
