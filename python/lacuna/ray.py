"""Replicas on Ray Serve, and a router that sends a prompt to the replica that has computed its beginning.

    from ray import serve
    import lacuna.ray

    serve.run(lacuna.ray.build_openai_app("demo", replicas=3, budget="256MiB"))

It is plain Serve, without `ray.serve.llm`, which needs another engine. `pip install lacuna[ray]` brings what it needs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import ray.exceptions
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

import lacuna
from lacuna import streams

# Characters that are looked for together: some 64 tokens, a few page groups.
BLOCK = 256
# Beginnings that a router remembers, 4 MiB of prompts for each replica of a handful.
REMEMBERED = 65536
# Of a prompt, what is looked at: what follows is another's only if this is.
LOOKED_AT = 64 * BLOCK
# How often a request goes to another replica because its own was lost before it replied.
ATTEMPTS = 4

Head = tuple[int, list[tuple[str, str]]]


def beginnings(text: str) -> list[bytes]:
    """Names of the beginnings of a prompt, the shortest first."""
    hashed, names = hashlib.blake2b(digest_size=16), list[bytes]()
    for start in range(0, min(len(text), LOOKED_AT), BLOCK):
        hashed.update(text[start : start + BLOCK].encode("utf-8", "replace"))
        names.append(hashed.digest())
    return names


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that the longest beginning of its prompt went to last.

    What nobody has seen goes to the replica that a hash of its beginning names, so that several that come at once go
    together, and replicas that come and go move few. A replica that is full lets others do it.
    """

    def initialize_state(self, **_: Any) -> None:
        """Called by Serve before the first request."""
        # Beginnings and the replicas they went to, those used last at the end.
        self._seen: OrderedDict[bytes, Any] = OrderedDict()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, of which a later one is asked when those before it are full."""
        names = self._names(pending_request)
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        for name in reversed(names):
            owner = by_id.get(self._seen.get(name))
            if owner is not None:
                others = [replica for replica in candidate_replicas if replica is not owner]
                return [[owner], others] if others else [[owner]]
        if not names:
            return [candidate_replicas]

        def weight(replica: RunningReplica) -> bytes:
            id = replica.replica_id.unique_id.encode()
            return hashlib.blake2b(names[0] + id, digest_size=16).digest()

        return [[replica] for replica in sorted(candidate_replicas, key=weight)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: Any, result: Any
    ) -> None:
        """Remembers where a prompt went."""
        for name in self._names(pending_request):
            self._seen[name] = replica_id
            self._seen.move_to_end(name)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    @staticmethod
    def _names(request: PendingRequest | None) -> list[bytes]:
        return [] if request is None else request.kwargs.get("names", [])


class Replica:
    """An engine, and what it answers."""

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        self._engine = lacuna.Engine(model, **settings)
        self._name = serve.get_replica_context().replica_id.unique_id

    async def answer(
        self, method: str, path: str, body: bytes, names: Sequence[bytes]
    ) -> AsyncIterator[Head | bytes]:
        """The head of a reply, and then its body, as it comes."""
        del names  # They are for the router.
        reply = self._engine._native.call(method, path, body)  # pyright: ignore[reportPrivateUsage]
        try:
            ended = False
            while not ended:
                parts, ended = await streams.poll(reply)
                for part in parts:
                    if isinstance(part, bytes):
                        yield part
                    else:
                        status, headers = part
                        yield status, [*headers, ("x-lacuna-replica", self._name)]
        finally:
            reply.close()

    def check_health(self) -> None:
        """Raises when the engine has ended."""
        self._engine.memory()


class Front:
    """What HTTP requests come to."""

    def __init__(self, replicas: DeploymentHandle[Any]) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """Passes a request on, and its reply back."""
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        for attempt in range(ATTEMPTS):
            reply = self._replicas.answer.remote(
                request.method, path, body, names=beginnings(prompt(body))
            )
            try:
                status, headers = await anext(reply)
            except (ray.exceptions.RayActorError, StopAsyncIteration):
                # The replica was lost, and nothing of the reply has come: another can do it.
                if attempt + 1 == ATTEMPTS:
                    return unavailable()
                continue
            return StreamingResponse(reply, status, headers=dict(headers))
        return unavailable()


def unavailable() -> Response:
    """What clients of OpenAI are told when no replica can answer."""
    error = {"message": "no replica could answer; try again", "type": "server_error"}
    body = json.dumps({"error": {**error, "param": None, "code": "replica_lost"}})
    return Response(body, 503, {"retry-after": "1"}, "application/json")


def prompt(body: bytes) -> str:
    """What of a request the model reads first, as text; nothing of what is no request."""
    try:
        fields = json.loads(body)
        asked = fields.get("messages", fields.get("prompt", fields.get("input", "")))
        system = [fields[name] for name in ("system", "tools") if name in fields]
    except (ValueError, AttributeError):
        return ""
    if isinstance(asked, str) and not system:
        return asked
    return json.dumps([*system, asked], ensure_ascii=False)


def build_openai_app(
    model: str | os.PathLike[str],
    replicas: int = 1,
    budget: str | int | None = None,
    *,
    autoscaling: Mapping[str, Any] | None = None,
    cpus: float = 1,
    **settings: Any,
) -> serve.Application:
    """An application of Serve that answers what `lacuna serve` answers, for `serve.run`.

    Args:
        model: As `lacuna.Engine` takes it; every node must have it, or be able to download it.
        replicas: Engines, each with a cache of its own.
        budget: Bytes that each of them may commit.
        autoscaling: In place of `replicas`, Serve's `autoscaling_config`.
        cpus: Processors of each of them, which is also how many threads compute.
        settings: Others of `lacuna.Engine`.
    """
    settings = {"budget": budget, "threads": max(1, int(cpus)), **settings}
    at_once = settings.get("max_running") or 32
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": cpus},
        "max_ongoing_requests": 2 * at_once,
        "request_router_config": RequestRouterConfig(request_router_class=PrefixRouter),
    }
    if autoscaling is None:
        options["num_replicas"] = replicas
    else:
        options["autoscaling_config"] = dict(autoscaling)
    engines = serve.deployment(Replica).options(name="engine", **options)
    # It only passes bytes on.
    front = serve.deployment(Front).options(
        name="front", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1024
    )
    return front.bind(engines.bind(os.fspath(model), settings))
