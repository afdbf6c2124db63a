"""Encoders: tiny random models whose output is one vector for a text or a score of two, from both kinds of files; and a
real one."""

import json
import pathlib
import re

import gguf
import numpy as np
import torch
from safetensors.numpy import save_file
from tokenizers import processors
from transformers import (
    AutoModel, AutoTokenizer, BertConfig, Gemma3TextConfig, ModernBertConfig, NomicBertConfig, Qwen3Config, XLMRobertaConfig,
)

from . import models, text, word_pieces
from .families import fixture
from .families.fixture import Fixture

# Texts of a batch, end to end: one token, several, and as many as the model takes.
LENGTHS = [5, 1, 24, 17]
ROOT = pathlib.Path(__file__).resolve().parents[2]
REAL = "all-minilm-l6-v2"  # .ci/fetch-models minilm
SENTENCES = 200
POOLING = {"mean": 1, "first": 2, "last": 3, "rank": 4}


def tokens() -> list[str]:
    letters = [chr(ord("a") + index) for index in range(26)]
    return word_pieces.SPECIAL + letters + [f"##{letter}" for letter in letters] + ["ab", "##cd", "abcd", ".", ",", "!", "你"]


def bert() -> Fixture:
    """Six heads of two, so that none is like another; token types differ, and only the first is used."""
    config = BertConfig(
        vocab_size=len(tokens()), hidden_size=24, num_hidden_layers=3, num_attention_heads=6, intermediate_size=40,
        max_position_embeddings=24, type_vocab_size=2, architectures=["BertModel"], hidden_act="gelu",
        layer_norm_eps=1e-12,
    )
    unused = ("pooler.", "embeddings.position_ids")
    convert = lambda tensors: {name: values for name, values in tensors.items() if not name.startswith(unused)}
    return Fixture("bert", config, 301, gguf.MODEL_ARCH.BERT, convert=convert)


def write_gguf(folder: pathlib.Path, made: Fixture, pooling: str, name: str | None = None) -> None:
    config = json.loads((folder / "hf" / "config.json").read_text())
    writer = gguf.GGUFWriter(folder / (name or f"{pooling}.gguf"), gguf.MODEL_ARCH_NAMES[made.architecture])
    writer.add_type("model")
    writer.add_name(f"Tiny random {writer.arch}")
    writer.add_block_count(config["num_hidden_layers"])
    # The converter leaves out the rows of XLM-RoBERTa that no text has.
    positions = config["max_position_embeddings"] - (2 if config["model_type"] == "xlm-roberta" else 0)
    writer.add_context_length(positions)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if "layer_norm_eps" in config or "norm_eps" in config:
        writer.add_layer_norm_eps(config.get("layer_norm_eps", config.get("norm_eps")))
    if made.architecture not in DECODERS:
        writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(POOLING[pooling]))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    made.parameters(writer, config)
    if made.architecture == gguf.MODEL_ARCH.BERT and config["model_type"] == "bert":
        word_pieces.add_to_gguf(writer, tokens())
    else:
        fixture.add_stub_vocabulary(writer)
    for name, values in fixture.gguf_tensors(made, folder, config["num_hidden_layers"]).items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    models.close(writer)


def pooled(hidden: np.ndarray, pooling: str) -> np.ndarray:
    return {"mean": hidden.mean(axis=0), "first": hidden[0], "last": hidden[-1]}[pooling]


# --- models beside BERT ----------------------------------------------------------------------

DECODERS = (gguf.MODEL_ARCH.QWEN3,)
# What all of them have.
SMALL = {"vocab_size": fixture.VOCAB, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 40}


def without_unused(tensors: fixture.Tensors) -> fixture.Tensors:
    unused = ("pooler.", "roberta.pooler.", "embeddings.position_ids")
    kept = {name: values for name, values in tensors.items() if not name.startswith(unused)}
    return {name: values[2:] if "position_embeddings" in name else values for name, values in kept.items()}


def xlm_roberta(classifies: bool) -> Fixture:
    """Positions from 2 on, one token type; the classifier has a layer of its own."""
    kind = "ForSequenceClassification" if classifies else "Model"
    config = XLMRobertaConfig(
        **SMALL, max_position_embeddings=26, type_vocab_size=1, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        layer_norm_eps=1e-5, architectures=[f"XLMRoberta{kind}"], **({"num_labels": 1} if classifies else {}),
    )

    def convert(tensors: fixture.Tensors) -> fixture.Tensors:
        return {name.removeprefix("roberta."): values for name, values in without_unused(tensors).items()}

    name = "xlm-roberta-scores" if classifies else "xlm-roberta"
    return Fixture(name, config, 302 + classifies, gguf.MODEL_ARCH.BERT, convert=convert)


