"""Servers over HTTP in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from lacuna import _native
from lacuna.closing import Closing
from lacuna.engine import Engine


class Server(Closing):
    """A running server, for clients of OpenAI, Anthropic and Ollama."""

    def __init__(self, native: _native.Listener, served: _native.Engine) -> None:
        self._native = native
        # Kept as long as it is served: the last to have an engine ends it.
        self._served = served
        self._engine: Engine | None = None
        self.host, self.port = native.address

    @property
    def url(self) -> str:
        """Where it listens. Clients of OpenAI take it with `/v1`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def close(self, grace: float = 5.0) -> None:
        """Takes no more connections, lets those there are finish for `grace` seconds, and ends.

        An engine that was made for it is closed, too.
        """
        self._native.close(grace)
        if self._engine is not None:
            self._engine.close()


def serve(
    model: Engine | str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = 0,
    api_keys: Sequence[str] = (),
    **settings: Any,
) -> Server:
    """Serves a model, or an engine that is there already, and returns at once. `settings` are those of `Engine`."""
    if isinstance(model, Engine):
        if settings:
            raise TypeError("settings are for an engine that is made; this one is there already")
        return model.serve(host, port, api_keys)
    engine = Engine(model, **settings)
    try:
        server = engine.serve(host, port, api_keys)
    except BaseException:
        engine.close()
        raise
    server._engine = engine  # pyright: ignore[reportPrivateUsage]
    return server
