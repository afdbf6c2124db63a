"""The tiny models: a Hugging Face folder, GGUF files, logits and greedy tokens of each.

Weights are whole numbers from -127 to 127 times a power of two (qwen2 apart), so that they
are the same values in F32, F16, BF16 and Q8_0: every file of a model has the same logits.
"""

import dataclasses
import json
import pathlib
import shutil
import tempfile

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from . import bpe, sentence_pieces, text

QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3_SPECIAL = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
]
MISTRAL_SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role']"
    " + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
    "{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VOCAB = 272


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What a model's tokenizer files say; `pre` is None for SentencePiece."""

    pre: str | None
    special: tuple[str, ...]
    template: str
    bos: str | None
    eos: str
    special_first: bool = False


QWEN = Vocabulary("qwen2", tuple(QWEN_SPECIAL), CHATML, None, "<|im_end|>")
LLAMA3 = Vocabulary("llama-bpe", tuple(LLAMA3_SPECIAL), HEADERS, "<|begin_of_text|>", "<|eot_id|>")
MISTRAL = Vocabulary("tekken", tuple(MISTRAL_SPECIAL), INSTRUCT, "<s>", "</s>", special_first=True)
PIECES = Vocabulary(None, ("<unk>", "<s>", "</s>"), INSTRUCT, "<s>", "</s>")


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    kind: str  # model_type of config.json
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    tied: bool
    theta: float
    vocabulary: Vocabulary
    hf_type: torch.dtype
    gguf_type: gguf.GGMLQuantizationType
    tokens: int  # length of the input whose logits are kept
    seed: int
    hidden: int = 32
    ffn: int = 24
    vocab: int = VOCAB
    eps: float = 1e-6
    rope_scaling: dict | None = None
    shards: int = 1
    on_grid: bool = True

    @property
    def architecture(self) -> str:
        return "llama" if self.kind in ("llama", "mistral") else self.kind


F32, F16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16
BF16, Q8_0 = gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.Q8_0
MODELS = [
    Model("qwen3", "qwen3", 4, 2, 16, 2, True, 1e6, QWEN, torch.bfloat16, BF16, 32, 1),
    Model("qwen3-untied", "qwen3", 8, 2, 8, 1, False, 1e6, QWEN, torch.bfloat16, Q8_0, 24, 2),
    Model("qwen2", "qwen2", 4, 2, 8, 1, True, 1e6, QWEN, torch.float32, F32, 24, 3, shards=3, on_grid=False),
    Model("llama2", "llama", 2, 2, 16, 1, False, 1e4, PIECES, torch.float16, Q8_0, 24, 4, vocab=304, eps=1e-5),
    Model("llama3", "llama", 4, 2, 16, 2, True, 8e3, LLAMA3, torch.bfloat16, Q8_0, 96, 5,
          eps=1e-5, rope_scaling=LLAMA3_ROPE),
    Model("mistral", "mistral", 6, 2, 12, 1, True, 1e4, MISTRAL, torch.float16, F16, 40, 6, eps=1e-5),
]


