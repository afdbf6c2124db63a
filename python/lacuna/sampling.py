"""How tokens are chosen, by the names that vLLM has for it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy
from numpy.typing import NDArray

from lacuna.errors import InvalidRequest


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a text ends.

    What is None is as the model's makers recommend, or else as the server has it. The same `seed` gives the same text.
    """

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    """Of `generate` and `stream` 16 if it is None, as vLLM has it."""
    min_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    response_format: Mapping[str, Any] | None = None
    structured_outputs: Mapping[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        """Those that are not None."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields = {name: value for name, value in values.items() if value is not None}
        if self.logit_bias is not None:
            fields["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        for name in ("stop", "stop_token_ids"):
            if name in fields and not isinstance(fields[name], str):
                fields[name] = list(fields[name])
        return fields


def written(sampling: SamplingParams | None, more: Mapping[str, Any]) -> str:
    """The fields of a request as JSON; those in `more` come before those of `sampling`."""
    if sampling is not None and not isinstance(sampling, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"sampling is a {type(sampling).__name__}, expected `SamplingParams`")
    changed = dataclasses.replace(sampling or SamplingParams(), **more)
    return as_json(changed.fields())


def as_json(value: Any) -> str:
    """`value` as JSON, which has no infinities. Numbers and arrays of NumPy are what they hold.

    Raises:
        InvalidRequest: for numbers that JSON has not, and texts with halves of characters.
        TypeError: for what is no number, text, list or mapping.
    """
    try:
        # Characters as they are: escapes are several times as long.
        text = json.dumps(value, allow_nan=False, default=_plain, ensure_ascii=False)
        text.encode()
        return text
    except ValueError as error:
        raise InvalidRequest(str(error), "invalid_value") from None


def _plain(value: Any) -> Any:
    if isinstance(value, numpy.ndarray):
        return cast("NDArray[Any]", value).tolist()
    for kind, plain in _PLAIN:
        if isinstance(value, kind):
            return plain(value)
    raise TypeError(f"a field has a {type(value).__name__}, expected a number, a text, a list or a mapping")


# Numbers of NumPy, and what of Python they are.
_PLAIN: list[tuple[type[Any], Callable[[Any], Any]]] = [
    (numpy.bool_, bool),
    (numpy.integer, int),
    (numpy.floating, float),
]
