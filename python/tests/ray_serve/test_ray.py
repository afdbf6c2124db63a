"""Replicas on Ray Serve: prompts go where their beginnings are, and what was not begun is not lost with a replica."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from ray import serve  # noqa: E402

import lacuna  # noqa: E402
import lacuna.ray as replicas_of  # noqa: E402

REPLICAS = 3
WORDS = ["borrow", "trait", "lifetime", "module", "closure", "iterator", "macro", "crate", "slice", "match"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    serve.start(http_options={"port": 8123})
    app = replicas_of.build_openai_app("demo", replicas=REPLICAS, budget="32MiB", ctx=1024)
    serve.run(app, name="lacuna", route_prefix="/")
    yield "http://127.0.0.1:8123"
    serve.shutdown()
    ray.shutdown()


def text(seed: int, words: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words))


def chat(url: str, content: str, **fields: Any) -> tuple[dict[str, Any], str]:
    """The reply, and which replica it is of."""
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, **fields}
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply), reply.headers["x-lacuna-replica"]


def test_prompts_find_what_was_computed_of_them(url: str) -> None:
    prefixes = [text(seed, 300) for seed in range(12)]
    prompts = [f"{prefix} Question {number}" for number in range(10) for prefix in prefixes]
    random.Random(1).shuffle(prompts)
    with ThreadPoolExecutor(3) as threads:
        replies = list(threads.map(lambda prompt: chat(url, prompt), prompts))
    used = [reply["usage"] for reply, _ in replies]
    whole = sum(usage["prompt_tokens"] for usage in used)
    found = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in used)
    print(f"found {found} of {whole} prompt tokens: {found / whole:.3f}")
    assert found / whole >= 0.85
    assert len({replica for _, replica in replies}) > 1, "not all of them on one"


def test_replies_are_those_of_an_engine_alone(url: str) -> None:
    with lacuna.Engine("demo", ctx=1024, threads=1) as engine:
        messages = [{"role": "user", "content": "What is ownership?"}]
        alone = engine.chat(messages, max_tokens=12, temperature=0)
    reply, _ = chat(url, "What is ownership?", max_tokens=12)
    assert reply["choices"] == alone["choices"]
    request = urllib.request.Request(
        url + "/v1/chat/completions",
        json.dumps({"messages": messages, "max_tokens": 12, "temperature": 0, "stream": True}).encode(),
    )
    with urllib.request.urlopen(request, timeout=120) as stream:
        datas = [line[6:] for line in stream.read().decode().splitlines() if line.startswith("data: {")]
    said = "".join(json.loads(data)["choices"][0]["delta"].get("content", "") for data in datas)
    assert said == alone["choices"][0]["message"]["content"]


def test_what_is_wrong_is_said_through_it(url: str) -> None:
    for path, body, status in [("/v1/chat/completions", b"{", 400), ("/nowhere", b"{}", 404)]:
        request = urllib.request.Request(url + path, body)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
        assert refused.value.code == status
        assert "message" in json.load(refused.value)["error"]


def engines() -> list[int]:
    """Processes of the replicas."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            name = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if entry.name.isdigit() and name.startswith(b"ray::ServeReplica:lacuna:engine"):
            found.append(int(entry.name))
    return found


def test_a_replica_killed_under_load_loses_nothing_that_had_not_begun(url: str) -> None:
    """Replies that are whole begin when they are done, so each of these is answered, by whichever replica."""
    done: list[str] = []
    before = engines()
    assert len(before) == REPLICAS

    def ask(number: int) -> str:
        reply, replica = chat(url, f"{text(number, 60)} Question {number}", max_tokens=24)
        assert reply["choices"][0]["message"]["content"]
        done.append(replica)
        return replica

    def kill() -> None:
        while len(done) < 20:
            time.sleep(0.01)
        os.kill(before[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with ThreadPoolExecutor(8) as threads:
        answered = list(threads.map(ask, range(120)))
    killer.join()
    assert len(answered) == 120
    until = time.monotonic() + 120
    while len(engines()) < REPLICAS or before[0] in engines():
        assert time.monotonic() < until, "another takes its place"
        time.sleep(0.1)


def test_replicas_come_and_go(url: str) -> None:
    for count in [1, 2]:
        app = replicas_of.build_openai_app("demo", replicas=count, budget="32MiB", ctx=1024)
        serve.run(app, name="lacuna", route_prefix="/")
        until = time.monotonic() + 120
        while len(engines()) != count:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert chat(url, "What is ownership?")[0]["choices"]
