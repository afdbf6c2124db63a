"""Callers that get it wrong: an error that says what, and never a hang or the end of the process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest

import lacuna

REFERENCE = Path(__file__).parents[2] / "reference"
EAGLE = REFERENCE / "heads" / "eagle3" / "head.gguf"

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
    with pytest.raises(lacuna.InvalidRequest):
        engine.generate(tokens)
    if isinstance(tokens[0], int):
        with pytest.raises(lacuna.InvalidRequest):
            engine.logits(tokens)
        with pytest.raises(lacuna.InvalidRequest):
            engine.session(tokens)
        with pytest.raises(lacuna.InvalidRequest):
            engine.tokenizer.decode(tokens)


def test_halves_of_characters_are_refused_as_what_they_are(engine: lacuna.Engine) -> None:
    half = "a\ud800b"
    calls: list[Any] = [
        lambda: engine.generate(half),
        lambda: engine.generate(["What is it?", half]),
        lambda: engine.stream(half),
        lambda: engine.generate("What is it?", stop=half),
        lambda: engine.chat([{"role": "user", "content": half}]),
        lambda: engine.tokenizer.encode(half),
        lambda: engine.session(half),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="surrogates"):
            call()


def test_the_prompt_of_a_list_that_is_wrong_is_named(engine: lacuna.Engine) -> None:
    for prompts in [["What is it?", "", "word " * 5000], [[1], [10**9]]]:
        with pytest.raises(lacuna.InvalidRequest, match=r"prompts\[1\]") as refused:
            engine.generate(prompts)
        assert refused.value.param == "prompts[1]"


def test_all_prompts_are_checked_before_the_first_is_computed(alone: lacuna.Engine) -> None:
    # Those that only the engine refuses were computed up to there, and lost.
    for last in ["", [10**9]]:
        prompts: list[Any] = ["What is it?"] * 100 + [last]
        with pytest.raises(lacuna.InvalidRequest, match=r"prompts\[100\]"):
            alone.generate(prompts)
    assert alone.memory()["counters"]["requests"] == 0


def test_places_count_to_any_number() -> None:
    # Twice as many were to be under way, which is none for this one: `generate` waited for good.
    with lacuna.Engine("demo", ctx=256, threads=1, max_running=2**63) as engine:
        assert engine.generate("What is it?", max_tokens=2)


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
    fields: Any = {"temperature": 0}
    with pytest.raises(TypeError, match="SamplingParams"):
        engine.generate("What is it?", fields)


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


def test_numbers_of_numpy_are_numbers(engine: lacuna.Engine) -> None:
    expected = engine.generate("What is it?", temperature=0.5, seed=7, max_tokens=4, stop_token_ids=[1, 2])
    fields: dict[str, Any] = {
        "temperature": numpy.float32(0.5),
        "seed": numpy.uint8(7),
        "max_tokens": numpy.int64(4),
        "stop_token_ids": numpy.array([1, 2]),
        "ignore_eos": numpy.bool_(False),
    }
    found = engine.generate("What is it?", **fields)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    with pytest.raises(lacuna.InvalidRequest):
        engine.generate("What is it?", temperature=numpy.float32("nan"))


def test_a_text_is_no_conversation(engine: lacuna.Engine) -> None:
    for messages in ["Hello", {"role": "user", "content": "Hello"}, ["Hello"], [5], 5]:
        wrong: Any = messages
        with pytest.raises(TypeError):
            engine.chat(wrong)
        with pytest.raises(TypeError):
            engine.tokenizer.apply_chat_template(wrong)


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


@pytest.mark.parametrize(
    ("settings", "param", "said"),
    [
        ({"kv_type": "f12"}, "kv_type", "q8_0"),
        ({"matmul_precision": "f12"}, "matmul_precision", "bf16"),
        ({"no_prefix_cach": True}, "no_prefix_cach", "no_prefix_cache"),
        ({"kv_cache_bytes": "1GiB"}, None, "kv_cache "),
        ({"help": True}, "help", "help"),
        ({"json": True}, "json", "json"),
        ({"": True}, "", "no setting"),
        ({"budget=1GiB": True}, "budget=1GiB", "no setting"),
    ],
    ids=str,
)
def test_what_is_said_of_settings_has_their_names(settings: dict[str, Any], param: str | None, said: str) -> None:
    with pytest.raises(lacuna.InvalidRequest) as refused:
        lacuna.Engine("demo", **settings)
    message = str(refused.value)
    assert refused.value.param == param or param is None, "which one"
    assert said in message, "what would do"
    assert "--" not in message and "Usage" not in message, "what is for a terminal"


def test_a_draft_model_and_eyes_are_not_passed_over(tmp_path: Path) -> None:
    # They were taken for settings, and nobody looked at them.
    missing = tmp_path / "missing.gguf"
    named: list[dict[str, Any]] = [{"draft_model": missing}, {"mmproj": missing}]
    for settings in named:
        with pytest.raises(lacuna.ModelError, match="missing"):
            lacuna.Engine("demo", **settings)
    with pytest.raises(lacuna.LacunaError, match="image"):
        lacuna.Engine("demo", image_max_tokens=64)
    with pytest.raises(lacuna.LacunaError):
        lacuna.Engine("demo", speculate="mtp")
    with pytest.raises(lacuna.InvalidRequest) as refused:
        lacuna.Engine(REFERENCE / "heads" / "eagle3" / "model.gguf", speculate="off", draft_model=EAGLE)
    assert "--" not in str(refused.value)


def test_a_draft_model_is_there_and_the_text_is_the_same(engine: lacuna.Engine) -> None:
    (expected,) = engine.generate("What is ownership?", temperature=0, max_tokens=20)
    with lacuna.Engine("demo", ctx=1024, threads=1, draft_model="demo") as guessing:
        (found,) = guessing.generate("What is ownership?", temperature=0, max_tokens=20)
        assert found.token_ids == expected.token_ids
        assert guessing.memory()["budget"]["draft_bytes"] > 0, "it is there, though its guesses may not pay"
        assert engine.memory()["budget"]["draft_bytes"] == 0


def test_a_head_is_put_beside_its_model() -> None:
    model = REFERENCE / "heads" / "eagle3" / "model.gguf"
    prompt = list(range(3, 20))
    with lacuna.Engine(model, threads=1) as plain:
        (expected,) = plain.generate(prompt, temperature=0, max_tokens=20, ignore_eos=True)
        without = plain.memory()
    with lacuna.Engine(model, threads=1, draft_model=EAGLE) as headed:
        (found,) = headed.generate(prompt, temperature=0, max_tokens=20, ignore_eos=True)
        assert found.token_ids == expected.token_ids
        assert headed.memory()["budget"] != without["budget"], "it is in the plan"


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
    read: list[int] = []

    def use(work: Any) -> None:
        try:
            work()
        except lacuna.InUse as error:
            refused.append(error)

    session = engine.session("What is ownership?")
    stream = engine.stream("What is ownership?", ignore_eos=True, max_tokens=900)
    works = [lambda: read.append(len(list(stream)))] * 8 + [lambda: session.generate(ignore_eos=True, max_tokens=400)] * 8
    threads = [threading.Thread(target=use, args=[work]) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert all(isinstance(error, lacuna.InUse) for error in refused)
    # Those that came second took the stream from the first with them, which found it ended in the middle.
    assert max(read) >= 900


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
    if end == signal.SIGINT:
        # Whoever runs tests in the background of a shell has it ignored, and children with them.
        code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + code
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


def interrupted_soon(begin: str, wait: str) -> None:
    """Fails when what waits, which takes very long, is not ended by an interrupt within seconds."""
    code = f"""
