"""Callers that get it wrong: an error that says what, and never a hang or the end of the process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest

import lacuna

WRONG_TYPES: list[Any] = [
    None,
    5,
    b"bytes",
    [None],
    [5.5],
    [["a"]],
    [[1.0]],
    {"a": 1}.values(),
    numpy.array([1.0, 2.0]),
    numpy.array("text"),
    object(),
]


@pytest.mark.parametrize("prompt", WRONG_TYPES, ids=repr)
def test_prompts_of_other_types_are_refused(engine: lacuna.Engine, prompt: Any) -> None:
    with pytest.raises((TypeError, lacuna.InvalidRequest)):
        engine.generate(prompt)
    with pytest.raises((TypeError, lacuna.InvalidRequest)):
        engine.stream(prompt)
    with pytest.raises((TypeError, lacuna.InvalidRequest)):
        engine.logits(prompt)


WRONG_TOKENS: list[Any] = [[-1], [2**32], [2**40], [10**9], [[1], [-1]], [[]]]


@pytest.mark.parametrize("tokens", WRONG_TOKENS, ids=repr)
def test_tokens_that_are_none_are_refused(engine: lacuna.Engine, tokens: Any) -> None:
    with pytest.raises((lacuna.InvalidRequest, OverflowError, TypeError)):
        engine.generate(tokens)
    if isinstance(tokens[0], int):
        with pytest.raises((lacuna.InvalidRequest, OverflowError)):
            engine.logits(tokens)
        with pytest.raises((lacuna.InvalidRequest, OverflowError)):
            engine.session(tokens)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", "warm"),
        ("top_p", 2),
        ("n", 0),
        ("n", 10**6),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 1.5),
        ("logprobs", 21),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [10**9]),
        ("logit_bias", {10**9: 1.0}),
        ("seed", "seven"),
        ("structured_outputs", {"regex": "("}),
    ],
)
def test_fields_out_of_range_are_named(engine: lacuna.Engine, field: str, value: Any) -> None:
    with pytest.raises(lacuna.InvalidRequest) as refused:
        engine.generate("What is it?", **{field: value})
    said = f"{refused.value.param} {refused.value}"
    assert field.split("_")[0] in said or isinstance(value, float), said


def test_no_prompts_have_no_outputs(engine: lacuna.Engine) -> None:
    assert engine.generate([]) == []
    with pytest.raises(lacuna.InvalidRequest):
        engine.generate("")
    with pytest.raises(lacuna.InvalidRequest):
        engine.logits([])


def test_fields_that_are_none_are_refused(engine: lacuna.Engine) -> None:
    with pytest.raises(TypeError, match="temprature"):
        engine.generate("What is it?", temprature=1)
    with pytest.raises(TypeError):
        engine.generate("What is it?", logit_bias={1: object()})


def test_what_does_not_fit_is_refused(engine: lacuna.Engine) -> None:
    with pytest.raises(lacuna.ContextTooLong):
        engine.generate("word " * 5000)
    with pytest.raises(lacuna.ContextTooLong):
        engine.logits([1] * 1025)
    with pytest.raises(lacuna.ContextTooLong):
        engine.session([1] * 1025)
    with pytest.raises(lacuna.ContextTooLong):
        engine.chat([{"role": "user", "content": "word " * 5000}])
    with pytest.raises(lacuna.ContextTooLong):
        engine.generate(["What is it?", "word " * 5000])


def test_chats_that_are_none_are_refused(engine: lacuna.Engine) -> None:
    for messages in [[], [{"role": "user"}], [{"content": 5, "role": "user"}]]:
        with pytest.raises(lacuna.InvalidRequest):
            engine.chat(messages)
        with pytest.raises(lacuna.InvalidRequest):
            list(engine.chat(messages, stream=True))
    with pytest.raises(TypeError):
        engine.chat([{"role": "user", "content": object()}])


@pytest.mark.parametrize(
    "settings",
    [{"budget": "much"}, {"ctx": 0}, {"kv": "holes"}, {"kv_type": "f12"}, {"threads": 10**6}, {"no_such": 1}],
    ids=str,
)
def test_settings_that_are_none_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(lacuna.InvalidRequest):
        lacuna.Engine("demo", **settings)
    with pytest.raises(TypeError):
        lacuna.Engine("demo", ctx=[1024])  # pyright: ignore[reportArgumentType]


def test_models_that_are_none_are_refused(tmp_path: os.PathLike[str]) -> None:
    file = os.path.join(tmp_path, "damaged.gguf")
    with open(file, "wb") as out:
        out.write(b"GGUF" + bytes(100))
    for model in [file, os.path.join(tmp_path, "missing.gguf"), tmp_path]:
        with pytest.raises(lacuna.ModelError):
            lacuna.Engine(model)
    with pytest.raises(lacuna.ModelError):
        lacuna.Embedder("demo")
    with pytest.raises(lacuna.ModelError):
        lacuna.Reranker("demo")


def test_many_threads_share_an_engine(engine: lacuna.Engine) -> None:
    expected = engine.generate("What is ownership?", temperature=0)[0].text

    def ask(number: int) -> str:
        if number % 3 == 0:
            return engine.generate("What is ownership?", temperature=0)[0].text
        if number % 3 == 1:
            stream = engine.stream("What is ownership?", temperature=0)
            return "".join(piece.text for piece in stream)
        with engine.session("What is ownership?") as session:
            return session.generate(temperature=0).text

    with ThreadPoolExecutor(24) as threads:
        assert set(threads.map(ask, range(72))) == {expected}


def test_two_threads_cannot_read_one_stream_or_use_one_session(engine: lacuna.Engine) -> None:
    refused: list[BaseException] = []

    def use(work: Any) -> None:
        try:
            work()
        except lacuna.InUse as error:
            refused.append(error)

    session = engine.session("What is ownership?")
    stream = engine.stream("What is ownership?", ignore_eos=True, max_tokens=900)
    works = [lambda: list(stream)] * 8 + [lambda: session.generate(ignore_eos=True, max_tokens=400)] * 8
    threads = [threading.Thread(target=use, args=[work]) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert all(isinstance(error, lacuna.InUse) for error in refused)


def use_after_fork(engine: lacuna.Engine, stream: Any, session: Any) -> None:
    uses: list[Any] = [
        lambda: engine.generate("What is it?"),
        lambda: engine.stream("What is it?"),
        lambda: engine.logits([1]),
        lambda: engine.memory(),
        lambda: engine.chat([{"role": "user", "content": "x"}]),
        lambda: engine.close(),
        lambda: list(stream),
        lambda: session.generate(),
        lambda: session.close(),
    ]
    for use in uses:
        try:
            use()
        except lacuna.Forked:
            continue
        os._exit(3)
    # What is its own works.
    with lacuna.Engine("demo", ctx=256, threads=1) as own:
        if not own.generate("What is it?", temperature=0)[0].text:
            os._exit(4)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_was_forked_is_told_and_can_have_its_own(engine: lacuna.Engine) -> None:
    stream = engine.stream("What is ownership?", ignore_eos=True, max_tokens=900)
    next(stream)
    session = engine.session("What is ownership?")
    session.generate(max_tokens=4)
    child = multiprocessing.get_context("fork").Process(
        target=use_after_fork, args=[engine, stream, session]
    )
    child.start()
    child.join(timeout=120)
    assert child.exitcode == 0, "it ended by itself, dropping all of them"
    assert next(stream).finish_reason is None, "the parent goes on"
    stream.close()
    assert session.generate(max_tokens=4).token_ids


def run(code: str, *, end: signal.Signals | None = None) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if end is not None:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        time.sleep(0.2)
        child.send_signal(end)
    return child


def test_an_interpreter_ends_with_everything_under_way() -> None:
    code = """
