"""Settings of engines, by the names that they have on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import cast


def written(settings: Mapping[str, object]) -> list[tuple[str, str | None]]:
    """As the native module takes them: names and values, flags without one, and nothing of what is None."""
    read: list[tuple[str, str | None]] = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        if value is True:
            read.append((name, None))
        elif isinstance(value, (str, int)):
            read.append((name, str(value)))
        elif isinstance(value, PathLike):
            read.append((name, fspath(cast("PathLike[str]", value))))
        else:
            raise TypeError(f"`{name}` is a {type(value).__name__}, expected a text or a number")
    return read
