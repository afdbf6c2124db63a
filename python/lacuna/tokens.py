"""Tokens, in what they come in."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import numpy
from numpy.typing import NDArray

from lacuna.errors import InvalidRequest

Tokens = Sequence[int] | NDArray[numpy.integer[Any]]
# What tokens, and prompts, come in.
LISTS = (Sequence, numpy.ndarray)


def token_ids(tokens: Any) -> list[int]:
    """Tokens in a list or an array.

    Raises:
        InvalidRequest: for numbers that no vocabulary has.
        TypeError: for what is no list of whole numbers.
    """
    if isinstance(tokens, (str, bytes, bytearray)) or not isinstance(tokens, LISTS):
        # Bytes are numbers to Python, and seldom meant as tokens.
        raise TypeError(f"tokens are a {type(tokens).__name__}, expected a list of whole numbers")
    ids = [operator.index(token) for token in listed(tokens)]
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < 1 << 32:
            raise InvalidRequest(f"there is no token {token}", "invalid_value", "tokens")
    return ids


def listed(values: Any) -> list[Any]:
    """The values of a list or an array."""
    if isinstance(values, numpy.ndarray):
        array = cast("NDArray[Any]", values)
        if array.dtype.kind not in "iu":
            raise TypeError(f"tokens are {array.dtype}, expected whole numbers")
        return [array.item()] if array.ndim == 0 else array.tolist()
    return list(values)
