"""What makers of models that see share: vocabularies, both forms of the text model, the head of projectors' files, images,
prompts, what is expected, and what images become in sizes of their own."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable

import gguf
import numpy as np
import torch
from PIL import Image, ImageOps

from . import bpe, models
from .families import fixture
from .families.fixture import Fixture

# What CLIP's pictures had on average, red, green and blue, which Qwen's and Mistral's encoders are given too.
CLIP_MEAN, CLIP_DEVIATION = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
# How images are made ready for such encoders; what is one processor's own is beside.
CLIP_PREPROCESSOR = {
    "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3,
    "image_mean": CLIP_MEAN, "image_std": CLIP_DEVIATION, "rescale_factor": 1 / 255,
}
LETTERS = [*map(chr, range(ord("a"), ord("z") + 1)), *map(chr, range(ord("A"), ord("Z") + 1))]


def tokens_with(special: list[str]) -> list[str]:
    """Those of `special`, then, as bytes are written in vocabularies, line breaks, spaces, and what templates and tests write."""
    return (special + [*"ĊĠ_."] + LETTERS)[: fixture.VOCAB - 1] + ["AB"]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """`tokens` are as bytes are written in vocabularies, those of `special` first; what has no token is None."""

    special: list[str]
    tokens: list[str]
    template: str
    eos: str
    bos: str | None = None
    pad: str | None = None
    merges: tuple[tuple[str, str], ...] = (("A", "B"),)

    def add(self, writer: gguf.GGUFWriter) -> None:
        ordinary = len(self.tokens) - len(self.special)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(self.tokens)
        writer.add_token_types([gguf.TokenType.CONTROL] * len(self.special) + [gguf.TokenType.NORMAL] * ordinary)
        writer.add_token_merges([" ".join(pair) for pair in self.merges])
        for add, token in ((writer.add_bos_token_id, self.bos), (writer.add_eos_token_id, self.eos), (writer.add_pad_token_id, self.pad)):
            if token is not None:
                add(self.special.index(token))
        writer.add_add_bos_token(False)
        writer.add_chat_template(self.template)

    def text(self, random, count: int) -> list[int]:
        """Tokens that are not special."""
        return [int(token) for token in random.integers(len(self.special), len(self.tokens), count)]


# --- files -----------------------------------------------------------------------------------


def write_hf(folder: pathlib.Path, made: Fixture, vocabulary: Vocabulary, preprocessor: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    fixture.draw(made).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer = bpe.tokenizer("qwen2", vocabulary.tokens, list(vocabulary.merges), vocabulary.special)
    (folder / "tokenizer.json").write_text(tokenizer.to_str() + "\n", encoding="utf-8")
    begin = {} if vocabulary.bos is None else {"bos_token": vocabulary.bos}
    models.write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", **begin, "eos_token": vocabulary.eos, "add_bos_token": False,
        "chat_template": vocabulary.template,
    })
    models.write_json(folder / "preprocessor_config.json", preprocessor)
    (folder / "model.safetensors").chmod(0o644)


def write_text(folder: pathlib.Path, made: Fixture, vocabulary: Vocabulary) -> None:
    config = fixture.text_config(json.loads((folder / "hf" / "config.json").read_text()))
    writer = gguf.GGUFWriter(folder / "model.gguf", gguf.MODEL_ARCH_NAMES[made.architecture])
    fixture.add_common(writer, config, made.says_heads)
    made.parameters(writer, config)
    vocabulary.add(writer)
    for name, values in fixture.gguf_tensors(made, folder, config["num_hidden_layers"]).items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    models.close(writer)


def add_llama(writer: gguf.GGUFWriter, config: dict) -> None:
    """What the converter writes of Llama and Mistral besides."""
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["head_dim"])


def projector(path: pathlib.Path, kind: str | None, config: dict, **sizes) -> gguf.GGUFWriter:
    """The beginning of an encoder's file; `sizes` are those that its configuration has under other names. The kind is None
    where the converter writes it later."""
    vision = config["vision_config"] | sizes
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_name("Tiny random projector")
    writer.add_clip_has_vision_encoder(True)
    if kind is not None:
        writer.add_clip_projector_type(kind)
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_image_size(vision["image_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision["num_hidden_layers"])
    writer.add_vision_head_count(vision["num_attention_heads"])
    return writer


# --- expected --------------------------------------------------------------------------------


def draw_images(random, sizes: list[tuple[int, int]]) -> list[np.ndarray]:
    """Of these widths and heights: soft gradients with noise, so that no two patches are alike."""
    made = []
    for width, height in sizes:
        row, column = np.mgrid[0:height, 0:width] / np.array([height, width])[:, None, None]
        slopes = random.uniform(-200, 200, (2, 3))
        values = 128 + row[..., None] * slopes[0] + column[..., None] * slopes[1]
        values += random.normal(0, 30, (height, width, 3))
        made.append(np.clip(np.round(values), 0, 255).astype(np.uint8))
    return made


def save_images(folder: pathlib.Path, images: list[np.ndarray]) -> None:
    for index, image in enumerate(images):
        Image.fromarray(image).save(folder / f"image-{index}.png")


def write_pixels(folder: pathlib.Path, pictures: list[np.ndarray]) -> None:
    """Red, green and blue of each pixel, row by row, of what the encoder is given."""
    (folder / "images.u8").write_bytes(b"".join(picture.tobytes() for picture in pictures))


def load_and_draw(folder: pathlib.Path, made: Fixture, sizes: list[tuple[int, int]]):
    """The model, random numbers, and images of these widths and heights, which are written."""
    loaded = fixture.load(made, folder / "hf")
    random = np.random.default_rng(1000 + made.seed)
    images = draw_images(random, sizes)
    save_images(folder, images)
    write_pixels(folder, images)
    return loaded, random, images


def normed(channels: torch.Tensor) -> torch.Tensor:
    """Bytes of `[..., 3, pixels]` by CLIP's mean and deviation, in double precision, which processors do not compute in."""
    mean, deviation = (torch.tensor(values).double()[:, None] for values in (CLIP_MEAN, CLIP_DEVIATION))
    return (channels.double() / 255 - mean) / deviation


