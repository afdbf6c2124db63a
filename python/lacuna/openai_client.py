"""OpenAI's own client over an engine in this process: what it would send goes to the engine, and no network is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx2 as httpx
import openai

from lacuna import _native, errors, streams

# What the client asks for: it needs a host and a key, and nobody looks at either.
_BASE = "http://lacuna.invalid/v1"
_KEY = "none"
# Of a request that says nothing of it: there is no network to give up on, and the engine has its `request_timeout`.
_TIMEOUT = None


def _begun(batch: streams.Batch) -> tuple[int, list[tuple[str, str]], list[bytes], bool]:
    """Status and headers of a reply, and what has come of its body."""
    parts, ended = batch
    if not parts:
        raise errors.Closed("the engine was closed before it replied", "closed")
    status, headers = parts[0]
    return status, headers, parts[1:], ended


class _Reader:
    """Reads a reply to a request, for as long as the request says that there may be nothing to read."""

    def __init__(self, reply: _native.Reply, request: httpx.Request) -> None:
        self._reply = reply
        self._request = request
        self._timeout: float | None = request.extensions.get("timeout", {}).get("read")

    def wait(self) -> streams.Batch:
        try:
            return self._reply.wait(self._timeout)
        except TimeoutError as error:
            raise self._late() from error

    async def poll(self) -> streams.Batch:
        try:
            return await asyncio.wait_for(streams.poll(self._reply), self._timeout)
        except asyncio.TimeoutError as error:
            raise self._late() from error

    def close(self) -> None:
        self._reply.close()

    def _late(self) -> httpx.ReadTimeout:
        return httpx.ReadTimeout(
            f"nothing came of the reply for {self._timeout} seconds", request=self._request
        )


class _Stream(httpx.SyncByteStream):
    def __init__(self, reader: _Reader, first: list[bytes], ended: bool) -> None:
        self._reader, self._first, self._ended = reader, first, ended

    def __iter__(self) -> Iterator[bytes]:
        yield from self._first
        while not self._ended:
            parts, self._ended = self._reader.wait()
            yield from parts

    def close(self) -> None:
        self._reader.close()


class _AsyncStream(httpx.AsyncByteStream):
    def __init__(self, reader: _Reader, first: list[bytes], ended: bool) -> None:
        self._reader, self._first, self._ended = reader, first, ended

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._first:
            yield part
        while not self._ended:
            parts, self._ended = await self._reader.poll()
            for part in parts:
                yield part

    async def aclose(self) -> None:
        self._reader.close()


class Transport(httpx.BaseTransport):
    """Answers requests of httpx with an engine."""

    def __init__(self, engine: _native.Engine) -> None:
        self._engine = engine

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        reply = self._engine.call(request.method, request.url.raw_path.decode(), request.read())
        reader = _Reader(reply, request)
        try:
            status, headers, first, ended = _begun(reader.wait())
        except BaseException:
            reply.close()
            raise
        return httpx.Response(status, headers=headers, stream=_Stream(reader, first, ended))


class AsyncTransport(httpx.AsyncBaseTransport):
    """The same for tasks."""

    def __init__(self, engine: _native.Engine) -> None:
        self._engine = engine

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        reply = self._engine.call(request.method, request.url.raw_path.decode(), body)
        reader = _Reader(reply, request)
        try:
            status, headers, first, ended = _begun(await reader.poll())
        except BaseException:
            reply.close()
            raise
        return httpx.Response(status, headers=headers, stream=_AsyncStream(reader, first, ended))


def client(engine: _native.Engine) -> openai.OpenAI:
    """A client whose requests `engine` answers."""
    http = httpx.Client(transport=Transport(engine))
    return openai.OpenAI(
        base_url=_BASE, api_key=_KEY, http_client=http, max_retries=0, timeout=_TIMEOUT
    )


def async_client(engine: _native.Engine) -> openai.AsyncOpenAI:
    """The same for tasks."""
    http = httpx.AsyncClient(transport=AsyncTransport(engine))
    return openai.AsyncOpenAI(
        base_url=_BASE, api_key=_KEY, http_client=http, max_retries=0, timeout=_TIMEOUT
    )
