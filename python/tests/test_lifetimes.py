"""What an engine lives for: it ends with the last that uses it, and not before."""

from __future__ import annotations

import gc
import itertools
import json
import os
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from conftest import wait_until

import lacuna

ENGINE_THREAD = "lacuna-engine"
MESSAGES = [{"role": "user", "content": "What is ownership?"}]


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Nothing here may wait for the collector, which knows nothing of the memory of engines."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def made() -> lacuna.Engine:
    return lacuna.Engine("demo", ctx=1024, threads=1)


def engines() -> int:
    """Engines of this process, by the threads that step them."""
    count = 0
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/comm") as name:
                count += name.read().strip() == ENGINE_THREAD
        except FileNotFoundError:
            continue
    return count


def test_an_engine_ends_when_nobody_has_it() -> None:
    before = engines()
    engine = made()
    assert engine.tokenizer.encode("abc") and engines() == before + 1
    del engine
    wait_until(lambda: engines() == before)


def test_what_comes_of_an_engine_keeps_it() -> None:
    before = engines()
    assert len(list(made().stream("What is it?", ignore_eos=True, max_tokens=20))) >= 20
    assert list(made().chat(MESSAGES, stream=True, max_tokens=4))
    assert made().session("What is it?").generate(max_tokens=4).token_ids
    assert made().tokenizer.apply_chat_template(MESSAGES)
    wait_until(lambda: engines() == before)


async def test_what_comes_of_an_engine_for_tasks_keeps_it() -> None:
    pieces = [piece async for piece in made().astream("What is it?", ignore_eos=True, max_tokens=20)]
    assert len(pieces) >= 20
    assert [chunk async for chunk in made().achat_stream(MESSAGES, max_tokens=4)]


def test_a_server_keeps_its_engine_until_it_is_dropped() -> None:
    before = engines()
    server = made().serve()
    body = json.dumps({"prompt": "What is it?", "max_tokens": 2}).encode()
    request = urllib.request.Request(server.url + "/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert json.load(reply)["choices"]
    del server
    wait_until(lambda: engines() == before)


def test_dropping_an_engine_does_not_hold_the_interpreter_up() -> None:
    """Its end waits for a step: of a prompt, that is long."""
    engine = lacuna.Engine("demo", ctx=9000, threads=1, max_batched_tokens=8192, prefix_cache=False)
    stream = engine.stream([5] * 8192, max_tokens=1)
    wait_until(lambda: engine.kv_bytes_in_use > 0)
    turns: list[float] = []
    ended = threading.Event()

    def turn() -> None:
        while not ended.is_set():
            turns.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=turn)
    thread.start()
    del stream
    begun = time.monotonic()
    del engine
    took = time.monotonic() - begun
    ended.set()
    thread.join()
    longest = max((after - before for before, after in itertools.pairwise(turns)), default=0.0)
    assert took < 0.05 or longest < took / 2, (took, longest)
