"""Byte-level BPE vocabularies: the byte alphabet, a small trainer, and the two file forms."""

import collections
import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
UNCASED = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
NOT_HAN_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
NOT_HAN_UNCASED = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""

# `tokenizer.ggml.pre` name -> splits applied in turn, each piece of one being split by the next.
SPLITS = {
    "gpt-2": [GPT2],
    "qwen2": [rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{TAIL}"],
    "qwen35": [
        rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "llama-bpe": [rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{TAIL}"],
    "tekken": [
        rf"[^\r\n\p{{L}}\p{{N}}]?{CASED}*{UNCASED}+|[^\r\n\p{{L}}\p{{N}}]?{CASED}+{UNCASED}*"
        rf"|\p{{N}}|{SLASH_TAIL}"
    ],
    "gpt-4o": [
        rf"[^\r\n\p{{L}}\p{{N}}]?{CASED}*{UNCASED}+{CONTRACTION}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{CASED}+{UNCASED}*{CONTRACTION}?|\p{{N}}{{1,3}}|{SLASH_TAIL}"
    ],
    "smollm": [r"\p{N}", GPT2],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        rf"{ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "spark2_5": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        rf"{ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
        r"\p{N}",
    ],
    "kimi-k2": [
        rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{NOT_HAN_CASED}*{NOT_HAN_UNCASED}+{CONTRACTION}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{NOT_HAN_CASED}+{NOT_HAN_UNCASED}*{CONTRACTION}?|\p{{N}}{{1,3}}|{TAIL}"
    ],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}
# Pre-tokenizers whose model takes a piece that is in the vocabulary whole, merges or not.
IGNORE_MERGES = {"llama-bpe", "tekken", "kimi-k2"}


def byte_alphabet() -> list[str]:
    """The printable stand-in of each byte, indexed by byte, as GPT-2 assigns them."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {byte: chr(byte) for byte in shown}
    table |= {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return [table[byte] for byte in range(256)]


def spell(text: str) -> str:
    """Text in the printable byte alphabet."""
    alphabet = byte_alphabet()
    return "".join(alphabet[byte] for byte in text.encode())


def train(words: collections.Counter, count: int, longest: int = 16) -> list[tuple[str, str]]:
    """The `count` most frequent merges up to a length, ties broken by length, then spelling."""
    pieces = {word: list(word) for word in words}
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs = collections.Counter()
        for word, symbols in pieces.items():
            for pair in zip(symbols, symbols[1:]):
                if len(pair[0]) + len(pair[1]) <= longest:
                    pairs[pair] += words[word]
        best = min(pairs, key=lambda pair: (-pairs[pair], len(pair[0]) + len(pair[1]), pair))
        merges.append(best)
        for word, symbols in pieces.items():
            pieces[word] = merge(symbols, best)
    return merges


def merge(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    place = 0
    while place < len(symbols):
        joined = tuple(symbols[place : place + 2]) == pair
        merged.append("".join(pair) if joined else symbols[place])
        place += 2 if joined else 1
    return merged


def spelled_words(text: str) -> collections.Counter:
    return collections.Counter(spell(word) for word in re.findall(r" ?[^ ]+", text))


def vocabulary(merges, special: list[str], extra=(), special_first=False) -> list[str]:
    """Tokens in id order: bytes, merges, extra, special; or special first."""
    merged = dict.fromkeys("".join(pair) for pair in merges)  # two merges may spell one token
    assert merged.keys().isdisjoint(extra), "a merge builds an extra token"
    plain = sorted(byte_alphabet()) + list(merged) + list(extra)
    return special + plain if special_first else plain + special


def pre_tokenizer(name: str):
    """The `tokenizers` pre-tokenizer of a `tokenizer.ggml.pre` name, in the form its models' files have."""
    if name == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[name]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, byte_level])


def tokenizer(name: str, tokens: list[str], merges, special: list[str], bos: str | None = None) -> Tokenizer:
    """A Hugging Face tokenizer with its special tokens; no template adds any on its own."""
    ids = {token: index for index, token in enumerate(tokens)}
    ignore = name in IGNORE_MERGES
    made = Tokenizer(models.BPE(ids, list(merges), ignore_merges=ignore, fuse_unk=False))
    made.pre_tokenizer = pre_tokenizer(name)
    made.decoder = decoders.ByteLevel()
    if bos is not None:
        made.post_processor = bos_template(bos, ids[bos])
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return made


def bos_template(bos: str, index: int):
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, index)])


def add_to_gguf(writer, name: str, tokens: list[str], merges, special: list[str], shown: tuple[str, ...] = ()) -> None:
    """The `tokenizer.ggml.*` keys of a byte-level BPE vocabulary."""
    import gguf

    control = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    kinds = dict.fromkeys(special, control) | dict.fromkeys(shown, gguf.TokenType.USER_DEFINED)
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
