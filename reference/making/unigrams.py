"""A unigram vocabulary as XLM-RoBERTa has it: SentencePiece's pieces behind four tokens of its own, and a map of characters."""

import functools
import io
import pathlib
import tempfile

import gguf
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from . import text

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
SIZE = 300
# What becomes what: single characters, sequences, something that grows, something that goes away.
MAP = {"Ａ": "A", "ﬁ": "fi", "e\u0301": "é", "\u00a0": " ", "\u3000": " ", "½": "1/2", "㎏": "kg", "\u200b": "", "\t": " ", "\n": " "}


@functools.cache
def model() -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        rules = pathlib.Path(scratch) / "rules.tsv"
        spelled = lambda string: " ".join(f"{ord(character):04X}" for character in string)
        lines = [f"{spelled(old)}\t{spelled(new)}" for old, new in sorted(MAP.items())]
        rules.write_text("\n".join(lines) + "\n", encoding="utf-8")
        made = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text.CORPUS.splitlines() * 4), model_writer=made, model_type="unigram", vocab_size=SIZE,
            character_coverage=0.99, normalization_rule_tsv=str(rules), num_threads=1, minloglevel=2, hard_vocab_limit=False,
        )
    return made.getvalue()


def field(message: bytes, wanted: int) -> bytes:
    """The bytes of a field of a protocol buffer."""

    def number(at: int) -> tuple[int, int]:
        value, shift = 0, 0
        while True:
            value |= (message[at] & 127) << shift
            shift += 7
            at += 1
            if message[at - 1] < 128:
                return value, at

    at = 0
    while at < len(message):
        key, at = number(at)
        match key & 7:
            case 0:
                _, at = number(at)
            case 5:
                at += 4
            case 2:
                size, at = number(at)
                if key >> 3 == wanted:
                    return message[at : at + size]
                at += size
    raise KeyError(wanted)


def character_map() -> bytes:
    """`precompiled_charsmap` of the model's `normalizer_spec`."""
    return field(field(model(), 3), 2)


def vocabulary() -> list[tuple[str, float]]:
    made = sentencepiece.SentencePieceProcessor(model_proto=model())
    pieces = [(made.id_to_piece(index), made.get_score(index)) for index in range(3, made.get_piece_size())]
    return [(token, 0.0) for token in SPECIAL] + pieces + [("<mask>", 0.0)]


def hf_tokenizer() -> Tokenizer:
    vocab = vocabulary()
    made = Tokenizer(models.Unigram(vocab, unk_id=3, byte_fallback=False))
    map_of = normalizers.Precompiled(character_map())
    made.normalizer = normalizers.Sequence([map_of, normalizers.Replace(Regex(" {2,}"), " ")])
    metaspace = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    made.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in [*SPECIAL, "<mask>"]])
    around = [("<s>", 0), ("</s>", 2)]
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=around
    )
    return made


def add_to_gguf(writer: gguf.GGUFWriter) -> None:
    """As llama.cpp's converter does for XLM-RoBERTa."""
    vocab = vocabulary()
    special = {"<s>", "<pad>", "</s>", "<mask>"}
    kind = lambda token: gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_scores([score for _, score in vocab])
    writer.add_token_types([gguf.TokenType.UNKNOWN if token == "<unk>" else kind(token) for token, _ in vocab])
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    writer.add_precompiled_charsmap(character_map())
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_sep_token_id(2)
    writer.add_pad_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.add_add_sep_token(True)