def prompt(random, vocabulary: Vocabulary, images: list[list]) -> list:
    """Text, each image as it stands between its marks, and text; tokens of images are written as `{"image": index}`, with
    the number of the row or of the tile where those are apart."""
    parts = vocabulary.text(random, 7)
    for image in images:
        parts += [*image, *vocabulary.text(random, 5)]
    return parts


def tokens_of(parts: list, soft: int, count: Callable[[int], int]) -> list[int]:
    """With as many `soft` tokens in the place of an image, or of a part of it, as `count` says."""
    return [token for part in parts for token in ([soft] * count(part["image"]) if isinstance(part, dict) else [part])]


def write_rows(path: pathlib.Path, rows: list[torch.Tensor]) -> None:
    path.write_bytes(b"".join(some.to(torch.float32).numpy().astype("<f4").tobytes() for some in rows))


def write_cases(
    folder: pathlib.Path, random, vocabulary: Vocabulary, placed: Callable[[int], list],
    logits_of: Callable[[list, list[int]], torch.Tensor],
) -> list[dict]:
    """Prompts with an image and with several, each of which stands in them as `placed` has it, and what `logits_of` says of
    their parts and images."""
    cases, logits = [], []
    for which in ([0], [2, 0, 1]):
        parts = prompt(random, vocabulary, [placed(image) for image in which])
        logits.append(logits_of(parts, which))
        cases.append({"parts": parts})
    write_rows(folder / "logits.f32", logits)
    return cases


def write_expected(folder: pathlib.Path, width: int, images: list[dict], cases: list[dict], **more) -> None:
    about = {"vocab": fixture.VOCAB, "width": width, **more, "images": images, "cases": cases}
    (folder / "expected.json").write_text(json.dumps(about) + "\n")


# --- preprocessing ---------------------------------------------------------------------------


def write_resized(images: pathlib.Path, stem: str, cases: Iterable[tuple[dict, Callable[[Image.Image], np.ndarray]]]) -> None:
    """What the files in `images/` become in the sizes that transformers brings them to: by Pillow, along rows and then along
    columns, as it did until release 13. The torchvision that transformers has now keeps to that order, with weights of fewer
    bits (up to 2 in 255 from these). A case is what is said of it, and what makes `[height, width, 3]` of an image."""
    about, pixels = [], b""
    for said, processed in cases:
        sizes = {}
        for name in json.loads((images / "expected.json").read_text())["files"]:
            read = ImageOps.exif_transpose(Image.open(images / name)).convert("RGB")
            theirs = processed(read)
            height, width, _ = theirs.shape
            sizes[name] = [width, height]
            by_rows = read.resize((width, read.height), Image.Resampling.BICUBIC)
            whole = np.asarray(by_rows.resize((width, height), Image.Resampling.BICUBIC))
            assert np.abs(theirs.astype(float) - whole).max() < 2.5, name
            pixels += whole.tobytes()
        about.append({**said, "sizes": sizes})
    (images / f"{stem}.u8").write_bytes(pixels)
    (images / f"{stem}.json").write_text(json.dumps(about) + "\n")
