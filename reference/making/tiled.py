"""A model that sees images in tiles, Idefics 3 as SmolVLM has it: what its processor makes of images and prompts, what its
encoder makes of tiles, and what it says after text and images."""

import json
import pathlib

import gguf
import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load_file
from transformers import Idefics3Config, Idefics3ImageProcessor, Idefics3Processor, LlamaConfig, PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_idefics3 import get_resize_output_image_size
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from . import models, multimodal
from .families import fixture
from .families.fixture import Fixture

SIDE, PATCH, SCALE = 16, 4, 2  # pixels of a tile and of a patch, and patches of a row of embeddings, a side
LONGEST = 32  # pixels of the longer side of an image that is cut
TILE_TOKENS = (SIDE // PATCH // SCALE) ** 2
PLACES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
SPECIAL = ["<pad>", "<end_of_utterance>", "<|im_start|>", "<unk>", "<image>", "<fake_token_around_image>", "<global-img>", *PLACES]
# As bytes are written in vocabularies. Two line breaks are one token, as in SmolLM2.
TOKENS = SPECIAL + [*"ĊĠ<>_:-", *multimodal.LETTERS[:26], *"ABCDEFGHIJKLMNOPSU", "AB", "ĊĊ"]
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'] is string %}{{ ':' + message['content'] }}{% else %}{{ ':' }}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<image>{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
VOCABULARY = multimodal.Vocabulary(SPECIAL, TOKENS, TEMPLATE, eos="<end_of_utterance>", bos="<|im_start|>", pad="<pad>",
                                   merges=(("A", "B"), ("Ċ", "Ċ")))
# Widths and heights: of two rows, of two columns, of both, and so long that one side is a pixel for a moment.
SIZES = [(40, 20), (18, 37), (9, 9), (1, 120)]
PROMPTS = ["<|im_start|>User:ABC<image>abc<end_of_utterance>\nAssistant:", "AB<image>\n<image>c<image>\n\nd"]
SHOWN = [[0], [2, 1, 3]]  # by each prompt, of the images


def idefics3() -> Fixture:
    text = LlamaConfig(
        **{**fixture.SMALL, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, head_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    vision = {
        "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 3,
        "image_size": SIDE, "patch_size": PATCH,
    }
    config = Idefics3Config(
        text_config=text, vision_config=vision, architectures=["Idefics3ForConditionalGeneration"],
        scale_factor=SCALE, image_token_id=SPECIAL.index("<image>"), pad_token_id=0,
    )
    return Fixture("idefics3", config, 604, gguf.MODEL_ARCH.LLAMA, multimodal.add_llama, fixture.permuted(4, 2))


# --- files -----------------------------------------------------------------------------------


def settings(longest: int, side: int) -> dict:
    return {
        "do_resize": True, "size": {"longest_edge": longest}, "do_image_splitting": True, "max_image_size": {"longest_edge": side},
        "resample": 1, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_pad": True, "do_convert_rgb": True,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }


def write_projector(folder: pathlib.Path) -> None:
    """The encoder and the connector as the converter writes them."""
    config = json.loads((folder / "hf" / "config.json").read_text())
    vision = config["vision_config"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["num_hidden_layers"])
    tensors = load_file(folder / "hf" / "model.safetensors")
    tensors = {names.get_name(name, try_suffixes=(".weight", ".bias")): np.ascontiguousarray(values) for name, values in tensors.items()
               if name.startswith(("model.vision_model.", "model.connector."))}
    # Converters of before May 2025 took the names of the two matrices of feed-forward blocks for each other's.
    swap = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    older = {}
    for name, values in tensors.items():
        part = next((part for part in swap if part in name), None)
        older[name.replace(part, swap[part]) if part else name] = values
    (folder / "older").mkdir(exist_ok=True)
    for file, tensors in (("mmproj.gguf", tensors), ("older/mmproj.gguf", older)):
        writer = multimodal.projector(folder / file, "idefics3", config)
        writer.add_vision_attention_layernorm_eps(vision["layer_norm_eps"])
        writer.add_vision_image_mean([0.5] * 3)
        writer.add_vision_image_std([0.5] * 3)
        writer.add_vision_projector_scale_factor(config["scale_factor"])
        writer.add_vision_use_gelu(True)
        writer.add_vision_preproc_image_size(LONGEST)
        for name, values in tensors.items():
            writer.add_tensor(name, values)
        models.close(writer)


# --- expected --------------------------------------------------------------------------------


def bytes_of(values: np.ndarray) -> np.ndarray:
    """The bytes that `[..., 3, height, width]` was made of, `[..., height, width, 3]`."""
    return np.clip(np.round((np.moveaxis(values, -3, -1) * 0.5 + 0.5) * 255), 0, 255).astype(np.uint8)


def parts_of(tokens: list[int], pictures: list[dict]) -> list:
    """Tokens of text, and runs of those of images as what `pictures` has for each, in order."""
    soft, parts, rest = SPECIAL.index("<image>"), [], iter(pictures)
    place = 0
    while place < len(tokens):
        if tokens[place] != soft:
            parts.append(tokens[place])
            place += 1
            continue
        assert tokens[place:place + TILE_TOKENS] == [soft] * TILE_TOKENS
        parts.append(next(rest))
        place += TILE_TOKENS
    assert next(rest, None) is None
    return parts


@torch.no_grad()
def expected(folder: pathlib.Path, made: Fixture) -> None:
    loaded = fixture.load(made, folder / "hf")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "hf" / "tokenizer.json"), pad_token="<pad>")
    drawn = multimodal.draw_images(np.random.default_rng(1000 + made.seed), SIZES)
    multimodal.save_images(folder, drawn)
    photos = [Image.fromarray(image) for image in drawn]
    processor = Idefics3Processor(Idefics3ImageProcessor(**settings(LONGEST, SIDE)), tokenizer, image_seq_len=TILE_TOKENS)
    pictures, images = [], []  # of each image its tiles and the whole, and what is said of it
    for photo in photos:
        seen = processor.image_processor([photo], return_row_col_info=True, return_tensors="np")
        pictures.append(bytes_of(seen["pixel_values"][0]))
        side = SIDE // PATCH // SCALE
        images.append({"size": [SIDE, SIDE], "grid": [side, side], "tiles": [int(seen["rows"][0][0]), int(seen["cols"][0][0])]})
    multimodal.write_pixels(folder, pictures)
    pixels = [torch.from_numpy(tiles.transpose(0, 3, 1, 2)).double() / 255 * 2 - 1 for tiles in pictures]
    multimodal.write_rows(folder / "features.f32", [loaded.model.get_image_features(torch.cat(pixels)[None]).pooler_output[0]])
    cases, rows = [], []
    for text, shown in zip(PROMPTS, SHOWN):
        tokens = processor(images=[[photos[index] for index in shown]], text=[text])["input_ids"][0]
        # The encoder takes images that are all zero for padding; none is.
        rows.append(loaded(
            input_ids=torch.tensor([tokens]), pixel_values=torch.cat([pixels[index] for index in shown])[None], use_cache=False,
        ).logits[0])
        parts = parts_of(tokens, [{"image": index, "tile": tile} for index in shown for tile in range(len(pictures[index]))])
        cases.append({"text": text, "shown": shown, "parts": parts})
    multimodal.write_rows(folder / "logits.f32", rows)
    multimodal.write_expected(folder, loaded.config.text_config.hidden_size, images, cases)


@fixture.in_double()
def make_one(folder: pathlib.Path, made: Fixture) -> None:
    torch.manual_seed(0)
    preprocessor = {"image_processor_type": "Idefics3ImageProcessor", **settings(LONGEST, SIDE)}
    multimodal.write_hf(folder / "hf", made, VOCABULARY, preprocessor)
    multimodal.write_text(folder, made, VOCABULARY)
    write_projector(folder)
    expected(folder, made)


# --- preprocessing ---------------------------------------------------------------------------

# Of files in `images/`, and the pixels of a tile and of the longer side.
CUT = {"large.png": (24, 72), "small.png": (24, 60), "tall.png": (20, 80), "palette.png": (32, 32), "lossless.webp": (48, 47)}


def preprocessing(folder: pathlib.Path) -> None:
    """What both of transformers' implementations make of files in `folder`: tiles, and the whole behind them. Since version 13
    Pillow takes columns first where an image becomes much less tall; up to then, and in torchvision, rows are."""
    about, pixels = {}, b""
    for name, (side, longest) in CUT.items():
        image = Image.open(folder / name).convert("RGB")
        kinds = {"Pillow": Idefics3ImageProcessorPil, "torchvision": Idefics3ImageProcessor}
        if name == "tall.png":
            del kinds["Pillow"]
        for kind in kinds.values():
            seen = kind(**settings(longest, side))([image], return_row_col_info=True, return_tensors="np")
            rows, columns = int(seen["rows"][0][0]), int(seen["cols"][0][0])
            pixels += bytes_of(seen["pixel_values"][0]).tobytes()
        # Widths and heights before images are cut: with the longer side as long as it is to be, and in whole tiles.
        height, width = get_resize_output_image_size(torch.empty(3, image.height, image.width), longest)
        stretched = [max(columns, 1) * side, max(rows, 1) * side]
        about[name] = {"side": side, "resized": [width, height], "stretched": stretched, "rows": rows, "columns": columns, "by": list(kinds)}
    (folder / "tiles.u8").write_bytes(pixels)
    (folder / "tiles.json").write_text(json.dumps(about) + "\n")


def make(out: pathlib.Path) -> None:
    made = idefics3()
    make_one(out / "vision" / made.name, made)
    preprocessing(out / "images")
