"""What is not read to its end: its pages are free within a step."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable

import pytest
from conftest import wait_until

import lacuna

# Goes on until somebody ends it.
ENDLESS = lacuna.SamplingParams(ignore_eos=True, max_tokens=900, temperature=0.8)


def in_use(engine: lacuna.Engine) -> Callable[[], bool]:
    return lambda: engine.kv_bytes_in_use == 0


def test_a_stream_that_is_dropped_leaves_no_pages(alone: lacuna.Engine) -> None:
    stream = alone.stream("What is ownership?", ENDLESS)
    next(stream)
    assert alone.kv_bytes_in_use > 0
    del stream
    gc.collect()
    wait_until(in_use(alone))
    assert alone.memory()["counters"]["cancelled"] == 1


def test_a_stream_that_is_closed_ends(alone: lacuna.Engine) -> None:
    with alone.stream("What is ownership?", ENDLESS) as stream:
        next(stream)
    assert list(stream) == []
    wait_until(in_use(alone))


def test_a_stream_can_be_closed_by_another_thread_while_it_is_read(alone: lacuna.Engine) -> None:
    stream = alone.stream("What is ownership?", ENDLESS)
    read = threading.Thread(target=lambda: list(stream))
    read.start()
    wait_until(lambda: alone.kv_bytes_in_use > 0)
    stream.close()
    read.join(timeout=60)
    assert not read.is_alive()
    wait_until(in_use(alone))


def test_a_chat_that_is_dropped_leaves_no_pages(alone: lacuna.Engine) -> None:
    messages = [{"role": "user", "content": "What is ownership?"}]
    chunks = alone.chat(messages, stream=True, ignore_eos=True, max_tokens=900)
    next(chunks)
    del chunks
    gc.collect()
    wait_until(in_use(alone))


@pytest.mark.parametrize("seed", range(3))
async def test_a_hundred_streams_cancelled_at_random_leave_no_pages(
    alone: lacuna.Engine, seed: int
) -> None:
    draw = random.Random(seed)

    async def read(number: int, most: int) -> int:
        count = 0
        async for _ in alone.astream(f"Question {number}: what is it?", ENDLESS, seed=number):
            count += 1
            if count == most:
                break
        return count

    tasks = [asyncio.create_task(read(number, draw.randrange(1, 60))) for number in range(100)]
    left = list(tasks)
    while left:
        await asyncio.sleep(draw.random() / 100)
        left = [task for task in left if not task.done()]
        if left:
            draw.choice(left).cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in done} <= {int, asyncio.CancelledError}
    del tasks, left
    gc.collect()
    await asyncio.to_thread(wait_until, in_use(alone))
    memory = alone.memory()
    assert (memory["running"], memory["waiting"], memory["sessions"]) == (0, 0, [])
    assert memory["request_memory"]["held_bytes"] == 0
    (output,) = alone.generate("What is ownership?", temperature=0, max_tokens=4)
    assert len(output.token_ids) == 4, "it goes on for others"


async def test_a_second_task_is_refused_and_the_first_reads_on(alone: lacuna.Engine) -> None:
    """The source calls back whoever came last: the first waited for good, and the second closed what both read."""
    stream = alone.astream("What is ownership?", ignore_eos=True, max_tokens=60)

    async def read() -> int:
        return len([piece async for piece in stream])

    tasks = [asyncio.create_task(read()) for _ in range(3)]
    done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    first, *others = done
    assert isinstance(first, int) and first >= 60
    assert [type(error) for error in others] == [lacuna.InUse] * 2


async def test_a_task_that_is_cancelled_while_it_waits_cancels_its_chat(alone: lacuna.Engine) -> None:
    messages = [{"role": "user", "content": "What is ownership?"}]
    task = asyncio.create_task(alone.achat(messages, ignore_eos=True, max_tokens=900))
    while alone.kv_bytes_in_use == 0:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until, in_use(alone))


def test_a_loop_that_is_closed_while_a_stream_waits_disturbs_nobody(alone: lacuna.Engine) -> None:
    async def begin() -> object:
        stream = alone.astream("What is ownership?", ENDLESS)
        await stream.__anext__()
        return stream

    stream = asyncio.run(begin())
    (output,) = alone.generate("What is a trait?", max_tokens=4, ignore_eos=True)
    assert len(output.token_ids) == 4
    del stream
    gc.collect()
    wait_until(in_use(alone))


def test_closing_an_engine_ends_everything_under_way() -> None:
    engine = lacuna.Engine("demo", ctx=1024, threads=1)
    stream = engine.stream("What is ownership?", ENDLESS)
    session = engine.session("What is")
    next(stream)
    failures: list[BaseException] = []

    def generate() -> None:
        try:
            engine.generate(["What is ownership?"] * 8, ENDLESS)
        except lacuna.LacunaError as error:
            failures.append(error)

    generating = threading.Thread(target=generate)
    generating.start()
    wait_until(lambda: engine.memory()["running"] >= 2)
    engine.close()
    engine.close()
    generating.join(timeout=60)
    assert not generating.is_alive()
    assert [type(failure) for failure in failures] == [lacuna.Closed]
    with pytest.raises(lacuna.Closed):
        list(stream)
    with pytest.raises(lacuna.Closed):
        session.generate()
    with pytest.raises(lacuna.Closed):
        engine.generate("What is ownership?")
    with pytest.raises(lacuna.Closed):
        engine.chat([{"role": "user", "content": "x"}])
