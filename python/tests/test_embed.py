"""Embeddings and scores, against what the program says."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path

import numpy
import pytest

import lacuna

MODELS = Path(__file__).parents[2] / "reference" / "encoders"
BERT = MODELS / "bert" / "mean.gguf"
TEXTS = ["abc", "a longer text", "xyz", ""]


@pytest.fixture(scope="module")
def embedder() -> lacuna.Embedder:
    return lacuna.Embedder(BERT, threads=1)


def test_embeddings_are_those_of_the_program(embedder: lacuna.Embedder) -> None:
    found = embedder.embed(TEXTS[:3])
    assert found.shape == (3, embedder.dimensions) and found.dtype == numpy.float32
    assert found.base is not None, "a view of the memory they were computed in"
    command = [lacuna.program(), "embed", str(BERT), "--json"]
    done = subprocess.run(command, input="\n".join(TEXTS[:3]), capture_output=True, text=True, check=True)
    told = [json.loads(line)["embedding"] for line in done.stdout.splitlines()]
    assert (numpy.array(told, dtype=numpy.float32) == found).all()
    assert (embedder.embed(TEXTS[1]) == found[1]).all(), "one text is as it is among others"


def test_none_are_none_and_too_long_ones_are_refused_or_cut(embedder: lacuna.Embedder) -> None:
    assert embedder.embed([]).shape == (0, embedder.dimensions)
    long = "abc " * 10_000
    with pytest.raises(lacuna.ContextTooLong, match=r"texts\[1\]") as refused:
        embedder.embed(["abc", long])
    assert refused.value.param == "texts[1]"
    assert embedder.embed(long, truncate=True).shape == (embedder.dimensions,)
    with pytest.raises(TypeError):
        embedder.embed([5])  # pyright: ignore[reportArgumentType]
    with pytest.raises(lacuna.ModelError):
        lacuna.Engine(BERT)


def test_as_many_texts_as_there_are_come_back_as_each_does_alone(embedder: lacuna.Embedder) -> None:
    # More than are computed before others have their turn.
    texts = ["abc " * (1 + number % 11) for number in range(1500)]
    found = embedder.embed(texts)
    for number in range(0, len(texts), 97):
        assert (embedder.embed(texts[number]) == found[number]).all()


def test_the_interpreter_goes_on_while_texts_are_computed(embedder: lacuna.Embedder) -> None:
    """Its size was looked up under the lock of who computes, with the interpreter in the hand."""
    texts = ["abc " * 10] * 4000
    thread = threading.Thread(target=lambda: embedder.embed(texts))
    begun = time.monotonic()
    thread.start()
    longest = 0.0
    while thread.is_alive():
        before = time.monotonic()
        assert embedder.dimensions
        longest = max(longest, time.monotonic() - before)
        time.sleep(0.001)
    thread.join()
    assert longest < (time.monotonic() - begun) / 4


def test_scores_are_of_pairs() -> None:
    reranker = lacuna.Reranker(MODELS / "bert-scores" / "hf", threads=1)
    scores = reranker.score("abc", TEXTS[:3])
    assert scores.shape == (3,) and ((scores >= 0) & (scores <= 1)).all()
    assert (reranker.score("abc", TEXTS[1:2]) == scores[1:2]).all()
    with pytest.raises(TypeError):
        reranker.score("abc", "not a text for each letter")
