"""Sessions: texts that their owner goes on with, forks, cuts back and keeps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lacuna import _native, sampling
from lacuna.closing import Closing
from lacuna.errors import InvalidRequest
from lacuna.output import Choice, Piece
from lacuna.sampling import SamplingParams
from lacuna.tokens import Tokens, token_ids

if TYPE_CHECKING:
    from lacuna.engine import Engine


class Session(Closing):
    """A text beside an engine's requests, in the same memory.

    Its pages stay until it is cut back, closed or dropped: forks of it share them, and no request takes them. One thread
    at a time may use it.
    """

    def __init__(self, engine: Engine, native: _native.Session, note: str = "") -> None:
        self._engine = engine
        self._native = native
        self.note = note

    @property
    def tokens(self) -> list[int]:
        """Every token so far."""
        return self._native.tokens

    @property
    def text(self) -> str:
        """The same as text."""
        return self._engine.tokenizer.decode(self.tokens)

    def __len__(self) -> int:
        return len(self._native)

    @property
    def pending(self) -> int:
        """Tokens that are not computed yet."""
        return self._native.pending

    @property
    def kv_bytes(self) -> int:
        """Bytes of its KV pages, shared ones included."""
        return self._native.kv_bytes[0]

    @property
    def shared_kv_bytes(self) -> int:
        """Of those, bytes that others have, too."""
        return self._native.kv_bytes[1]

    def append(self, tokens: str | Tokens) -> Session:
        """Appends a text or tokens, to be computed when the session goes on. Returns the session.

        Raises:
            ContextTooLong: when they do not fit.
        """
        if isinstance(tokens, str):
            begins = len(self) == 0
            tokens = self._engine.tokenizer.encode(tokens, add_special_tokens=begins)
        self._native.extend(token_ids(tokens))
        return self

    def stream(self, sampling_params: SamplingParams | None = None, **more: Any) -> Iterator[Piece]:
        """Goes on after the session's tokens, which become more with each piece. Stopping in the middle is fine.

        Raises:
            InvalidRequest: when no token is pending, or for what only requests can have, such as `n`.
            InUse: when the session was changed in the middle.
        """
        how = self._native.begin(sampling.written(sampling_params, more))
        return self._pieces(how)

    def _pieces(self, how: _native.Continuation) -> Iterator[Piece]:
        while (piece := self._native.advance(how)) is not None:
            token, text, finish_reason, stop_reason = piece
            if token is not None or text or finish_reason:
                yield Piece(0, text, token, finish_reason, stop_reason)

    def generate(self, sampling_params: SamplingParams | None = None, **more: Any) -> Choice:
        """The same, whole."""
        text: list[str] = []
        token_ids: list[int] = []
        finish_reason, stop_reason = "length", None
        for piece in self.stream(sampling_params, **more):
            text.append(piece.text)
            if piece.token_id is not None:
                token_ids.append(piece.token_id)
            if piece.finish_reason is not None:
                finish_reason, stop_reason = piece.finish_reason, piece.stop_reason
        return Choice(0, "".join(text), token_ids, finish_reason, stop_reason, None)

    def fork(self) -> Session:
        """Another session of the same tokens. The two share pages, and a page is copied when one of them writes to it."""
        return Session(self._engine, self._native.fork(), self.note)

    def truncate(self, length: int) -> int:
        """Keeps the first `length` tokens, and gives the others' pages back.

        Returns how many of those kept need not be computed again: all but the last, unless the model has windows that
        have passed them, or states.
        """
        return self._native.truncate(length)

    def rewind(self, tokens: int) -> int:
        """Takes the last `tokens` back, or as many as there are. Returns as `truncate`."""
        if tokens < 0:
            raise InvalidRequest(f"cannot take {tokens} tokens back", "invalid_value", "tokens")
        return self.truncate(max(0, len(self) - tokens))

    def save(self, path: str | os.PathLike[str], note: str | None = None) -> None:
        """Writes the session to a file, with its pages, for `Engine.load_session`. It holds what was said.

        The engine's other work waits for it.
        """
        self._native.save(os.fspath(path), self.note if note is None else note)

    def close(self) -> None:
        """Gives its pages back. Another thread that goes on with it gets `Closed`."""
        self._native.close()
