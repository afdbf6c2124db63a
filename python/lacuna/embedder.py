"""Models that make embeddings of texts, or score pairs of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from lacuna import _native, settings


class Embedder:
    """A model that makes embeddings, such as MiniLM, BGE or EmbeddingGemma, from any of the places that `Engine` takes.

    Raises:
        ModelError: for a model that makes none.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        budget: str | int | None = None,
        ctx: int | None = None,
        threads: int | None = None,
    ) -> None:
        given = {"budget": budget, "ctx": ctx, "threads": threads}
        self._native = _native.Embedder(os.fspath(model), settings.written(given))

    @property
    def dimensions(self) -> int:
        """Elements of an embedding."""
        return self._native.dimensions

    def embed(self, texts: str | Sequence[str], truncate: bool = False) -> NDArray[numpy.float32]:
        """Embeddings of `texts`, of shape `(texts, dimensions)`; of one text `(dimensions,)`.

        The array is the memory that they were computed into. A text that is longer than the model takes is refused, or
        cut with `truncate`.
        """
        if isinstance(texts, str):
            return self._native.embed([texts], truncate)[0]
        return self._native.embed(list(texts), truncate)


class Reranker:
    """A model that scores how well one text answers another.

    Raises:
        ModelError: for a model that makes no scores.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        budget: str | int | None = None,
        ctx: int | None = None,
        threads: int | None = None,
    ) -> None:
        given = {"budget": budget, "ctx": ctx, "threads": threads}
        self._native = _native.Reranker(os.fspath(model), settings.written(given))

    def score(
        self, query: str, documents: Sequence[str], truncate: bool = False
    ) -> NDArray[numpy.float32]:
        """How likely each of `documents` answers `query`, from 0 to 1."""
        if isinstance(documents, str):
            # To Python it is a list of its letters.
            raise TypeError("documents are one text, expected a list of texts")
        return self._native.score(query, list(documents), truncate)
