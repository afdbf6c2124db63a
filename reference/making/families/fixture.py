"""What the families share: drawing weights, writing both forms, and asking transformers for logits."""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable

import gguf
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from .. import bpe, models

VOCAB = 64
# Every config of a tiny model: special ids inside the vocabulary, no rotation table beyond what is used.
SMALL = {
    "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}
# A stub vocabulary: letters, far from all bytes, and the special tokens that llama.cpp looks up by name.
SPECIAL = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
TOKENS = SPECIAL + [chr(ord("A") + index) for index in range(VOCAB - len(SPECIAL) - 1)] + ["AB"]
# Architectures whose conversion writes no rotation but what their own function says.
SILENT_ROPE = ("gemma2", "phi3", "nemotron_h", "nemotron_h_moe", "hunyuan-dense", "hunyuan-moe")
Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Fixture:
    """A tiny model. `convert` makes of the Hugging Face tensors what GGUF holds, under the same names."""

    name: str
    config: transformers.PreTrainedConfig
    seed: int
    architecture: gguf.MODEL_ARCH | None = None  # None: no GGUF file can say what this model is
    parameters: Callable[[gguf.GGUFWriter, dict], None] = lambda writer, config: None
    convert: Callable[[Tensors], Tensors] = lambda tensors: tensors
    extra: Tensors = dataclasses.field(default_factory=dict)  # GGUF tensors that no Hugging Face tensor becomes
    # `parameters` and `convert` of `model-older.gguf`, where older converters wrote another file.
    older: tuple[Callable[[gguf.GGUFWriter, dict], None], Callable[[Tensors], Tensors]] | None = None
    in_folder: bool = True  # False: `hf/` is of a model that computes the same, and is not kept
    says_heads: bool = False  # `parameters` says how many key/value heads there are, and how long heads are
    old_spelling: Callable[[dict], dict] | None = None
    # What folders of a class that transformers does not have call tensors and fields; `config` is of one that computes the same.
    published: tuple[Callable[[Tensors], Tensors], Callable[[dict], dict]] | None = None
    norm_center: float = 1.0  # 0 where the computation adds 1
    # Around what other norms are drawn, by part of their name: a deep model amplifies rounding otherwise.
    centers: dict[str, float] = dataclasses.field(default_factory=dict)
    tokens: int = 40
    below: int = VOCAB  # tokens of prompts are below this
    prompt: int = 8
    casts_by_type: bool = False  # its routers cast by `Tensor.type`, which others leave at float32
    called: str | None = None  # GGUF's name of an architecture that `gguf` does not know yet; the other names tensors
    context: int | None = None  # the configured context that `expected.json` is for, where it matters

    @property
    def model_class(self):
        return getattr(transformers, self.config.architectures[0])


# --- weights ---------------------------------------------------------------------------------


@torch.no_grad()
def draw(fixture: Fixture) -> torch.nn.Module:
    """The model with every parameter, and every buffer that is stored, drawn at random."""
    model = fixture.model_class(fixture.config)
    random = np.random.default_rng(fixture.seed)
    stored = model.state_dict(keep_vars=True)
    tied = set()
    for name in sorted(stored):
        if stored[name].data_ptr() not in tied:
            tied.add(stored[name].data_ptr())
            stored[name].copy_(torch.from_numpy(draw_one(random, name, tuple(stored[name].shape), fixture)))
    return model


def draw_one(random, name: str, shape: tuple[int, ...], fixture: Fixture) -> np.ndarray:
    """Multiples of a power of two, so that adding 1 to a norm or folding a number in is exact."""
    normal = random.standard_normal(shape)
    if name.endswith("layer_scalar"):
        values, step = 0.8 + 0.2 * np.clip(normal, -2, 2), 1 / 64
    elif name.endswith("bias"):
        values, step = 0.5 * normal, 1 / 128
    elif len(shape) <= 1:
        center = next((center for part, center in fixture.centers.items() if part in name), None)
        spread = 0.3 if center is None else 0.3 * center
        center, step = fixture.norm_center if center is None else center, 1 / 64
        values = center + spread * np.clip(normal, -2.5, 2.5)
    else:
        step = models.grid_step(shape[1])
        values = np.clip(34 * normal, -127, 127) * step
    return np.asarray(np.round(values / step) * step, np.float32)


# --- Hugging Face folder ---------------------------------------------------------------------


def write_hf(folder: pathlib.Path, model: torch.nn.Module) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    made = bpe.tokenizer("qwen2", TOKENS, [("A", "B")], SPECIAL)
    (folder / "tokenizer.json").write_text(made.to_str() + "\n", encoding="utf-8")
    (folder / "model.safetensors").chmod(0o644)


@contextlib.contextmanager
def in_double():
    """transformers casts norms, rotation, states and softmax to float32: these casts go to float64 instead."""
    cast, to, softmax = torch.Tensor.float, torch.Tensor.to, torch.nn.functional.softmax

    def wide_to(values, *rest, **named):
        wide = [torch.float64 if one is torch.float32 else one for one in rest]
        return to(values, *wide, **{name: torch.float64 if one is torch.float32 else one for name, one in named.items()})

    def wide_softmax(values, dim, dtype=None, **rest):
        return softmax(values, dim=dim, dtype=torch.float64, **rest)

    torch.Tensor.float, torch.Tensor.to, torch.nn.functional.softmax = torch.Tensor.double, wide_to, wide_softmax
    try:
        yield
    finally:
        torch.Tensor.float, torch.Tensor.to, torch.nn.functional.softmax = cast, to, softmax


@contextlib.contextmanager
def with_types_in_double():
    """The same of casts by `Tensor.type`."""
    as_type = torch.Tensor.type
    torch.Tensor.type = lambda values, kind: as_type(values, torch.float64 if kind is torch.float32 else kind)
    try:
        yield
    finally:
        torch.Tensor.type = as_type


def publish(fixture: Fixture, folder: pathlib.Path) -> None:
    """Writes the folder again as its own class has it."""
    rename, describe = fixture.published
    save_file(rename(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    settings = describe(json.loads((folder / "config.json").read_text()))
    settings.pop("transformers_version", None)
    settings["torch_dtype"] = settings.pop("dtype", "float32")
    models.write_json(folder / "config.json", settings)


def load(fixture: Fixture, folder: pathlib.Path) -> torch.nn.Module:
    loaded = fixture.model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    loaded.config._experts_implementation = "eager"  # the others have no float64
    return loaded.eval().double()


def write_old_spelling(folder: pathlib.Path, fixture: Fixture, about: dict, expected: np.ndarray) -> None:
    """`config.json` as the model was published with; asserted to mean the same to transformers."""
    settings = fixture.old_spelling(json.loads((folder / "hf" / "config.json").read_text()))
    settings.pop("transformers_version", None)
    settings["torch_dtype"] = settings.pop("dtype", "float32")
    at = folder / "hf-old-spelling"
    at.mkdir(exist_ok=True)
    models.write_json(at / "config.json", settings)
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(folder / "hf", scratch, dirs_exist_ok=True)
        shutil.copy(at / "config.json", scratch)
        again = models.logits(load(fixture, pathlib.Path(scratch)), about["tokens"])[about["rows"]]
    assert np.array_equal(again, expected), f"{fixture.name}: spellings differ"


# --- GGUF ------------------------------------------------------------------------------------


def text_config(config: dict) -> dict:
    """The keys of the text model, with those of a multimodal wrapper behind them. Lists of layers may say how many there are."""
    config = {**config, **config.get("text_config", {})}
    return {"num_hidden_layers": config.get("num_layers", len(config.get("layers_block_type", []))), **config}


def add_common(writer: gguf.GGUFWriter, config: dict, says_heads: bool) -> None:
    """What llama.cpp's converter writes for every text model."""
    writer.add_type("model")
    writer.add_name(f"Tiny random {writer.arch}")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    if "num_attention_heads" in config:
        add_decoder(writer, config, says_heads)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def add_decoder(writer: gguf.GGUFWriter, config: dict, says_heads: bool) -> None:
    """What models with attention and feed-forward blocks have besides."""
    writer.add_context_length(config["max_position_embeddings"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if not says_heads:
        writer.add_head_count_kv(config["num_key_value_heads"])
    if writer.arch not in SILENT_ROPE:
        # Folders that were published before there were such parameters have the base alone.
        add_rope(writer, config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config["rope_theta"]})
    if config.get("rms_norm_eps") is not None:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "layer_norm_eps" in config:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    if config.get("head_dim") is not None and not says_heads:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def add_rope(writer: gguf.GGUFWriter, rope: dict) -> None:
    full = rope.get("full_attention", rope)
    kind = full["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(full["factor"])
    if kind == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        if full.get("attention_factor") is not None:
            writer.add_rope_scaling_yarn_attn_factor(full["attention_factor"])
        if full.get("beta_fast") is not None:
            writer.add_rope_scaling_yarn_beta_fast(full["beta_fast"])
        if full.get("beta_slow") is not None:
            writer.add_rope_scaling_yarn_beta_slow(full["beta_slow"])
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0, 0][:4])
    writer.add_rope_freq_base(full["rope_theta"])
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])


def add_stub_vocabulary(writer: gguf.GGUFWriter) -> None:
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (VOCAB - len(SPECIAL))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types(kinds)
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)


