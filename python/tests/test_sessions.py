"""Sessions: gone on with, forked, cut back, kept."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
from conftest import wait_until

import lacuna
from lacuna import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def test_a_session_says_what_a_request_says(engine: lacuna.Engine) -> None:
    (output,) = engine.generate("What is ownership?", GREEDY)
    with engine.session("What is ownership?") as session:
        choice = session.generate(GREEDY)
        assert (choice.text, choice.token_ids) == (output.text, output.token_ids)
        assert session.tokens[-12:] == choice.token_ids
        session.append(" And what is a trait?")
        more = session.generate(GREEDY)
        (expected,) = engine.generate(session.tokens[:-12], GREEDY)
        assert more.token_ids == expected.token_ids


def test_a_fork_shares_pages_and_goes_its_own_way(alone: lacuna.Engine) -> None:
    session = alone.session("What is ownership? " * 60)
    session.generate(GREEDY)
    one = alone.kv_bytes_in_use
    forks = [session.fork() for _ in range(8)]
    assert alone.kv_bytes_in_use < 2 * one
    assert all(fork.shared_kv_bytes > 0 for fork in forks)
    before = session.tokens
    said = {tuple(fork.generate(temperature=1.5, seed=n, max_tokens=12).token_ids) for n, fork in enumerate(forks)}
    assert len(said) > 1
    assert session.tokens == before
    del forks
    session.close()
    gc.collect()
    assert alone.kv_bytes_in_use == 0


def test_a_session_is_cut_back_and_says_the_same_again(engine: lacuna.Engine) -> None:
    with engine.session("What is ownership?") as session:
        length = len(session)
        first = session.generate(GREEDY)
        kept = session.truncate(length)
        assert len(session) == length and kept == length - 1
        assert session.generate(GREEDY) == first
        session.rewind(12)
        assert len(session) == length
        assert session.generate(GREEDY) == first
        with pytest.raises(lacuna.InvalidRequest):
            session.rewind(-1)
        session.rewind(10**9)
        assert (len(session), session.pending) == (0, 0)
        with pytest.raises(lacuna.InvalidRequest):
            session.generate(GREEDY)


def test_a_stream_of_a_session_may_stop_in_the_middle(engine: lacuna.Engine) -> None:
    with engine.session("What is ownership?") as session:
        whole = session.fork().generate(GREEDY)
        length = len(session)
        pieces = session.stream(GREEDY)
        first = next(pieces)
        assert len(session) == length + 1
        rest = session.generate(GREEDY, max_tokens=11)
        assert [first.token_id, *rest.token_ids] == whole.token_ids
        with pytest.raises(lacuna.InUse):
            next(pieces)


def test_a_session_is_kept_in_a_file(engine: lacuna.Engine, tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with engine.session("What is ownership?") as session:
        session.generate(GREEDY)
        session.save(path, note="a note")
        expected = session.generate(GREEDY)
    with lacuna.Engine("demo", ctx=1024, threads=1) as other:
        with other.load_session(path) as loaded:
            assert (loaded.note, loaded.pending) == ("a note", 1)
            assert loaded.generate(GREEDY) == expected
    with lacuna.Engine("demo", ctx=1024, threads=1, kv_type="q8_0") as differing:
        with pytest.raises(lacuna.InvalidRequest):
            differing.load_session(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(lacuna.LacunaError):
        engine.load_session(path)
    with pytest.raises(lacuna.LacunaError, match="missing.session") as refused:
        engine.load_session(tmp_path / "missing.session")
    assert str(refused.value).count("missing.session") == 1
    with engine.session("What is ownership?") as session, pytest.raises(lacuna.LacunaError, match="nowhere"):
        session.save(tmp_path / "nowhere" / "a.session")


def test_what_only_requests_have_is_refused(engine: lacuna.Engine) -> None:
    with engine.session("What is ownership?") as session:
        for name, value in {"n": 2, "logprobs": 1, "response_format": {"type": "json_object"}}.items():
            with pytest.raises(lacuna.InvalidRequest) as refused:
                session.generate(GREEDY, **{name: value})
            assert refused.value.param == name
        assert session.generate(GREEDY).token_ids, "it is as it was"


def test_a_closed_session_says_so(engine: lacuna.Engine) -> None:
    session = engine.session("What is ownership?")
    session.close()
    session.close()
    with pytest.raises(lacuna.Closed):
        session.append("x")


def test_a_session_can_be_closed_while_another_thread_goes_on(alone: lacuna.Engine) -> None:
    """Its end was refused as long as somebody used it: a `with` block ended with that error in place of its own."""
    failures: list[lacuna.LacunaError] = []

    def go_on(session: lacuna.Session) -> None:
        try:
            while True:
                session.truncate(4)
                session.generate(ignore_eos=True, max_tokens=900)
        except lacuna.LacunaError as error:
            failures.append(error)

    with alone.session("What is ownership? " * 3) as session:
        thread = threading.Thread(target=go_on, args=[session])
        thread.start()
        wait_until(lambda: alone.kv_bytes_in_use > 0)
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert [type(failure) for failure in failures] == [lacuna.Closed]
    assert alone.kv_bytes_in_use == 0


@pytest.mark.parametrize("tokens", [b"abc", bytearray(b"abc")])
def test_bytes_are_no_tokens(engine: lacuna.Engine, tokens: bytes | bytearray) -> None:
    with engine.session("abc") as session:
        length = len(session)
        with pytest.raises(TypeError):
            session.append(tokens)
        assert len(session) == length