# --- weights ---------------------------------------------------------------------------------


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensor names and shapes."""
    query, key, hidden = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.hidden
    made = {"model.embed_tokens.weight": (model.vocab, hidden)}
    for layer in range(model.layers):
        at = f"model.layers.{layer}."
        made |= {
            at + "input_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (query, hidden),
            at + "self_attn.k_proj.weight": (key, hidden),
            at + "self_attn.v_proj.weight": (key, hidden),
            at + "self_attn.o_proj.weight": (hidden, query),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "mlp.gate_proj.weight": (model.ffn, hidden),
            at + "mlp.up_proj.weight": (model.ffn, hidden),
            at + "mlp.down_proj.weight": (hidden, model.ffn),
        }
        if model.kind == "qwen3":
            made |= {at + f"self_attn.{which}_norm.weight": (model.head_dim,) for which in "qk"}
        if model.kind == "qwen2":
            made |= {at + f"self_attn.{which}_proj.bias": (rows,) for which, rows in zip("qkv", (query, key, key))}
    made["model.norm.weight"] = (hidden,)
    if not model.tied:
        made["lm_head.weight"] = (model.vocab, hidden)
    return made


def draw(model: Model) -> dict[str, np.ndarray]:
    random = np.random.default_rng(model.seed)
    return {name: draw_one(random, name, shape, model.on_grid) for name, shape in shapes(model).items()}


def draw_one(random, name: str, shape: tuple[int, ...], on_grid: bool) -> np.ndarray:
    normal = random.standard_normal(shape)
    if name.endswith("norm.weight"):
        values = 1.0 + 0.25 * normal
        step = 1 / 64
    elif name.endswith("bias"):
        values, step = 0.5 * normal, 1 / 128
    else:
        values, step = grid_step(shape[1]) * 34 * normal, grid_step(shape[1])
    if on_grid:
        values = np.clip(np.round(values / step), -127, 127) * step
    return values.astype(np.float32)


def grid_step(width: int) -> float:
    """The power of two that puts the spread near 1.5 / sqrt(width)."""
    return 2.0 ** round(np.log2(1.5 / np.sqrt(width) / 34))


# --- Hugging Face folder ---------------------------------------------------------------------


def config(model: Model, new_spelling: bool = False) -> dict:
    class_name = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "mistral": "Mistral"}[model.kind]
    tokens = vocabulary_tokens(model)
    made = {
        "architectures": [class_name + "ForCausalLM"],
        "model_type": model.kind,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": tokens.index(model.vocabulary.eos),
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "initializer_range": 0.02,
        "intermediate_size": model.ffn,
        "max_position_embeddings": 512,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": model.eps,
        "tie_word_embeddings": model.tied,
        "torch_dtype": str(model.hf_type).removeprefix("torch."),
        "use_cache": True,
        "vocab_size": model.vocab,
    }
    if model.kind == "qwen3" or model.head_dim != model.hidden // model.heads:
        made["head_dim"] = model.head_dim
    if model.vocabulary.bos is not None:
        made["bos_token_id"] = tokens.index(model.vocabulary.bos)
    if model.kind == "mistral":
        made["sliding_window"] = None
    if model.kind.startswith("qwen"):
        made |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": model.layers}
    if model.kind == "qwen2":
        del made["attention_bias"]
    return made | rope(model, new_spelling)


def rope(model: Model, new_spelling: bool) -> dict:
    if new_spelling:
        scaling = dict(model.rope_scaling or {"rope_type": "default"})
        return {"rope_parameters": {"rope_theta": model.theta, **scaling}}
    return {"rope_theta": model.theta, "rope_scaling": model.rope_scaling}


def write_hf(folder: pathlib.Path, model: Model, weights: dict[str, np.ndarray]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config(model))
    write_hf_tokenizer(folder, model.vocabulary, model.vocab)
    tensors = {name: torch.from_numpy(values).to(model.hf_type) for name, values in weights.items()}
    if model.shards == 1:
        save(tensors, folder / "model.safetensors")
        return
    parts = [list(part) for part in np.array_split(list(tensors), model.shards)]
    where = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{model.shards:05}.safetensors"
        save({name: tensors[name] for name in part}, folder / file)
        where |= {str(name): file for name in part}
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def save(tensors: dict[str, torch.Tensor], path: pathlib.Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def write_hf_tokenizer(folder: pathlib.Path, vocabulary: Vocabulary, size: int) -> None:
    if vocabulary.pre is None:
        made = sentence_pieces.hf_tokenizer(size)
    else:
        tokens, merges = bpe_vocabulary(vocabulary, size)
        made = bpe.tokenizer(vocabulary.pre, tokens, merges, list(vocabulary.special), vocabulary.bos)
    (folder / "tokenizer.json").write_text(made.to_str() + "\n", encoding="utf-8")
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.bos is not None,
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": vocabulary.template,
    }
    write_json(folder / "tokenizer_config.json", about)


def bpe_vocabulary(vocabulary: Vocabulary, size: int) -> tuple[list[str], list[tuple[str, str]]]:
    special = list(vocabulary.special)
    merges = bpe.train(bpe.spelled_words(text.CORPUS), size - 256 - len(special))
    return bpe.vocabulary(merges, special, special_first=vocabulary.special_first), merges


def vocabulary_tokens(model: Model) -> list[str]:
    if model.vocabulary.pre is None:
        return [piece for piece, _, _ in sentence_pieces.pieces(model.vocab)]
    return bpe_vocabulary(model.vocabulary, model.vocab)[0]


def write_json(path: pathlib.Path, value) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# --- GGUF ------------------------------------------------------------------------------------


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from halves (i, i + head_dim/2) to neighbours (2i, 2i + 1).

    What llama.cpp's converter does to the query and key of `llama` files, whose rotation
    pairs neighbouring rows.
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(model: Model, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == model.architecture)
    names = gguf.get_tensor_name_map(architecture, model.layers)
    made = {}
    if model.rope_scaling is not None:
        made["rope_freqs.weight"] = rope_frequency_factors(model)
    for name, values in weights.items():
        if model.architecture == "llama" and "q_proj" in name:
            values = permute(values, model.heads)
        if model.architecture == "llama" and "k_proj" in name:
            values = permute(values, model.kv_heads)
        made[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return made


def rope_frequency_factors(model: Model) -> np.ndarray:
    """What each rotation frequency is divided by."""
    scaling = model.rope_scaling
    context, low, high = (
        scaling[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for pair in range(model.head_dim // 2):
        wavelength = 2 * np.pi * model.theta ** (2 * pair / model.head_dim)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(scaling["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def stored(values: np.ndarray, kind) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """A tensor in the wanted type: vectors stay F32, rows that Q8_0 does not fit become F16."""
    if values.ndim == 1:
        return values, F32
    if kind == Q8_0 and values.shape[1] % 32 != 0:
        kind = F16
    made = grid_q8_0(values) if kind == Q8_0 else gguf.quants.quantize(values, kind)
    assert np.array_equal(gguf.quants.dequantize(made, kind), values), "a stored weight is not exact"
    return made, kind


def grid_q8_0(values: np.ndarray) -> np.ndarray:
    """Blocks with the grid's own step as their scale, which makes them exact."""
    step = grid_step(values.shape[1])
    whole = (values / step).astype(np.int8).reshape(-1, 32)
    scale = np.full((len(whole), 1), step, np.float16).view(np.uint8)
    return np.concatenate([scale, whole.view(np.uint8)], axis=1).reshape(values.shape[0], -1)


