"""A worker for NVIDIA Dynamo: its frontend tokenizes and routes, Lacuna computes.

    python -m dynamo.frontend --discovery-backend file --http-port 8000
    python -m lacuna.dynamo Qwen/Qwen3-0.6B --budget 2GiB --discovery-backend file

Options that are none of the worker's are an engine's, by their names of `lacuna serve`. It needs `ai-dynamo` 1.6, whose
frontend reads the tokenizer of a Hugging Face folder or hub id: a GGUF file needs one beside it, by `--tokenizer`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, WorkerConfig
from dynamo.common.backend.engine import LlmRegistration
from dynamo.common.backend.run import run

import lacuna
from lacuna.output import Piece, TokenLogprob

# Fields of Dynamo's requests that are ours by the same name.
SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
STOPPING = ("max_tokens", "min_tokens", "ignore_eos")
# What `finish_reason` is there.
FINISHED = {"stop": "stop", "length": "length"}
# Blocks by which the router counts prompts; a multiple of the tokens that the cache shares at once.
BLOCK_TOKENS = 16


def sampling(request: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request, for `Engine.astream`."""
    asked = request.get("sampling_options") or {}
    stops = request.get("stop_conditions") or {}
    shown = request.get("output_options") or {}
    fields = {name: asked.get(name) for name in SAMPLING} | {name: stops.get(name) for name in STOPPING}
    # Nothing of these, by the frontend's words; its processor looks for stop strings, too, and decodes.
    fields["top_k"] = None if fields["top_k"] == -1 else fields["top_k"]
    fields["stop"] = stops.get("stop") or None
    fields["stop_token_ids"] = stops.get("stop_token_ids_hidden") or stops.get("stop_token_ids") or None
    fields["logprobs"] = shown.get("logprobs")
    guided = asked.get("guided_decoding") or {}
    for name in ("json", "regex", "choice", "grammar"):
        if guided.get(name) is not None:
            fields["structured_outputs"] = {name: guided[name]}
    return {name: value for name, value in fields.items() if value is not None}


def chunk(piece: Piece) -> dict[str, Any]:
    """What the frontend gets of a piece."""
    said: dict[str, Any] = {"token_ids": [] if piece.token_id is None else [piece.token_id], "index": piece.index}
    if piece.logprob is not None and piece.token_id is not None:
        said["log_probs"] = [piece.logprob.logprob]
        said["top_logprobs"] = [alternatives(piece.token_id, piece.logprob)]
    if piece.finish_reason is not None:
        said["finish_reason"] = FINISHED.get(piece.finish_reason, "stop")
    return said


def alternatives(token: int, found: TokenLogprob) -> list[dict[str, Any]]:
    """The likeliest tokens in the place of one, and itself."""
    listed = [(token, found.logprob, found.rank)]
    listed += [(one.token_id, one.logprob, rank) for rank, one in enumerate(found.top, 1) if one.token_id != token]
    return [{"token_id": token, "logprob": logprob, "rank": rank} for token, logprob, rank in listed]


