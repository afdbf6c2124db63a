"""A SentencePiece BPE vocabulary with byte fallback, in GGUF and Hugging Face form."""

import functools
import io

import gguf
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from . import text


@functools.cache
def processor(size: int) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.CORPUS.splitlines() * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def pieces(size: int) -> list[tuple[str, float, gguf.TokenType]]:
    """Piece, score and GGUF token type of every id."""
    made = processor(size)
    return [(made.id_to_piece(index), made.get_score(index), kind(made, index)) for index in range(size)]


def kind(made: sentencepiece.SentencePieceProcessor, index: int) -> gguf.TokenType:
    if made.is_unknown(index):
        return gguf.TokenType.UNKNOWN
    if made.is_control(index):
        return gguf.TokenType.CONTROL
    return gguf.TokenType.BYTE if made.is_byte(index) else gguf.TokenType.NORMAL


def add_to_gguf(writer: gguf.GGUFWriter, size: int) -> None:
    made = processor(size)
    rows = pieces(size)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece for piece, _, _ in rows])
    writer.add_token_scores([score for _, score, _ in rows])
    writer.add_token_types([row_kind for _, _, row_kind in rows])
    writer.add_bos_token_id(made.bos_id())
    writer.add_eos_token_id(made.eos_id())
    writer.add_unk_token_id(made.unk_id())
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)


def merges(rows: list[tuple[str, float, gguf.TokenType]]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score first: what Hugging Face's converter lists."""
    ids = {piece: index for index, (piece, _, _) in enumerate(rows)}
    found = []
    for piece, score, row_kind in rows:
        if row_kind != gguf.TokenType.NORMAL:
            continue
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        local = [(left, right, score) for left, right in splits if left in ids and right in ids]
        found += sorted(local, key=lambda row: (ids[row[0]], ids[row[1]]))
    found.sort(key=lambda row: (row[2], len(row[0]), len(row[1])), reverse=True)
    return [(left, right) for left, right, _ in found]


def hf_tokenizer(size: int) -> Tokenizer:
    rows = pieces(size)
    ids = {piece: index for index, (piece, _, _) in enumerate(rows)}
    made = Tokenizer(models.BPE(ids, merges(rows), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", ids["<s>"])]
    )
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return made