def gguf_tensors(fixture: Fixture, folder: pathlib.Path, layers: int) -> Tensors:
    """The tensors of `hf/`, changed and renamed as the converter does."""
    names = gguf.get_tensor_name_map(fixture.architecture, layers)
    made = dict(fixture.extra)
    tensors = {text_name(name): values for name, values in load_file(folder / "hf" / "model.safetensors").items()}
    tensors.pop(None, None)
    for name, values in fixture.convert(tensors).items():
        found = name if name.startswith(("blk.", "cls.")) else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None and found not in made, name
        made[found] = values
    return made


def text_name(name: str) -> str | None:
    """A tensor's name without the multimodal wrapper's prefix; None if it is not of the text model."""
    if any(part in name for part in ("visual.", "vision_", "embed_vision.", "projector", "connector")):
        return None
    name = name.replace("language_model.", "").replace("text_model.", "").replace("model.model.", "model.")
    return name if name.endswith((".weight", ".bias")) else name + ".weight"


def write_gguf(fixture: Fixture, folder: pathlib.Path, name: str = "model.gguf") -> None:
    config = text_config(json.loads((folder / "hf" / "config.json").read_text()))
    writer = gguf.GGUFWriter(folder / name, fixture.called or gguf.MODEL_ARCH_NAMES[fixture.architecture])
    add_common(writer, config, fixture.says_heads)
    fixture.parameters(writer, config)
    add_stub_vocabulary(writer)
    for name, values in gguf_tensors(fixture, folder, config["num_hidden_layers"]).items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    models.close(writer)