def bert_scores() -> Fixture:
    """Two token types, of which the second is of the second text; a pooler before the score. No GGUF file has it."""
    config = BertConfig(
        **{**SMALL, "vocab_size": len(tokens())}, max_position_embeddings=24, type_vocab_size=2, num_labels=1,
        architectures=["BertForSequenceClassification"], layer_norm_eps=1e-12,
    )
    return Fixture("bert-scores", config, 304)


def nomic_bert() -> Fixture:
    config = NomicBertConfig(
        **SMALL, max_position_embeddings=64, type_vocab_size=2, architectures=["NomicBertModel"], layer_norm_eps=1e-12,
    )

    def parameters(writer: gguf.GGUFWriter, config: dict) -> None:
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])

    return Fixture("nomic-bert", config, 305, gguf.MODEL_ARCH.NOMIC_BERT, parameters=parameters)


def published_nomic(config: dict) -> dict:
    """`config.json` as the model was published, before transformers knew it."""
    return {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "activation_function": "swiglu", "causal": False,
        "layer_norm_epsilon": config["layer_norm_eps"], "mlp_fc1_bias": False, "mlp_fc2_bias": False,
        "n_embd": config["hidden_size"], "n_head": config["num_attention_heads"], "n_inner": config["intermediate_size"],
        "n_layer": config["num_hidden_layers"], "n_positions": config["max_position_embeddings"], "parallel_block": False,
        "prenorm": False, "qkv_proj_bias": False, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
        "type_vocab_size": config["type_vocab_size"], "use_rms_norm": False, "vocab_size": config["vocab_size"],
    }


def modern_bert(classifies: bool) -> Fixture:
    """Windows of four tokens to either side, in layers 1 and 2; two rotations."""
    kind = "ForSequenceClassification" if classifies else "Model"
    labels = {"num_labels": 1, "classifier_pooling": "mean"} if classifies else {}
    config = ModernBertConfig(
        **SMALL, max_position_embeddings=64, local_attention=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2, architectures=[f"ModernBert{kind}"], norm_eps=1e-5, **labels,
    )

    def parameters(writer: gguf.GGUFWriter, config: dict) -> None:
        writer.add_sliding_window(config["local_attention"])
        writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)

    architecture = None if classifies else gguf.MODEL_ARCH.MODERN_BERT
    name = "modern-bert-scores" if classifies else "modern-bert"
    return Fixture(name, config, 306 + classifies, architecture, parameters=parameters)


def published_modern(config: dict) -> dict:
    """The same of ModernBERT, before transformers 5."""
    settings = {key: config[key] for key in (*SMALL, "max_position_embeddings", "local_attention", "norm_eps", "pad_token_id")}
    return {
        **settings, "architectures": ["ModernBertModel"], "model_type": "modernbert", "attention_bias": False,
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "mlp_bias": False,
        "hidden_activation": "gelu", "norm_bias": False, "layer_norm_eps": config["norm_eps"], "position_embedding_type": "absolute",
    }


def gemma_embedding() -> Fixture:
    """Seven layers of which one sees all; windows of four tokens to either side."""
    config = Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 7}, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=8,
        query_pre_attn_scalar=8, use_bidirectional_attention=True, architectures=["Gemma3TextModel"], pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )

    def parameters(writer: gguf.GGUFWriter, config: dict) -> None:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])

    convert = fixture.each(lambda name, values: values + 1 if name.endswith("norm.weight") else values)
    return Fixture(
        "gemma-embedding", config, 308, gguf.MODEL_ARCH.GEMMA_EMBEDDING, parameters=parameters, convert=convert, norm_center=0.0,
        extra=dense_weights(),
    )


def dense_weights() -> fixture.Tensors:
    random = np.random.default_rng(309)
    draw = lambda *shape: np.round(random.standard_normal(shape) * 16).astype(np.float32) / 64
    return {"dense_2.weight": draw(32, SMALL["hidden_size"]), "dense_3.weight": draw(16, 32)}


