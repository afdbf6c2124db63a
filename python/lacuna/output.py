"""What generating gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Logprob(NamedTuple):
    """A token that could have come, and its log-probability."""

    token_id: int
    logprob: float


class TokenLogprob(NamedTuple):
    """The log-probability of the token that came, by the model's logits as they are before sampling."""

    logprob: float
    rank: int
    """Its place among all tokens, from 1."""
    top: list[Logprob]
    """As many of the likeliest as were asked for."""


@dataclass(frozen=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    cached_tokens: int
    """Of the prompt's, those that did not have to be computed."""
    completion_tokens: int


@dataclass(frozen=True)
class Choice:
    """One text after a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    """`stop`, or `length` when there was no room for more."""
    stop_reason: str | int | None
    """The stop string or token that ended it."""
    logprobs: list[TokenLogprob] | None


@dataclass(frozen=True)
class Output:
    """What came of one prompt."""

    outputs: list[Choice]
    """As many as `n`."""
    usage: Usage
    prompt_logprobs: list[tuple[int, TokenLogprob]] | None
    """The prompt's tokens from the second on, each with how likely it was."""

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first choice's tokens."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first choice ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """The first choice's log-probabilities, if they were asked for."""
        return self.outputs[0].logprobs


@dataclass(frozen=True)
class Piece:
    """What one token adds to a text."""

    index: int
    """Of which choice."""
    text: str
    """Empty while a character or a possible stop string is unfinished."""
    token_id: int | None
    """None for what only ends the text."""
    finish_reason: str | None = None
    """In the last piece of a choice."""
    stop_reason: str | int | None = None
    logprob: TokenLogprob | None = None


def token_logprob(found: tuple[float, int, list[tuple[int, float]]]) -> TokenLogprob:
    """As the native module has it."""
    logprob, rank, top = found
    return TokenLogprob(logprob, rank, [Logprob(*one) for one in top])


def output(native: Any) -> Output:
    """A whole request's output, from what the native module gives."""
    prompt_tokens, cached_tokens, scored, choices = native
    outputs = [
        Choice(
            index=index,
            text=text,
            token_ids=token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=[token_logprob(one) for one in logprobs] if logprobs else None,
        )
        for index, (text, token_ids, logprobs, finish_reason, stop_reason) in enumerate(choices)
    ]
    completion_tokens = sum(len(choice.token_ids) for choice in outputs)
    return Output(
        outputs=outputs,
        usage=Usage(prompt_tokens, cached_tokens, completion_tokens),
        prompt_logprobs=[(token, token_logprob(found)) for token, found in scored] or None,
    )
