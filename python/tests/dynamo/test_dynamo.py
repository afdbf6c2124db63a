"""A worker of NVIDIA Dynamo, alone and behind Dynamo's frontend. Needs `ai-dynamo`: run by `.ci/test-dynamo`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lacuna
import pytest

pytest.importorskip("dynamo.common.backend")

from lacuna.dynamo import Worker, lacuna_name, sampling, settings

# Random weights, and a vocabulary of bytes.
MODEL = str(Path(__file__).parents[3] / "reference/qwen3/hf")
SETTINGS = {"budget": "64MiB", "threads": 1}
PROMPT = [10, 20, 30, 40]


class Client:
    """A request's context, as Dynamo has it."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    def is_stopped(self) -> bool:
        return self.gone.is_set()

    async def async_killed_or_stopped(self) -> None:
        await self.gone.wait()


def request(**fields: Any) -> dict[str, Any]:
    stops = {"max_tokens": 12, "ignore_eos": True} | fields.pop("stop_conditions", {})
    return {"token_ids": PROMPT, "sampling_options": {"temperature": 0.0}, "stop_conditions": stops, **fields}


async def replied(worker: Worker, asked: dict[str, Any]) -> list[dict[str, Any]]:
    return [chunk async for chunk in worker.generate(asked, Client())]


@pytest.fixture
def worker() -> Iterator[Worker]:
    made, _ = asyncio.run(Worker.from_args([MODEL, "--budget", "64MiB", "--threads=1", "--namespace", "a"]))
    asyncio.run(made.start(7))
    yield made
    asyncio.run(made.cleanup())
    asyncio.run(made.cleanup())


def test_tokens_are_the_engines_and_the_last_chunk_has_what_they_took(worker: Worker) -> None:
    chunks = asyncio.run(replied(worker, request(output_options={"logprobs": 2})))
    tokens = [token for chunk in chunks for token in chunk["token_ids"]]
    with lacuna.Engine(MODEL, **SETTINGS) as engine:
        expected = engine.generate(PROMPT, temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)[0]
    assert tokens == expected.token_ids
    assert chunks[-1]["finish_reason"] == "length"
    assert chunks[-1]["completion_usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
    assert expected.logprobs is not None
    for chunk, logprob in zip(chunks, expected.logprobs):
        assert chunk["log_probs"] == [logprob.logprob]
        listed = chunk["top_logprobs"][0]
        assert [one["logprob"] for one in sorted(listed, key=lambda one: one["rank"])] == sorted(
            {one.logprob for one in logprob.top} | {logprob.logprob}, reverse=True
        )


def test_a_client_that_goes_away_ends_its_text(worker: Worker) -> None:
    async def go_away() -> list[dict[str, Any]]:
        client, chunks = Client(), list[dict[str, Any]]()
        async for chunk in worker.generate(request(stop_conditions={"max_tokens": 400}), client):
            chunks.append(chunk)
            client.gone.set()
            await asyncio.sleep(0)
        return chunks

    chunks = asyncio.run(asyncio.wait_for(go_away(), 60))
    assert chunks[-1]["finish_reason"] == "cancelled" and len(chunks) < 400
    engine = worker.engine
    assert engine is not None
    end = time.monotonic() + 60
    while engine.memory()["sessions"] and time.monotonic() < end:
        time.sleep(0.01)
    assert not engine.memory()["sessions"]


def test_what_a_request_asks_for_is_what_the_engine_gets() -> None:
    asked = {
        "sampling_options": {"temperature": 0.5, "top_k": -1, "seed": 3, "guided_decoding": {"regex": "[0-9]+"}},
        "stop_conditions": {"max_tokens": 5, "stop": ["x"], "stop_token_ids_hidden": [9]},
        "output_options": {"logprobs": 1},
    }
    assert sampling(asked) == {
        "temperature": 0.5, "seed": 3, "max_tokens": 5, "stop": ["x"], "stop_token_ids": [9], "logprobs": 1,
        "structured_outputs": {"regex": "[0-9]+"},
    }  # fmt: skip
    assert settings(["--budget", "2GiB", "--no-prefix-cache", "--threads=2"]) == {
        "budget": "2GiB", "no_prefix_cache": True, "threads": 2,
    }  # fmt: skip
    assert [lacuna_name(it) for it in ("Qwen/Qwen3-0.6B", "/models/a.gguf", "./a/b")] == ["Qwen/Qwen3-0.6B", "a", "b"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_behind_the_frontend_replies_are_the_engines(tmp_path: Path) -> None:
    port = free_port()
    environment = os.environ | {"DYN_FILE_KV": str(tmp_path)}
    commands = [
        ["dynamo.frontend", "--http-port", str(port)],
        ["lacuna.dynamo", MODEL, "--budget", "64MiB", "--threads", "1", "--served-model-name", "tiny"],
    ]
    started = [
        subprocess.Popen([sys.executable, "-m", *command, "--discovery-backend", "file"], env=environment)
        for command in commands
    ]

    def call(path: str, fields: dict[str, Any] | None = None) -> Any:
        body = None if fields is None else json.dumps({"model": "tiny", **fields}).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as reply:
            return json.load(reply)

    def is_served() -> bool:
        try:
            return any(model["id"] == "tiny" for model in call("/v1/models")["data"])
        except OSError:
            return False

    try:
        end = time.monotonic() + 120
        while not is_served():
            assert time.monotonic() < end and all(it.poll() is None for it in started)
            time.sleep(0.1)
        with lacuna.Engine(MODEL, **SETTINGS) as engine:
            for text in ["abc", "Where memory is scarce"]:
                fields = {"prompt": text, "max_tokens": 16, "temperature": 0}
                reply = call("/v1/completions", fields)
                tokens = engine.tokenizer.encode(text)
                expected = engine.generate(tokens, temperature=0, max_tokens=16)[0]
                assert reply["usage"]["prompt_tokens"] == len(tokens)
                assert reply["usage"]["completion_tokens"] == len(expected.token_ids)
                assert reply["choices"][0]["text"] == expected.text
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
