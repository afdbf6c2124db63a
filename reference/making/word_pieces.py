"""A WordPiece vocabulary, as BERT has it: words, and parts that go on with one."""

import collections

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from . import text

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def words(corpus: str) -> collections.Counter:
    """What BERT's normalizer and pre-tokenizer leave of a text."""
    normal = normalizers.BertNormalizer().normalize_str(corpus)
    return collections.Counter(word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(normal))


def vocabulary() -> list[str]:
    """Characters of the corpus at both places, common beginnings and ends of its words, and whole words."""
    counted = words(text.CORPUS + " ".join(text.STRINGS[2:8]))
    characters = sorted({character for word in counted for character in word if character.isascii()})
    tokens = SPECIAL + [f"[unused{index}]" for index in range(3)] + characters + [f"##{one}" for one in characters]
    parts = collections.Counter()
    for word, count in counted.items():
        for cut in range(2, len(word)):
            parts[word[:cut]] += count
            parts[f"##{word[-cut:]}"] += count
    tokens += [part for part, count in sorted(parts.items()) if count > 3]
    tokens += [word for word, count in sorted(counted.items()) if count > 1]
    return list(dict.fromkeys([*tokens, "你", "ß", "##ß", "—"]))


def hf_tokenizer(tokens: list[str]) -> Tokenizer:
    ids = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    around = [(token, ids[token]) for token in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return made


def add_to_gguf(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
    """As llama.cpp's converter does: words get a mark in front, and what goes on with one loses its own."""

    def spelled(token: str) -> str:
        if token in SPECIAL:
            return token
        return token[2:] if token.startswith("##") else "▁" + token

    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([spelled(token) for token in tokens])
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens]
    writer.add_token_types(kinds)
    writer.add_token_type_count(2)
    writer.add_unk_token_id(tokens.index("[UNK]"))
    writer.add_bos_token_id(tokens.index("[CLS]"))
    writer.add_sep_token_id(tokens.index("[SEP]"))
    writer.add_pad_token_id(tokens.index("[PAD]"))
