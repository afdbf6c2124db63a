"""Encoders: tiny random models whose output is one vector for a text, from both kinds of files; and a real one."""

import json
import pathlib
import re

import gguf
import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig

from . import models, text, word_pieces
from .families import fixture
from .families.fixture import Fixture

# Texts of a batch, end to end: one token, several, and as many as the model takes.
LENGTHS = [5, 1, 24, 17]
ROOT = pathlib.Path(__file__).resolve().parents[2]
REAL = "all-minilm-l6-v2"  # .ci/fetch-models minilm
SENTENCES = 200
POOLING = {"mean": 1, "first": 2, "last": 3}


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


def write_gguf(folder: pathlib.Path, made: Fixture, pooling: str) -> None:
    config = json.loads((folder / "hf" / "config.json").read_text())
    writer = gguf.GGUFWriter(folder / f"{pooling}.gguf", gguf.MODEL_ARCH_NAMES[made.architecture])
    writer.add_type("model")
    writer.add_name(f"Tiny random {writer.arch}")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(POOLING[pooling]))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    word_pieces.add_to_gguf(writer, tokens())
    for name, values in fixture.gguf_tensors(made, folder, config["num_hidden_layers"]).items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    models.close(writer)


def pooled(hidden: np.ndarray, pooling: str) -> np.ndarray:
    return {"mean": hidden.mean(axis=0), "first": hidden[0], "last": hidden[-1]}[pooling]


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
        for pooling in POOLING:
            write_gguf(folder, made, pooling)
            rows = np.stack([pooled(rows, pooling) for rows in hidden])
            rows.astype("<f4").tofile(folder / f"{pooling}.f32")
        models.write_json(folder / "expected.json", {"width": made.config.hidden_size, "texts": texts})
