"""Vocabulary files and the ids that independent tokenizers give the test strings."""

import json
import pathlib

import gguf
from tokenizers import Tokenizer

from . import bpe, gemma, models, sentence_pieces, text, unigrams, word_pieces

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Whole words that no merge builds: only a tokenizer that ignores merges finds them.
UNMERGED = [bpe.spell(word) for word in (" Hello", "println", "camel", " done")]
# Written out in full; the other pre-tokenizers share their vocabulary and differ in the ids.
FULL = ["gpt-2", "qwen2", "llama-bpe", "default"]  # "default" has no Hugging Face form
MERGES, PIECES = 300, 400


def train_merges(count: int) -> list[tuple[str, str]]:
    """Merges that reach across words, digits, spaces and marks, so that a wrong split changes ids."""
    words = bpe.spelled_words(text.CORPUS)
    for string in text.STRINGS:
        if "<|" not in string:
            words[bpe.spell(string)] += 3
    return bpe.train(words, count, longest=4)


def write_gguf(path: pathlib.Path, name: str, tokens: list[str], merges) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("model")
    bpe.add_to_gguf(writer, name, tokens, merges, SPECIAL)
    writer.add_bos_token_id(tokens.index(SPECIAL[0]))
    writer.add_eos_token_id(tokens.index(SPECIAL[2]))
    writer.add_add_bos_token(False)
    models.close(writer)


def ids(made: Tokenizer, parse_special: bool) -> list[list[int]]:
    made.encode_special_tokens = not parse_special
    return [made.encode(string, add_special_tokens=False).ids for string in text.STRINGS]


def cases(made: Tokenizer) -> list[dict]:
    """Ids per string; `special` only where reading special tokens in the text changes them."""
    made_cases = []
    for plain, special in zip(ids(made, False), ids(made, True)):
        made_cases.append({"plain": plain} | ({"special": special} if special != plain else {}))
    return made_cases


def make_bpe(folder: pathlib.Path) -> None:
    merges = train_merges(MERGES)
    tokens = bpe.vocabulary(merges, SPECIAL, UNMERGED)
    for name in bpe.SPLITS:
        made = bpe.tokenizer(name, tokens, merges, SPECIAL)
        about = {"pre": name, "ignore_merges": name in bpe.IGNORE_MERGES, "splits": bpe.SPLITS[name]}
        at = folder / name
        at.mkdir(parents=True, exist_ok=True)
        if name in FULL:
            write_gguf(at / "vocab.gguf", name, tokens, merges)
        if name in FULL and name != "default":
            (at / "tokenizer.json").write_text(made.to_str() + "\n", encoding="utf-8")
        write_cases(at, about, cases(made))


def write_cases(folder: pathlib.Path, about: dict, rows: list[dict]) -> None:
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    head = json.dumps(about, ensure_ascii=False)[:-1]
    (folder / "cases.json").write_text(f'{head}, "cases": [\n{lines}\n]}}\n', encoding="utf-8")


def make_pieces(folder: pathlib.Path) -> None:
    at = folder / "llama-spm"
    at.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(at / "vocab.gguf", "llama")
    writer.add_type("model")
    sentence_pieces.add_to_gguf(writer, PIECES)
    models.close(writer)
    hugging_face = sentence_pieces.hf_tokenizer(PIECES)
    (at / "tokenizer.json").write_text(hugging_face.to_str() + "\n", encoding="utf-8")
    processor = sentence_pieces.processor(PIECES)
    rows = [{"plain": processor.encode(string)} for string in text.STRINGS]
    check_bos(processor, rows)
    differ = [
        string
        for string, row in zip(text.STRINGS, rows)
        if hugging_face.encode(string, add_special_tokens=False).ids != row["plain"]
    ]
    assert not differ, f"the Hugging Face form differs from sentencepiece on {differ!r}"
    write_cases(at, {"pre": None, "bos": processor.bos_id()}, rows)


def check_bos(processor, rows: list[dict]) -> None:
    for string, row in zip(text.STRINGS, rows):
        assert processor.encode(string, add_bos=True) == [processor.bos_id(), *row["plain"]]


def make_gemma4(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokens, merges = gemma.vocabulary()
    writer = gguf.GGUFWriter(folder / "vocab.gguf", "gemma4")
    writer.add_type("model")
    gemma.add_to_gguf(writer, tokens, merges)
    models.close(writer)
    made = gemma.hf_tokenizer(tokens, merges)
    (folder / "tokenizer.json").write_text(made.to_str() + "\n", encoding="utf-8")
    write_cases(folder, {"pre": None}, cases(made))


def make_word_pieces(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokens = word_pieces.vocabulary()
    writer = gguf.GGUFWriter(folder / "vocab.gguf", "bert")
    writer.add_type("model")
    word_pieces.add_to_gguf(writer, tokens)
    models.close(writer)
    made = word_pieces.hf_tokenizer(tokens)
    (folder / "tokenizer.json").write_text(made.to_str() + "\n", encoding="utf-8")
    write_cases(folder, {"pre": None}, cases(made))


def make_unigrams(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / "vocab.gguf", "bert")
    writer.add_type("model")
    unigrams.add_to_gguf(writer)
    models.close(writer)
    made = unigrams.hf_tokenizer()
    (folder / "tokenizer.json").write_text(made.to_str() + "\n", encoding="utf-8")
    strings = [*text.STRINGS, *mapped_strings()]
    rows = [{"text": string, "plain": made.encode(string, add_special_tokens=False).ids} for string in strings]
    write_cases(folder, {"pre": None, "pair": made.encode("one, two", "three").ids}, rows)


def mapped_strings() -> list[str]:
    """What the map changes, alone, between letters, at both ends, and beside one another."""
    changed = list(unigrams.MAP)
    return changed + [f"ab{one}cd {one}{one}" for one in changed] + ["".join(changed), "a\u200b\u200bb", "\u200bword", "  two  "]


def make(out: pathlib.Path) -> None:
    folder = out / "tokenizers"
    folder.mkdir(parents=True, exist_ok=True)
    models.write_json(folder / "strings.json", text.STRINGS)
    make_bpe(folder)
    make_pieces(folder)
    make_gemma4(folder / "gemma4")
    make_word_pieces(folder / "word-piece")
    make_unigrams(folder / "unigram")
    gemma.make_real(folder / "gemma3", write_cases)