class Worker(LLMEngine):
    """An engine as Dynamo drives it."""

    def __init__(self, model: str, tokenizer: str | None, name: str | None, settings: Mapping[str, Any]) -> None:
        self.model = model
        self.tokenizer = tokenizer or model
        self.name = name
        self.settings = dict(settings)
        self.engine: lacuna.Engine | None = None

    @classmethod
    async def from_args(cls, argv: Sequence[str] | None = None) -> tuple[Worker, WorkerConfig]:
        """Called by Dynamo with the command line."""
        parser = argparse.ArgumentParser(prog="python -m lacuna.dynamo", description=__doc__.splitlines()[0])
        parser.add_argument("model", help="a Hugging Face folder, a hub id, or a GGUF file")
        parser.add_argument("--tokenizer", help="folder or hub id of the tokenizer, for a GGUF file")
        parser.add_argument("--served-model-name")
        parser.add_argument("--namespace", default="dynamo")
        parser.add_argument("--component", default="backend")
        parser.add_argument("--endpoint", default="generate")
        parser.add_argument("--discovery-backend", default="etcd", choices=["etcd", "file", "kubernetes", "mem"])
        parser.add_argument("--request-plane", default="tcp")
        parser.add_argument("--event-plane", default=None)
        parser.add_argument("--tool-call-parser", default=None)
        parser.add_argument("--reasoning-parser", default=None)
        args, more = parser.parse_known_args(argv)
        engine = cls(args.model, args.tokenizer, args.served_model_name, settings(more))
        return engine, WorkerConfig(
            namespace=args.namespace,
            component=args.component,
            endpoint=args.endpoint,
            model_name=engine.tokenizer,
            served_model_name=args.served_model_name or lacuna_name(args.model),
            discovery_backend=args.discovery_backend,
            request_plane=args.request_plane,
            event_plane=args.event_plane,
            tool_call_parser=args.tool_call_parser,
            reasoning_parser=args.reasoning_parser,
            # The router goes by what it has sent where (`--no-kv-events`): this worker tells it nothing.
            enable_kv_routing=False,
        )

    async def start(self, worker_id: int) -> EngineConfig:
        """Loads the model."""
        del worker_id
        self.engine = engine = await asyncio.to_thread(lambda: lacuna.Engine(self.model, **self.settings))
        return EngineConfig(
            model=self.tokenizer,
            served_model_name=self.name or lacuna_name(self.model),
            llm=LlmRegistration(context_length=engine.context_tokens, kv_cache_block_size=BLOCK_TOKENS),
        )

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The tokens after a prompt, as they come. A client that goes away ends it within a step."""
        if self.engine is None:
            raise RuntimeError("the engine has not been started")
        prompt = list(request["token_ids"])
        fields = sampling(request)
        fields.setdefault("max_tokens", self.engine.context_tokens - len(prompt))
        written = 0
        # A task of its own waits for the client to go: between two tokens there may be a long prompt.
        stream = self.engine.astream(prompt, **fields)
        async with ended_with(stream, context):
            async for piece in stream:
                said = chunk(piece)
                written += len(said["token_ids"])
                if "finish_reason" in said:
                    said["completion_usage"] = usage(len(prompt), written)
                yield said
        if context.is_stopped():
            yield {"token_ids": [], "index": 0, "finish_reason": "cancelled", "completion_usage": usage(len(prompt), written)}

    async def cleanup(self) -> None:
        """Gives all memory back."""
        engine, self.engine = self.engine, None
        if engine is not None:
            await asyncio.to_thread(engine.close)


class ended_with:
    """Closes a stream when the client of a request goes away, until the block ends."""

    def __init__(self, stream: Any, context: Any) -> None:
        self.stream = stream
        self.context = context

    async def __aenter__(self) -> None:
        self.watch = asyncio.ensure_future(self._watch())

    async def __aexit__(self, *_: object) -> None:
        self.watch.cancel()
        await self.stream.aclose()

    async def _watch(self) -> None:
        await self.context.async_killed_or_stopped()
        await self.stream.aclose()


def usage(prompt: int, written: int) -> dict[str, int]:
    """As OpenAI counts."""
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def settings(options: Sequence[str]) -> dict[str, Any]:
    """Options of the command line, `--name value`, `--name=value` or `--flag`, as an engine's settings."""
    read: dict[str, Any] = {}
    left = list(options)
    while left:
        option = left.pop(0)
        if not option.startswith("--"):
            raise SystemExit(f"lacuna.dynamo: `{option}` is no option")
        name, given, value = option[2:].partition("=")
        if not given:
            value = left.pop(0) if left and not left[0].startswith("--") else True
        read[name.replace("-", "_")] = int(value) if isinstance(value, str) and value.isdigit() else value
    return read


def lacuna_name(model: str) -> str:
    """What clients call a model: a hub id as it is; of a path, the last part without `.gguf`."""
    last = model.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
    return model if model.count("/") == 1 and not model.startswith((".", "/")) else last


def main() -> None:
    """`python -m lacuna.dynamo`."""
    run(Worker)


if __name__ == "__main__":
    main()
