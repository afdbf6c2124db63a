"""Iterators over what the engine's threads make, for threads and for tasks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from lacuna import errors
from lacuna._native import Reply, Stream
from lacuna.closing import Closing
from lacuna.output import Piece, token_logprob

T = TypeVar("T")
Batch = tuple[list[Any], bool]


class Source(Protocol):
    """What the native module has to read from."""

    def wait(self) -> Batch: ...
    def poll(self, callback: Callable[[], object]) -> Batch | None: ...
    def close(self) -> None: ...


async def poll(source: Source) -> Batch:
    """Waits for the next items, and whether they are the last, without a thread of its own."""
    loop = asyncio.get_running_loop()
    while True:
        there = loop.create_future()
        batch = source.poll(_wake(loop, there))
        if batch is not None:
            return batch
        await there


def _wake(loop: asyncio.AbstractEventLoop, there: asyncio.Future[None]) -> Callable[[], None]:
    def set_result() -> None:
        if not there.done():
            there.set_result(None)

    def wake() -> None:
        try:
            loop.call_soon_threadsafe(set_result)
        except RuntimeError:
            # The loop is closed, and nobody waits.
            pass

    return wake


class _Items(Generic[T]):
    """Items in order, read from a source a batch at a time, and turned into what is wanted."""

    def __init__(
        self, source: Source, read: Callable[[list[Any]], list[T]], engine: object = None
    ) -> None:
        self._source = source
        self._read = read
        # Kept as long as it is read from: the last to have an engine ends it.
        self._engine = engine
        self._items: list[T] = []
        self._ended = False

    def _take(self, batch: Batch) -> None:
        items, self._ended = batch
        self._items.extend(self._read(items))
        # The next is the last of the list: taking from there costs nothing.
        self._items.reverse()

    def close(self) -> None:
        """Cancels what is still to come: its pages are free within a step."""
        self._items.clear()
        self._ended = True
        self._source.close()


class Items(_Items[T], Closing):
    """An iterator; dropping it cancels what is still to come."""

    def __iter__(self) -> Items[T]:
        return self

    def __next__(self) -> T:
        try:
            while not self._items:
                if self._ended:
                    raise StopIteration
                self._take(self._source.wait())
        except (StopIteration, errors.InUse):
            # Who came second leaves the stream to who reads it.
            raise
        except BaseException:
            self.close()
            raise
        return self._items.pop()


class AsyncItems(_Items[T]):
    """The same for tasks, of any event loop of asyncio. Cancelling the task that waits cancels what is to come."""

    # Whether a task waits. Only one can: the source calls one back.
    _awaited = False

    def __aiter__(self) -> AsyncItems[T]:
        return self

    async def __anext__(self) -> T:
        if self._awaited:
            raise errors.InUse("another task is reading this stream; each needs its own", "in_use")
        self._awaited = True
        try:
            while not self._items:
                if self._ended:
                    raise StopAsyncIteration
                self._take(await poll(self._source))
        except StopAsyncIteration:
            raise
        except BaseException:
            self.close()
            raise
        finally:
            self._awaited = False
        return self._items.pop()

    async def aclose(self) -> None:
        """As `close`."""
        self.close()

    async def __aenter__(self) -> AsyncItems[T]:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def pieces(stream: Stream, engine: object) -> Items[Piece]:
    """The pieces of a request to `engine`."""
    return Items(stream, _pieces, engine)


def async_pieces(stream: Stream, engine: object) -> AsyncItems[Piece]:
    """The same for tasks."""
    return AsyncItems(stream, _pieces, engine)


def _pieces(events: list[Any]) -> list[Piece]:
    pieces: list[Piece] = []
    for event in events:
        if event[0] == "token":
            _, index, token, text, found = event
            logprob = None if found is None else token_logprob(found)
            pieces.append(Piece(index, text, token, logprob=logprob))
        elif event[0] == "finished":
            _, index, finish_reason, stop_reason, text, _ = event
            pieces.append(Piece(index, text, None, finish_reason, stop_reason))
    return pieces


class Body:
    """The head of a reply, and what has come of its body."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.bytes = b""

    def add(self, parts: list[Any]) -> None:
        """Takes parts up."""
        for part in parts:
            if isinstance(part, bytes):
                self.bytes += part
            else:
                self.status, self.headers = part

    def json(self) -> Any:
        """The body of a reply that is whole.

        Raises:
            LacunaError: that the reply is about.
        """
        if not self.bytes:
            raise errors.Closed("the engine was closed before it replied", "closed")
        value = json.loads(self.bytes)
        if self.status >= 400:
            retry_after = dict(self.headers).get("retry-after")
            raise _error(value, self.status, float(retry_after) if retry_after else None)
        return value


def _error(value: Any, status: int, retry_after: float | None = None) -> errors.LacunaError:
    said = value["error"]
    return errors.of(said["code"] or "", said["message"], said["param"], status, retry_after)


def whole(reply: Reply) -> Body:
    """Waits for all of a reply."""
    body, ended = Body(), False
    while not ended:
        parts, ended = reply.wait()
        body.add(parts)
    return body


async def async_whole(reply: Reply) -> Body:
    """The same for tasks. Cancelling it cancels the request."""
    body, ended = Body(), False
    try:
        while not ended:
            parts, ended = await poll(reply)
            body.add(parts)
    except BaseException:
        reply.close()
        raise
    return body


class _Chunks:
    """Reads server-sent events, wherever they are cut."""

    def __init__(self) -> None:
        self._body = Body()

    def __call__(self, parts: list[Any]) -> list[dict[str, Any]]:
        self._body.add(parts)
        if self._body.status >= 400:
            # An error comes in one part with its head, or in the next.
            if self._body.bytes:
                self._body.json()
            return []
        *events, self._body.bytes = self._body.bytes.split(b"\n\n")
        datas = [event.removeprefix(b"data: ") for event in events if event.startswith(b"data: ")]
        chunks = [json.loads(data) for data in datas if data != b"[DONE]"]
        for chunk in chunks:
            if "error" in chunk:
                raise _error(chunk, 500)
        return chunks


def chunks(reply: Reply, engine: object) -> Items[dict[str, Any]]:
    """The chunks of a chat with `engine`."""
    return Items(reply, _Chunks(), engine)


def async_chunks(reply: Reply, engine: object) -> AsyncItems[dict[str, Any]]:
    """The same for tasks."""
    return AsyncItems(reply, _Chunks(), engine)