import asyncio, lacuna, threading
engine = lacuna.Engine("demo", ctx=1024, threads=1)
stream = engine.stream("What is ownership?", ignore_eos=True, max_tokens=900)
next(stream)
session = engine.session("What is ownership?")
server = engine.serve()
threading.Thread(target=lambda: list(stream), daemon=True).start()
async def begin():
    other = engine.astream("What is it?", ignore_eos=True, max_tokens=900)
    await other.__anext__()
    return other
other = asyncio.run(begin())
print("done")
"""
    # Several at once, since it takes luck to meet the end: a thread that came back just then took the process with it.
    for child in [run(code) for _ in range(8)]:
        out, errors = child.communicate(timeout=60)
        assert (out, errors, child.returncode) == ("done\n", "", 0)


def test_an_interrupt_ends_what_waits() -> None:
    for wait in ["engine.generate('x', fields)", "list(engine.stream('x', fields))"]:
        code = f"""
import lacuna
engine = lacuna.Engine("demo", ctx=1024, threads=1, prefix_cache=False)
fields = lacuna.SamplingParams(ignore_eos=True, max_tokens=900, n=16)
print("begun", flush=True)
try:
    while True:
        {wait}
except KeyboardInterrupt:
    print("interrupted", flush=True)
while engine.kv_bytes_in_use:
    pass
"""
        child = run(code, end=signal.SIGINT)
        out, errors = child.communicate(timeout=60)
        assert (child.returncode, out, errors) == (0, "interrupted\n", "")


def test_a_full_engine_says_when_to_try_again_and_lists_wait_for_their_turn() -> None:
    with lacuna.Engine("demo", ctx=1024, threads=1, max_running=2, max_queue=1) as engine:
        outputs = engine.generate([f"Question {number}" for number in range(20)], max_tokens=4)
        assert len(outputs) == 20
        streams = [engine.stream("What is it?", ignore_eos=True, max_tokens=900) for _ in range(2)]
        for stream in streams:
            next(stream)
        streams.append(engine.stream("What is it?", ignore_eos=True, max_tokens=900))
        with pytest.raises(lacuna.Busy) as refused:
            engine.stream("What is it?")
        assert refused.value.retry_after and refused.value.retry_after > 0
        for stream in streams:
            stream.close()


def test_a_chat_that_takes_too_long_is_given_up() -> None:
    with lacuna.Engine("demo", ctx=1024, threads=1, request_timeout=0.02) as engine:
        with pytest.raises(lacuna.DeadlineExceeded):
            engine.chat([{"role": "user", "content": "x"}], ignore_eos=True, max_tokens=900)
    with pytest.raises(lacuna.InvalidRequest):
        lacuna.Engine("demo", request_timeout=-1)