def each(change: Callable[[str, np.ndarray], np.ndarray]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: change(name, values) for name, values in tensors.items()}


def permuted(heads: int, kv_heads: int) -> Callable[[Tensors], Tensors]:
    """The conversion of architectures whose GGUF rotation pairs neighbouring rows."""

    def permute(name: str, values: np.ndarray) -> np.ndarray:
        if "q_proj" in name:
            return models.permute(values, heads)
        return models.permute(values, kv_heads) if "k_proj" in name else values

    return each(permute)


# --- expected outputs ------------------------------------------------------------------------


def safe_greedy(fixture: Fixture, loaded, random) -> dict:
    """The first random prompt whose 16 choices are clear, varied, and tokens that may be given again."""
    for _ in range(400):
        prompt = [int(token) for token in random.integers(0, fixture.below, fixture.prompt)]
        tokens, margin = models.greedy(loaded, prompt, 16)
        if margin > 0.02 and len(set(tokens)) >= 4 and max(tokens) < fixture.below:
            return {"prompt": prompt, "tokens": tokens, "margin": round(margin, 4)}
    raise SystemExit(f"{fixture.name}: no prompt has clear choices; change the seed")


@in_double()
def make(folder: pathlib.Path, fixture: Fixture) -> None:
    with with_types_in_double() if fixture.casts_by_type else contextlib.nullcontext():
        make_one(folder, fixture)


def make_one(folder: pathlib.Path, fixture: Fixture) -> None:
    torch.manual_seed(0)
    write_hf(folder / "hf", draw(fixture))
    loaded = load(fixture, folder / "hf")
    if fixture.published is not None:
        publish(fixture, folder / "hf")
    if fixture.architecture is not None:
        write_gguf(fixture, folder)
    if fixture.older is not None:
        parameters, convert = fixture.older
        older = dataclasses.replace(fixture, parameters=parameters, convert=convert)
        write_gguf(older, folder, "model-older.gguf")
    random = np.random.default_rng(1000 + fixture.seed)
    tokens = [int(token) for token in random.integers(0, fixture.below, fixture.tokens)]
    rows = sorted({int(row) for row in np.linspace(0, fixture.tokens - 1, 8)})
    logits = models.logits(loaded, tokens)[rows]
    logits.astype("<f4").tofile(folder / "logits.f32")
    about = {"vocab": VOCAB, "tokens": tokens, "rows": rows, "greedy": safe_greedy(fixture, loaded, random)}
    if fixture.context is not None:
        about["context"] = fixture.context
    (folder / "expected.json").write_text(json.dumps(about) + "\n")
    if fixture.old_spelling is not None:
        write_old_spelling(folder, fixture, about, logits)
    if not fixture.in_folder:
        shutil.rmtree(folder / "hf")