import lacuna, os
{begin}
print("begun", flush=True)
try:
    {wait}
except KeyboardInterrupt:
    print("interrupted", flush=True)
    # What was begun beside is nobody's business.
    os._exit(0)
"""
    child = run(code, end=signal.SIGINT)
    try:
        out, errors = child.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        child.kill()
        raise
    assert (child.returncode, out, errors) == (0, "interrupted\n", "")


@pytest.mark.parametrize(
    ("begin", "wait"),
    [
        (
            f"embedder = lacuna.Embedder({str(REFERENCE / 'encoders' / 'bert' / 'mean.gguf')!r}, threads=1); "
            "texts = ['abc ' * 10] * 1_000_000",
            "embedder.embed(texts)",
        ),
        (
            f"reranker = lacuna.Reranker({str(REFERENCE / 'encoders' / 'bert-scores' / 'hf')!r}, threads=1); "
            "texts = ['abc xyz'] * 1_000_000",
            "reranker.score('abc', texts)",
        ),
        (
            "engine = lacuna.Engine('demo', threads=1); texts = ['What is it? ' * 30] * 200_000",
            "engine.generate(texts)",
        ),
        (
            "engine = lacuna.Engine('demo', ctx=200_000, threads=1, kv_type='q8_0')",
            "engine.logits([5] * 190_000)",
        ),
        (
            # A reply that takes very long is under way.
            "engine = lacuna.Engine('demo', ctx=500_000, threads=1); server = engine.serve(); import json, socket; "
            "body = json.dumps({'prompt': 'x', 'max_tokens': 400_000, 'ignore_eos': True}).encode(); "
            "client = socket.create_connection((server.host, server.port)); "
            "client.sendall(b'POST /v1/completions HTTP/1.1\\r\\nhost: localhost\\r\\ncontent-type: application/json\\r\\n' "
            "b'content-length: %d\\r\\n\\r\\n%s' % (len(body), body))\n"
            "while not engine.memory()['running']: pass",
            "server.close(grace=120)",
        ),
    ],
    ids=["embed", "score", "prompts", "logits", "server"],
)
def test_an_interrupt_ends_what_computes(begin: str, wait: str) -> None:
    interrupted_soon(begin, wait)


def test_an_interrupt_ends_a_download(tmp_path: Path) -> None:
    # A hub that takes connections, and never says a word.
    with socket.create_server(("127.0.0.1", 0)) as hub:
        address = f"http://127.0.0.1:{hub.getsockname()[1]}"
        begin = f"os.environ |= {{'HF_ENDPOINT': {address!r}, 'HF_HOME': {str(tmp_path)!r}}}"
        for kind in ["Engine", "Embedder", "Reranker"]:
            interrupted_soon(begin, f"lacuna.{kind}('some-body/some-model')")


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
