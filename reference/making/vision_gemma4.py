"""Gemma 4 with its eyes: a small model, with products between bounds and inputs of its own for each layer, and a larger one,
whose images are seen as a whole in layers with a window."""

import json
import pathlib

import gguf
import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load_file
from transformers import Gemma4Config, Gemma4ImageProcessor, Gemma4TextConfig, Gemma4VisionConfig

from . import models, multimodal
from .families import fixture, gemma
from .families.fixture import Fixture

PATCH, POOLED = 4, 3  # pixels of a patch's side, and patches of that of a square which becomes a row
PLACES = 840  # of columns, and of rows: as many as the longest image has that GGUF files let be
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|image>", "<image|>", "<|image|>", "<|turn>", "<turn|>"]
BEGIN, END, SOFT = (SPECIAL.index(name) for name in ("<|image>", "<image|>", "<|image|>"))
TOKENS = [*SPECIAL, *"ĊĠ<>_|", *multimodal.LETTERS[:-4], "AB"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<|image|>{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
VOCABULARY = multimodal.Vocabulary(SPECIAL, TOKENS, TEMPLATE, eos="<eos>", bos="<bos>", pad="<pad>")
PREPROCESSOR = {
    "do_convert_rgb": True, "do_normalize": False, "do_rescale": True, "do_resize": True,
    "image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0], "image_processor_type": "Gemma4ImageProcessor",
    "max_soft_tokens": 280, "patch_size": PATCH, "pooling_kernel_size": POOLED, "resample": 3, "rescale_factor": 1 / 255,
}
# Wide, tall, and of more tokens than a window has.
SIZES = [(36, 24), (12, 60), (48, 36)]
TEXT = {**fixture.SMALL, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "head_dim": 8, "global_head_dim": 16,
        "sliding_window": gemma.WINDOW, "final_logit_softcapping": 3.0}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
          "head_dim": 8, "patch_size": PATCH, "pooling_kernel_size": POOLED, "position_embedding_size": PLACES,
          "max_position_embeddings": PLACES}
BOUNDS = {"input_min": -1.0, "input_max": 1.0, "output_min": -2.0, "output_max": 2.0}


def wrapped(text: Gemma4TextConfig, **vision) -> Gemma4Config:
    return Gemma4Config(
        text_config=text, vision_config=Gemma4VisionConfig(**VISION, **vision), audio_config=None,
        architectures=["Gemma4ForConditionalGeneration"], boi_token_id=BEGIN, eoi_token_id=END, image_token_id=SOFT,
    )


def gemma4() -> Fixture:
    text = Gemma4TextConfig(
        **TEXT, hidden_size=16, intermediate_size=12, num_hidden_layers=6, layer_types=gemma.alternating(6, 2),
        rope_parameters=gemma.gemma4_rope(0.5), vocab_size_per_layer_input=fixture.VOCAB, hidden_size_per_layer_input=8,
        num_kv_shared_layers=2, use_double_wide_mlp=True,
    )
    return Fixture(
        "gemma4", wrapped(text, use_clipped_linears=True), 660, gguf.MODEL_ARCH.GEMMA4, gemma.gemma4_parameters,
        extra=gemma.proportional(16, 0.5), centers={**BOUNDS, ".post_": 0.4, "q_norm": 0.5},
    )


def gemma4_dense() -> Fixture:
    text = Gemma4TextConfig(
        **TEXT, hidden_size=16, intermediate_size=12, num_hidden_layers=4, layer_types=gemma.alternating(4, 2),
        rope_parameters=gemma.gemma4_rope(0.25), hidden_size_per_layer_input=0, num_global_key_value_heads=1,
        attention_k_eq_v=True, use_bidirectional_attention="vision",
    )
    return Fixture(
        "gemma4-dense", wrapped(text, standardize=True), 642, gguf.MODEL_ARCH.GEMMA4, gemma.gemma4_parameters,
        extra=gemma.proportional(16, 0.25), centers={"q_norm": 0.5},
    )


# --- files -----------------------------------------------------------------------------------


def write_projector(folder: pathlib.Path, hears: bool) -> None:
    """The encoder and the projection as the converter writes them; of models that hear their ears are in the same file."""
    config = json.loads((folder / "hf" / "config.json").read_text())
    # The size of images is of no use, and has to be there.
    writer = multimodal.projector(folder / "mmproj.gguf", None, config, image_size=224)
    writer.add_vision_image_mean(PREPROCESSOR["image_mean"])
    writer.add_vision_image_std(PREPROCESSOR["image_std"])
    writer.add_clip_vision_projector_type(gguf.VisionProjectorType.GEMMA4V)
    writer.add_vision_attention_layernorm_eps(config.get("layer_norm_eps", 1e-6))
    if hears:
        writer.add_clip_has_audio_encoder(True)
        writer.add_clip_audio_projector_type(gguf.VisionProjectorType.GEMMA4A)
        for name in ("a.blk.0.attn_q.weight", "mm.a.input_projection.weight"):
            writer.add_tensor(name, np.zeros((2, 4), np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, config["vision_config"]["num_hidden_layers"])
    for name, values in load_file(folder / "hf" / "model.safetensors").items():
        if not name.startswith(("model.vision_tower.", "model.embed_vision.")):
            continue
        if values.ndim == 0:
            values = values[None]
        name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
        if name.endswith("position_embedding_table"):
            name += ".weight"
        if name.endswith("patch_embedder.input_proj.weight"):
            values = values.reshape(-1, PATCH, PATCH, 3).transpose(0, 3, 1, 2)
        found = names.get_name(name, try_suffixes=(".weight", ".bias", *(f".{bound}" for bound in BOUNDS)))
        assert found is not None, name
        writer.add_tensor(found, np.ascontiguousarray(values))
    models.close(writer)


# --- expected --------------------------------------------------------------------------------


def cut(image: np.ndarray, patches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The patches of an image, and their columns and rows, in double precision; behind them what stands for none."""
    height, width, _ = image.shape
    rows, columns = height // PATCH, width // PATCH
    values = image.reshape(rows, PATCH, columns, PATCH, 3).transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1) / 255
    places = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1).reshape(-1, 2)
    none = patches - rows * columns
    values, places = np.pad(values, ((0, none), (0, 0))), np.pad(places, ((0, none), (0, 0)), constant_values=-1)
    return torch.from_numpy(values), torch.from_numpy(places)


@torch.no_grad()
def expected(folder: pathlib.Path, made: Fixture) -> None:
    loaded, random, images = multimodal.load_and_draw(folder, made, SIZES)
    processor = Gemma4ImageProcessor.from_pretrained(folder / "hf")
    unit = PATCH * POOLED
    grids = [(height // unit, width // unit) for width, height in SIZES]
    rows = []
    for image, (down, across) in zip(images, grids):
        values, places = cut(image, down * across * POOLED**2)
        theirs = processor(Image.fromarray(image), do_resize=False, max_soft_tokens=70, return_tensors="pt")
        assert torch.allclose(theirs["pixel_values"][0, : len(values)].double(), values, atol=1e-6)
        assert torch.equal(theirs["image_position_ids"][0, : len(places)], places)
        assert theirs["num_soft_tokens_per_image"][0] == down * across
        rows += loaded.model.get_image_features(values[None], places[None], return_dict=True).pooler_output
    multimodal.write_rows(folder / "features.f32", rows)

    most = max(down * across for down, across in grids) * POOLED**2

    def logits_of(parts, which):
        tokens = torch.tensor([multimodal.tokens_of(parts, SOFT, lambda image: grids[image][0] * grids[image][1])])
        values, places = (torch.stack(of_all) for of_all in zip(*(cut(images[image], most) for image in which)))
        return loaded(
            input_ids=tokens, pixel_values=values, image_position_ids=places, mm_token_type_ids=(tokens == SOFT).long(),
            use_cache=False,
        ).logits[0]

    cases = multimodal.write_cases(folder, random, VOCABULARY, lambda image: [BEGIN, {"image": image}, END], logits_of)
    about = [{"size": size, "grid": grid} for size, grid in zip(SIZES, grids)]
    multimodal.write_expected(folder, loaded.config.text_config.hidden_size, about, cases)


@fixture.in_double()
def make_one(folder: pathlib.Path, made: Fixture) -> None:
    torch.manual_seed(0)
    multimodal.write_hf(folder / "hf", made, VOCABULARY, PREPROCESSOR)
    # As these models were published.
    (folder / "hf" / "preprocessor_config.json").unlink()
    models.write_json(folder / "hf" / "processor_config.json", {
        "image_processor": PREPROCESSOR, "image_seq_length": 280, "processor_class": "Gemma4Processor",
    })
    multimodal.write_text(folder, made, VOCABULARY)
    write_projector(folder, hears=made.name == "gemma4")
    expected(folder, made)


# --- preprocessing ---------------------------------------------------------------------------

SMALL_PATCH, SMALL_POOLED = 2, 2
BUDGETS = [70, 140]  # tokens


def preprocessing(images: pathlib.Path) -> None:
    """Files that are as large as their tokens have room for."""

    def filled(tokens: int):
        processor = Gemma4ImageProcessor(patch_size=SMALL_PATCH, pooling_kernel_size=SMALL_POOLED, max_soft_tokens=tokens)

        def processed(image: Image.Image) -> np.ndarray:
            made = processor(image, do_rescale=False, return_tensors="np")
            places = made["image_position_ids"][0]
            columns, rows = places.max(axis=0) + 1
            patches = made["pixel_values"][0][: rows * columns]
            patches = patches.reshape(rows, columns, SMALL_PATCH, SMALL_PATCH, 3)
            return patches.transpose(0, 2, 1, 3, 4).reshape(rows * SMALL_PATCH, columns * SMALL_PATCH, 3)

        side = SMALL_PATCH * SMALL_POOLED
        return {"most_pixels": tokens * side * side}, processed

    multimodal.write_resized(images, "filled", [filled(tokens) for tokens in BUDGETS])


def make(out: pathlib.Path) -> None:
    for made in (gemma4(), gemma4_dense()):
        make_one(out / "vision" / made.name, made)
    preprocessing(out / "images")
