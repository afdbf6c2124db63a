"""Gemma's two kinds of vocabulary: SentencePiece with pieces that are never split, and Gemma 4's own."""

import pathlib

import gguf
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from . import bpe, text

REAL = "target/models/gemma-3-270m-q4_k_m.gguf"  # .ci/fetch-models gemma3
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
SHOWN = ["<|channel>", "<channel|>"]  # special in tokenizer.json, but always one token and shown in GGUF
MERGES = 260


# --- the real vocabulary of Gemma 3 ----------------------------------------------------------


def real_processor(path: pathlib.Path) -> sentencepiece.SentencePieceProcessor:
    """SentencePiece's own implementation over the pieces of a GGUF file."""
    from sentencepiece import sentencepiece_model_pb2

    fields = gguf.GGUFReader(path).fields
    tokens, scores, kinds = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "scores", "token_type"))
    model = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(tokens, scores, kinds):
        user_defined = kind == gguf.TokenType.USER_DEFINED  # the only ones that GGUF writes with plain spaces
        piece = token.replace(" ", "▁") if user_defined else token
        model.pieces.add(piece=piece, score=score, type=kind)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback, trainer.vocab_size = 2, True, len(tokens)
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = 0, 1, 2, 3
    trainer.pad_piece, trainer.eos_piece, trainer.bos_piece, trainer.unk_piece = tokens[:4]
    normalizer.name, normalizer.add_dummy_prefix = "identity", False
    normalizer.remove_extra_whitespaces, normalizer.escape_whitespaces = False, True
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def make_real(folder: pathlib.Path, write_cases) -> None:
    path = pathlib.Path(__file__).resolve().parents[5] / REAL
    if not path.exists():
        print(f"  no {REAL}: tokenizers/gemma3 is left as it is")
        return
    folder.mkdir(parents=True, exist_ok=True)
    processor = real_processor(path)
    write_cases(folder, {"pre": None}, [{"plain": processor.encode(string)} for string in text.STRINGS])


# --- Gemma 4 ---------------------------------------------------------------------------------


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Special tokens, bytes, characters, runs of line breaks, and merges that reach across spaces."""
    pieces = [line.replace(" ", "▁") for line in (text.CORPUS * 2).splitlines()]
    pieces += [line.replace(" ", "▁") for string in text.STRINGS for line in string.split("\n") if "<|" not in string]
    words = {}
    for piece in pieces:
        words[piece] = words.get(piece, 0) + 1
    merges = bpe.train(words, MERGES, longest=6)
    characters = sorted({c for line in text.CORPUS.splitlines() for c in line.replace(" ", "▁")})
    known = set(characters)
    merges = [pair for pair in merges if all(set(part) <= known for part in pair)]
    merges = [("\n", "\n"), ("\n\n", "\n")] + merges
    merged = dict.fromkeys("".join(pair) for pair in merges)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    return SPECIAL + SHOWN + byte_tokens + ["\n"] + characters + list(merged), merges


def hf_tokenizer(tokens: list[str], merges) -> Tokenizer:
    ids = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(ids, list(merges), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL + SHOWN])
    return made


def add_to_gguf(writer: gguf.GGUFWriter, tokens: list[str], merges) -> None:
    def kind(token: str) -> gguf.TokenType:
        if token in SPECIAL:
            return gguf.TokenType.CONTROL
        if token in SHOWN:
            return gguf.TokenType.USER_DEFINED
        return gguf.TokenType.BYTE if token.startswith("<0x") else gguf.TokenType.NORMAL

    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([kind(token) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokens.index("<bos>"))
    writer.add_eos_token_id(tokens.index("<eos>"))
    writer.add_unk_token_id(tokens.index("<unk>"))
    writer.add_pad_token_id(tokens.index("<pad>"))
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)