def add_hyperparameters(writer: gguf.GGUFWriter, model: Model) -> None:
    writer.add_type("model")
    writer.add_name(f"Tiny random {model.name}")
    writer.add_block_count(model.layers)
    writer.add_context_length(512)
    writer.add_embedding_length(model.hidden)
    writer.add_feed_forward_length(model.ffn)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_rope_freq_base(model.theta)
    writer.add_layer_norm_rms_eps(model.eps)
    if model.head_dim != model.hidden // model.heads:
        writer.add_key_length(model.head_dim)
        writer.add_value_length(model.head_dim)
    if model.architecture == "llama":
        writer.add_vocab_size(model.vocab)
        writer.add_rope_dimension_count(model.head_dim)
    file_types = {
        F32: gguf.LlamaFileType.ALL_F32,
        F16: gguf.LlamaFileType.MOSTLY_F16,
        BF16: gguf.LlamaFileType.MOSTLY_BF16,
        Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    }
    writer.add_file_type(file_types[model.gguf_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary, size: int) -> None:
    if vocabulary.pre is None:
        sentence_pieces.add_to_gguf(writer, size)
        writer.add_chat_template(vocabulary.template)
        return
    tokens, merges = bpe_vocabulary(vocabulary, size)
    bpe.add_to_gguf(writer, vocabulary.pre, tokens, merges, list(vocabulary.special))
    if vocabulary.bos is not None:
        writer.add_bos_token_id(tokens.index(vocabulary.bos))
    writer.add_eos_token_id(tokens.index(vocabulary.eos))
    writer.add_add_bos_token(vocabulary.bos is not None)
    writer.add_chat_template(vocabulary.template)


def write_gguf(path: pathlib.Path, model: Model, weights: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(path, model.architecture)
    add_hyperparameters(writer, model)
    add_vocabulary(writer, model.vocabulary, model.vocab)
    finish(writer, gguf_tensors(model, weights), model.gguf_type)


def finish(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray], kind) -> None:
    for name, values in tensors.items():
        data, stored_as = stored(values, kind)
        writer.add_tensor(name, data, raw_dtype=stored_as)
    close(writer)


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_split_gguf(folder: pathlib.Path, model: Model, weights: dict[str, np.ndarray], count: int) -> None:
    """As gguf-split does: all metadata in the first file, only `split.*` in the others.

    Q8_0, so as not to store the same bytes as `model.gguf`; the values are the same.
    """
    model = dataclasses.replace(model, gguf_type=Q8_0)
    tensors = gguf_tensors(model, weights)
    for number, part in enumerate(np.array_split(list(tensors), count)):
        writer = gguf.GGUFWriter(folder / f"split-{number + 1:05}-of-{count:05}.gguf", model.architecture)
        if number == 0:
            add_hyperparameters(writer, model)
            add_vocabulary(writer, model.vocabulary, model.vocab)
        else:
            writer.kv_data[0].clear()
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(tensors))
        finish(writer, {str(name): tensors[str(name)] for name in part}, Q8_0)