def write_dense(hf: pathlib.Path) -> None:
    """As sentence-transformers saves them: a folder each, its settings in `config.json`."""
    weights = dense_weights()
    for index, name in enumerate(weights, start=2):
        at = hf / f"{index}_Dense"
        at.mkdir(exist_ok=True)
        outputs, inputs = weights[name].shape
        save_file({"linear.weight": weights[name]}, at / "model.safetensors")
        models.write_json(at / "config.json", {
            "in_features": inputs, "out_features": outputs, "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        })


def qwen3(kind: str) -> Fixture:
    """A decoder, whose last token is pooled, or whose logits of two tokens there are scores."""
    config = Qwen3Config(
        **{**SMALL, "num_hidden_layers": 3}, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=True, architectures=[f"Qwen3{kind}"],
        **({"num_labels": 1} if kind == "ForSequenceClassification" else {}),
    )

    def parameters(writer: gguf.GGUFWriter, config: dict) -> None:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])

    def convert(tensors: fixture.Tensors) -> fixture.Tensors:
        # The converter makes a classifier of two rows of the output matrix.
        named = {name if name.startswith("model.") else f"model.{name}": values for name, values in tensors.items()}
        if kind == "ForCausalLM":
            named["cls.output.weight"] = named["model.embed_tokens.weight"][ANSWERS]
        return named

    name = {"Model": "qwen3-embedding", "ForCausalLM": "qwen3-reranker", "ForSequenceClassification": "qwen3-scores"}[kind]
    architecture = None if kind == "ForSequenceClassification" else gguf.MODEL_ARCH.QWEN3
    return Fixture(name, config, 310 + len(kind), architecture, parameters=parameters, convert=convert)


# The tokens of yes and of no in `qwen3-reranker`.
ANSWERS = [5, 9]


def embedders() -> list[tuple[Fixture, str]]:
    """Each with the pooling that its GGUF file says."""
    return [
        (xlm_roberta(False), "first"), (nomic_bert(), "mean"), (modern_bert(False), "first"), (gemma_embedding(), "mean"),
        (qwen3("Model"), "last"),
    ]


def rerankers() -> list[Fixture]:
    return [xlm_roberta(True), bert_scores(), modern_bert(True), qwen3("ForCausalLM"), qwen3("ForSequenceClassification")]


def draw_texts(made: Fixture) -> list[list[int]]:
    """None has RoBERTa's padding token, which has no position."""
    random = np.random.default_rng(1000 + made.seed)
    return [[int(token) + 2 for token in random.integers(0, fixture.VOCAB - 2, length)] for length in LENGTHS]


def make_embedder(folder: pathlib.Path, made: Fixture, pooling: str) -> None:
    fixture.write_hf(folder / "hf", fixture.draw(made))
    loaded = fixture.load(made, folder / "hf")
    texts = draw_texts(made)
    with torch.no_grad():
        hidden = [loaded(torch.tensor([text])).last_hidden_state[0].numpy() for text in texts]
    write_gguf(folder, made, pooling, "model.gguf")
    for name in POOLING.keys() - {"rank"}:
        rows = np.stack([pooled(rows, name) for rows in hidden])
        rows.astype("<f4").tofile(folder / f"{name}.f32")
    about = {"width": made.config.hidden_size, "texts": texts, "pooling": pooling}
    if made.extra:
        write_dense(folder / "hf")
        rows = np.stack([pooled(rows, pooling) for rows in hidden])
        for weights in made.extra.values():
            rows = rows @ weights.T.astype(np.float64)
        rows.astype("<f4").tofile(folder / "dense.f32")
        about["dense_width"] = rows.shape[1]
    models.write_json(folder / "expected.json", about)
    published = {"nomic-bert": published_nomic, "modern-bert": published_modern}.get(made.name)
    if published:
        at = folder / "hf-published"
        at.mkdir(exist_ok=True)
        models.write_json(at / "config.json", published(json.loads((folder / "hf" / "config.json").read_text())))


def write_pair_tokenizer(hf: pathlib.Path) -> None:
    """BERT's own, which says how two texts are joined."""
    made = word_pieces.hf_tokenizer(tokens())
    around = [(token, tokens().index(token)) for token in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=around
    )
    (hf / "tokenizer.json").write_text(made.to_str() + "\n", encoding="utf-8")


