"""OpenAI's own client over an engine in this process: what it would send goes to the engine, and no network is used."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx2 as httpx
import openai

from lacuna import _native, errors, streams

# What the client asks for: it needs a host and a key, and nobody looks at either.
_BASE = "http://lacuna.invalid/v1"
_KEY = "none"


def _begun(batch: streams.Batch) -> tuple[int, list[tuple[str, str]], list[bytes], bool]:
    """Status and headers of a reply, and what has come of its body."""
    parts, ended = batch
    if not parts:
        raise errors.Closed("the engine was closed before it replied", "closed")
    status, headers = parts[0]
    return status, headers, parts[1:], ended


class _Stream(httpx.SyncByteStream):
    def __init__(self, reply: _native.Reply, first: list[bytes], ended: bool) -> None:
        self._reply, self._first, self._ended = reply, first, ended

    def __iter__(self) -> Iterator[bytes]:
        yield from self._first
        while not self._ended:
            parts, self._ended = self._reply.wait()
            yield from parts

    def close(self) -> None:
        self._reply.close()


class _AsyncStream(httpx.AsyncByteStream):
    def __init__(self, reply: _native.Reply, first: list[bytes], ended: bool) -> None:
        self._reply, self._first, self._ended = reply, first, ended

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._first:
            yield part
        while not self._ended:
            parts, self._ended = await streams.poll(self._reply)
            for part in parts:
                yield part

    async def aclose(self) -> None:
        self._reply.close()


class Transport(httpx.BaseTransport):
    """Answers requests of httpx with an engine."""

    def __init__(self, engine: _native.Engine) -> None:
        self._engine = engine

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        reply = self._engine.call(request.method, request.url.raw_path.decode(), request.read())
        status, headers, first, ended = _begun(reply.wait())
        return httpx.Response(status, headers=headers, stream=_Stream(reply, first, ended))


class AsyncTransport(httpx.AsyncBaseTransport):
    """The same for tasks."""

    def __init__(self, engine: _native.Engine) -> None:
        self._engine = engine

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        reply = self._engine.call(request.method, request.url.raw_path.decode(), body)
        try:
            status, headers, first, ended = _begun(await streams.poll(reply))
        except BaseException:
            reply.close()
            raise
        return httpx.Response(status, headers=headers, stream=_AsyncStream(reply, first, ended))


def client(engine: _native.Engine) -> openai.OpenAI:
    """A client whose requests `engine` answers."""
    http = httpx.Client(transport=Transport(engine))
    return openai.OpenAI(base_url=_BASE, api_key=_KEY, http_client=http, max_retries=0)


def async_client(engine: _native.Engine) -> openai.AsyncOpenAI:
    """The same for tasks."""
    http = httpx.AsyncClient(transport=AsyncTransport(engine))
    return openai.AsyncOpenAI(base_url=_BASE, api_key=_KEY, http_client=http, max_retries=0)