# --- expected outputs ------------------------------------------------------------------------


def load(folder: pathlib.Path):
    """The folder as transformers reads it, computing in float64 where it does not insist on float32."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return loaded.eval().double()


@torch.no_grad()
def logits(loaded, tokens: list[int]) -> np.ndarray:
    return loaded(torch.tensor([tokens]), use_cache=False).logits[0].to(torch.float32).numpy()


def greedy(loaded, prompt: list[int], count: int) -> tuple[list[int], float]:
    """The most likely continuation, and the smallest lead of a choice over its runner-up."""
    tokens, margin = list(prompt), np.inf
    for _ in range(count):
        last = logits(loaded, tokens)[-1]
        second, first = np.sort(last)[-2:]
        margin = min(margin, float(first - second))
        tokens.append(int(last.argmax()))
    return tokens[len(prompt) :], margin


def safe_greedy(loaded, random, vocab: int) -> dict:
    """The first random prompt whose 16 choices all lead by 0.02 and are not one token repeated."""
    for _ in range(200):
        prompt = [int(token) for token in random.integers(0, vocab, 8)]
        tokens, margin = greedy(loaded, prompt, 16)
        if margin > 0.02 and len(set(tokens)) >= 4:
            return {"prompt": prompt, "tokens": tokens, "margin": round(margin, 4)}
    raise SystemExit("no prompt has clear choices; change the seed")


def expected(folder: pathlib.Path, loaded, vocab: int, length: int, seed: int, rows: int = 4) -> None:
    random = np.random.default_rng(1000 + seed)
    tokens = [int(token) for token in random.integers(0, vocab, length)]
    kept = sorted({int(row) for row in np.linspace(0, length - 1, rows)})
    logits(loaded, tokens)[kept].astype("<f4").tofile(folder / "logits.f32")
    about = {"vocab": vocab, "tokens": tokens, "rows": kept, "greedy": safe_greedy(loaded, random, vocab)}
    (folder / "expected.json").write_text(json.dumps(about) + "\n")


def write_new_spelling(out: pathlib.Path, model: Model) -> None:
    """`llama3` again with only its config.json spelled the newer way; asserted to mean the same."""
    folder = out / f"{model.name}-new-spelling" / "hf"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config(model, new_spelling=True))
    old = out / model.name
    about = json.loads((old / "expected.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(old / "hf", scratch, dirs_exist_ok=True)
        shutil.copy(folder / "config.json", scratch)
        again = logits(load(pathlib.Path(scratch)), about["tokens"])[about["rows"]]
    assert np.array_equal(again.ravel(), np.fromfile(old / "logits.f32", "<f4")), "spellings differ"


def make(out: pathlib.Path) -> None:
    torch.manual_seed(0)
    for model in MODELS:
        folder = out / model.name
        weights = draw(model)
        write_hf(folder / "hf", model, weights)
        write_gguf(folder / "model.gguf", model, weights)
        if model.name == "qwen3":
            write_split_gguf(folder, model, weights, 3)
        expected(folder, load(folder / "hf"), model.vocab, model.tokens, model.seed)
        if model.name == "llama3":
            write_new_spelling(out, model)
