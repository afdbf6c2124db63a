"""Models that see: tiny random ones, what their encoders make of images and what they say after text and images."""

import json
import pathlib

import gguf
import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.numpy import load_file
from transformers import Gemma3Config, Gemma3ImageProcessor, Gemma3TextConfig

from . import bpe, models, tiled, vision_pixtral, vision_qwen
from .families import fixture, gemma
from .families.fixture import Fixture

SIDE, PATCH, KERNEL = 16, 4, 2  # pixels of an image and of a patch, and patches of a row of embeddings, a side
IMAGE_TOKENS = (SIDE // PATCH // KERNEL) ** 2
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_image>", "<end_of_image>", "<image_soft_token>",
           "<start_of_turn>", "<end_of_turn>"]
BEGIN, END, SOFT = (SPECIAL.index(name) for name in ("<start_of_image>", "<end_of_image>", "<image_soft_token>"))
# As bytes are written in vocabularies: line breaks, spaces, and what templates and tests write.
TOKENS = SPECIAL + [*"ĊĠ<>_", *map(chr, range(ord("a"), ord("z") + 1)), *map(chr, range(ord("A"), ord("W") + 1)), "AB"]
IMAGES = 3
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<start_of_image>{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


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


def write_hf(folder: pathlib.Path, model: torch.nn.Module) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    made = bpe.tokenizer("qwen2", TOKENS, [("A", "B")], SPECIAL)
    (folder / "tokenizer.json").write_text(made.to_str() + "\n", encoding="utf-8")
    models.write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": False,
        "chat_template": TEMPLATE,
    })
    models.write_json(folder / "preprocessor_config.json", {
        "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 2,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "rescale_factor": 1 / 255,
        "image_processor_type": "Gemma3ImageProcessor", "size": {"height": SIDE, "width": SIDE},
    })
    (folder / "model.safetensors").chmod(0o644)


def write_text(made: Fixture, folder: pathlib.Path) -> None:
    config = fixture.text_config(json.loads((folder / "hf" / "config.json").read_text()))
    writer = gguf.GGUFWriter(folder / "model.gguf", gguf.MODEL_ARCH_NAMES[made.architecture])
    fixture.add_common(writer, config, made.says_heads)
    made.parameters(writer, config)
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (fixture.VOCAB - len(SPECIAL))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types(kinds)
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, values in fixture.gguf_tensors(made, folder, config["num_hidden_layers"]).items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    models.close(writer)


def write_projector(folder: pathlib.Path) -> None:
    """The encoder and the projection as the converter writes them: names of their own, one norm whole."""
    config = json.loads((folder / "hf" / "config.json").read_text())
    vision = config["vision_config"]
    writer = gguf.GGUFWriter(folder / "mmproj.gguf", "clip")
    writer.add_type("mmproj")
    writer.add_name("Tiny random projector")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("gemma3")
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_image_size(vision["image_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision["num_hidden_layers"])
    writer.add_vision_head_count(vision["num_attention_heads"])
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


def draw_images(random) -> list[np.ndarray]:
    """Soft gradients with noise, so that no two patches are alike."""
    row, column = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    made = []
    for _ in range(IMAGES):
        slopes = random.uniform(-200, 200, (2, 3))
        values = 128 + row[..., None] * slopes[0] + column[..., None] * slopes[1] + random.normal(0, 30, (SIDE, SIDE, 3))
        made.append(np.clip(np.round(values), 0, 255).astype(np.uint8))
    return made


def prompt(random, images: list[int]) -> list:
    """Text, images between their marks, and text; an image is written as `{"image": index}`."""
    text = lambda count: [int(token) for token in random.integers(len(SPECIAL), fixture.VOCAB, count)]
    parts = text(7)
    for image in images:
        parts += [BEGIN, {"image": image}, END, *text(5)]
    return parts


def tokens_of(parts: list) -> list[int]:
    return [token for part in parts for token in ([SOFT] * IMAGE_TOKENS if isinstance(part, dict) else [part])]


@torch.no_grad()
def expected(folder: pathlib.Path, made: Fixture) -> None:
    loaded = fixture.load(made, folder / "hf")
    random = np.random.default_rng(1000 + made.seed)
    images = draw_images(random)
    for index, image in enumerate(images):
        Image.fromarray(image).save(folder / f"image-{index}.png")
    np.stack(images).tofile(folder / "images.u8")  # the same, decoded: red, green and blue of each pixel, row by row
    pixels = torch.from_numpy(np.stack(images).transpose(0, 3, 1, 2)).double() / 255 * 2 - 1
    features = loaded.model.get_image_features(pixels).pooler_output
    features.to(torch.float32).numpy().astype("<f4").tofile(folder / "features.f32")
    cases, rows = [], []
    for which in ([0], [2, 0, 1]):
        parts = prompt(random, which)
        tokens = torch.tensor([tokens_of(parts)])
        logits = loaded(
            input_ids=tokens, pixel_values=pixels[which], token_type_ids=(tokens == SOFT).long(), use_cache=False,
        ).logits[0]
        rows.append(logits.to(torch.float32).numpy().astype("<f4"))
        cases.append({"parts": parts})
    np.concatenate(rows).tofile(folder / "logits.f32")
    side = SIDE // PATCH // KERNEL
    about = {"vocab": fixture.VOCAB, "width": loaded.config.text_config.hidden_size,
             "images": [{"size": [SIDE, SIDE], "grid": [side, side]}] * IMAGES, "cases": cases}
    (folder / "expected.json").write_text(json.dumps(about) + "\n")


@fixture.in_double()
def make_one(folder: pathlib.Path, made: Fixture) -> None:
    torch.manual_seed(0)
    write_hf(folder / "hf", fixture.draw(made))
    write_text(made, folder)
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
    tiled.make(out)