def make_reranker(folder: pathlib.Path, made: Fixture) -> None:
    """Pairs: the second text begins at a token of its own in each; only BERT is told where."""
    fixture.write_hf(folder / "hf", fixture.draw(made))
    if made.name == "bert-scores":
        write_pair_tokenizer(folder / "hf")
    loaded = fixture.load(made, folder / "hf")
    texts = draw_texts(made)
    seconds = [len(text) * 2 // 3 for text in texts]
    scores = []
    with torch.no_grad():
        for text, second in zip(texts, seconds, strict=True):
            types = torch.tensor([[int(index >= second) for index in range(len(text))]])
            more = {"token_type_ids": types} if made.name == "bert-scores" else {}
            logits = loaded(torch.tensor([text]), **more).logits[0]
            scores.append(logits[-1, ANSWERS].numpy() if made.name == "qwen3-reranker" else logits.numpy())
    if made.architecture is not None:
        write_gguf(folder, made, "rank", "model.gguf")
    np.stack(scores).astype("<f4").tofile(folder / "scores.f32")
    models.write_json(folder / "expected.json", {"width": len(scores[0]), "texts": texts, "seconds": seconds})


# --- nomic-embed-text v2 -----------------------------------------------------------------------

# transformers has no such model: its equations are here, over what is written to the file.
EXPERTS, USED, EVERY = 8, 2, 2


def nomic_experts_weights() -> fixture.Tensors:
    random = np.random.default_rng(320)
    hidden, inner = SMALL["hidden_size"], SMALL["intermediate_size"]

    def draw(*shape: int) -> np.ndarray:
        return (np.round(random.standard_normal(shape) * 32) / 32 / np.sqrt(shape[-1])).astype(np.float32)

    def norm(name: str) -> fixture.Tensors:
        weight = 1 + np.round(random.standard_normal(hidden) * 16) / 64
        return {f"{name}.weight": weight.astype(np.float32), f"{name}.bias": draw(hidden)}

    made = {"token_embd.weight": draw(fixture.VOCAB, hidden) * 4, "token_types.weight": draw(1, hidden), **norm("token_embd_norm")}
    for layer in range(SMALL["num_hidden_layers"]):
        at = f"blk.{layer}"
        made |= {
            f"{at}.attn_qkv.weight": draw(3 * hidden, hidden) * 2, f"{at}.attn_qkv.bias": draw(3 * hidden),
            f"{at}.attn_output.weight": draw(hidden, hidden), f"{at}.attn_output.bias": draw(hidden),
            **norm(f"{at}.attn_output_norm"), **norm(f"{at}.layer_output_norm"),
        }
        if layer % EVERY == 1:
            made |= {
                f"{at}.ffn_gate_inp.weight": draw(EXPERTS, hidden), f"{at}.ffn_up_exps.weight": draw(EXPERTS, inner, hidden),
                f"{at}.ffn_down_exps.weight": draw(EXPERTS, hidden, inner),
            }
        else:
            made |= {
                f"{at}.ffn_up.weight": draw(inner, hidden), f"{at}.ffn_up.bias": draw(inner) * 4,
                f"{at}.ffn_down.weight": draw(hidden, inner), f"{at}.ffn_down.bias": draw(hidden),
            }
    return made


def nomic_experts_rows(weights: fixture.Tensors, text: list[int]) -> np.ndarray:
    heads, count = SMALL["num_attention_heads"], len(text)
    weights = {name: torch.from_numpy(values).double() for name, values in weights.items()}
    functional = torch.nn.functional

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    def turn(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(count, dtype=torch.float64)[:, None] * 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
        first, second, cos, sin = x[..., :half], x[..., half:], angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def experts(at: str, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = (x @ weights[f"{at}.ffn_gate_inp.weight"].T).softmax(-1).topk(USED)
        made = torch.zeros_like(x)
        for row in range(count):
            for score, expert in zip(scores[row], chosen[row]):
                inner = functional.gelu(weights[f"{at}.ffn_up_exps.weight"][expert] @ x[row])
                made[row] += score * (weights[f"{at}.ffn_down_exps.weight"][expert] @ inner)
        return made

    x = norm("token_embd_norm", weights["token_embd.weight"][text] + weights["token_types.weight"][0])
    for layer in range(SMALL["num_hidden_layers"]):
        at = f"blk.{layer}"
        q, k, v = (part.view(count, heads, -1).transpose(0, 1) for part in linear(f"{at}.attn_qkv", x).chunk(3, dim=-1))
        seen = functional.scaled_dot_product_attention(turn(q), turn(k), v).transpose(0, 1).reshape(count, -1)
        x = norm(f"{at}.attn_output_norm", x + linear(f"{at}.attn_output", seen))
        if layer % EVERY == 1:
            made = experts(at, x)
        else:
            made = linear(f"{at}.ffn_down", functional.gelu(linear(f"{at}.ffn_up", x)))
        x = norm(f"{at}.layer_output_norm", x + made)
    return x.numpy()


def make_nomic_experts(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = nomic_experts_weights()
    writer = gguf.GGUFWriter(folder / "model.gguf", gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.NOMIC_BERT_MOE])
    writer.add_type("model")
    writer.add_name("Tiny random nomic-bert-moe")
    writer.add_block_count(SMALL["num_hidden_layers"])
    writer.add_context_length(64)
    writer.add_embedding_length(SMALL["hidden_size"])
    writer.add_feed_forward_length(SMALL["intermediate_size"])
    writer.add_head_count(SMALL["num_attention_heads"])
    writer.add_layer_norm_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED)
    writer.add_moe_every_n_layers(EVERY)
    writer.add_token_type_count(1)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    fixture.add_stub_vocabulary(writer)
    for name, values in weights.items():
        writer.add_tensor(name, values)
    models.close(writer)
    random = np.random.default_rng(1320)
    texts = [[int(token) for token in random.integers(2, fixture.VOCAB, length)] for length in LENGTHS]
    rows = np.stack([pooled(nomic_experts_rows(weights, text), "mean") for text in texts])
    rows.astype("<f4").tofile(folder / "mean.f32")
    models.write_json(folder / "expected.json", {"width": SMALL["hidden_size"], "texts": texts, "pooling": "mean"})


# --- all-MiniLM-L6-v2 ------------------------------------------------------------------------


def sentences() -> list[str]:
    """The strings of the tokenizers that say something, then sentences of a text."""
    prose = (ROOT / "models" / "demo" / "heldout.txt").read_text(encoding="utf-8")
    found = [" ".join(sentence.split()) for sentence in re.split(r"(?<=[.!?])\s|\n\n", prose)]
    found = dict.fromkeys(sentence for sentence in found if 20 < len(sentence) < 400)
    return [*[one for one in text.STRINGS if one.strip()], *found][:SENTENCES]


def make_real(folder: pathlib.Path) -> None:
    """As sentence-transformers does it: the mean of all rows, special tokens' too, of length 1."""
    path = ROOT / "target" / "models" / REAL
    if not path.exists():
        print(f"  no {path}: encoders/{REAL} is left as it is")
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    made = []
    with torch.no_grad():
        for sentence in sentences():
            given = tokenizer(sentence, truncation=False, padding=False, return_tensors="pt")
            mean = model(**given).last_hidden_state[0].mean(dim=0)
            made.append(torch.nn.functional.normalize(mean, dim=0).numpy())
    models.write_json(folder / "sentences.json", sentences())
    np.stack(made).astype("<f2").tofile(folder / "embeddings.f16")


def make(out: pathlib.Path) -> None:
    make_tiny(out)
    make_real(out / "encoders" / REAL)


@fixture.in_double()
def make_tiny(out: pathlib.Path) -> None:
    for made in (bert(),):
        folder = out / "encoders" / made.name
        torch.manual_seed(0)
        fixture.write_hf(folder / "hf", fixture.draw(made))
        tokenizer = word_pieces.hf_tokenizer(tokens())
        (folder / "hf" / "tokenizer.json").write_text(tokenizer.to_str() + "\n", encoding="utf-8")
        loaded = fixture.load(made, folder / "hf")
        random = np.random.default_rng(1000 + made.seed)
        texts = [[int(token) for token in random.integers(0, len(tokens()), length)] for length in LENGTHS]
        with torch.no_grad():
            hidden = [loaded(torch.tensor([text])).last_hidden_state[0].numpy() for text in texts]
        for pooling in POOLING.keys() - {"rank"}:
            write_gguf(folder, made, pooling)
            rows = np.stack([pooled(rows, pooling) for rows in hidden])
            rows.astype("<f4").tofile(folder / f"{pooling}.f32")
        models.write_json(folder / "expected.json", {"width": made.config.hidden_size, "texts": texts})
    for made, pooling in embedders():
        torch.manual_seed(0)
        make_embedder(out / "encoders" / made.name, made, pooling)
    make_nomic_experts(out / "encoders" / "nomic-bert-moe")
    for made in rerankers():
        torch.manual_seed(0)
        make_reranker(out / "encoders" / made.name, made)
