"""The bindings as another language has them: through the Python that UniFFI writes. Run by `.ci/test-bindings`."""

import asyncio
from pathlib import Path

import lacuna
import pytest
from lacuna import Chat, Engine, EngineSettings, FinishReason, LacunaError, Role, TextSettings

ENCODER = Path(__file__).parents[2] / "reference/encoders/bert/mean.gguf"
QUESTION = [Chat(role=Role.USER, text="What is ownership?")]
PROMPT = "Ownership is"


def usual(**more):
    return EngineSettings(threads=1, context_tokens=512, **more)


def greedy(**more):
    return TextSettings(temperature=0.0, **{"max_tokens": 24, **more})


async def pieces(stream):
    read = []
    while (piece := await stream.next()) is not None:
        read.append(piece)
    return read


async def settled(engine, bytes):
    """Waits until no more than so many bytes of KV pages are in use."""
    for _ in range(500):
        if engine.memory().kv_in_use_bytes <= bytes:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(engine.memory())


def with_engine(use, **settings):
    async def run():
        engine = await Engine.open("demo", usual(**settings))
        try:
            return await use(engine)
        finally:
            await engine.shut_down()

    return asyncio.run(asyncio.wait_for(run(), 120))


def test_a_reply_comes_in_pieces_and_ends_with_what_it_took():
    async def use(engine):
        read = await pieces(await engine.chat(QUESTION, greedy()))
        *said, end = read
        assert len(said) > 3 and all(piece.is_CONTENT() for piece in said)
        assert end.is_END() and end.reason == FinishReason.MAX_TOKENS
        assert end.usage.generated_tokens == 24 and end.usage.prompt_tokens > 4
        text = "".join(piece.text for piece in said)
        # The same question again: what was computed is found, and the text is the same.
        again = await engine.chat(QUESTION, greedy())
        *said, end = await pieces(again)
        assert "".join(piece.text for piece in said) == text and end.usage.reused_tokens > 0
        assert await (await engine.chat(QUESTION, greedy())).text() == text
        assert await again.next() is None

    with_engine(use)


def test_texts_together_are_what_they_are_alone_and_seeds_tell_them_apart():
    async def use(engine):
        def drawn(seed):
            return TextSettings(temperature=1.0, top_k=0, top_p=1.0, max_tokens=24, seed=seed)

        async def text(seed):
            return await (await engine.complete(PROMPT, drawn(seed))).text()

        alone = [await text(seed) for seed in range(6)]
        assert list(await asyncio.gather(*map(text, range(6)))) == alone
        assert len(set(alone)) > 3

    with_engine(use)


def test_a_text_ends_where_it_is_told_to():
    async def use(engine):
        whole = await (await engine.complete(PROMPT, greedy())).text()
        stop = whole[10:14]
        *_, end = await pieces(stream := await engine.complete(PROMPT, greedy(stop=[stop])))
        assert end.reason == FinishReason.STOP
        assert await stream.next() is None
        cut = await (await engine.complete(PROMPT, greedy(stop=[stop]))).text()
        assert cut == whole[: whole.index(stop)]

    with_engine(use)


def test_what_is_cancelled_or_dropped_gives_its_pages_back():
    async def use(engine):
        await (await engine.complete(PROMPT, greedy(max_tokens=1))).text()
        before = engine.memory().kv_in_use_bytes
        for end in ["cancel", "drop", "task"]:
            stream = await engine.complete(PROMPT, greedy(max_tokens=400))
            assert (await stream.next()).is_CONTENT()
            if end == "cancel":
                stream.cancel()
                assert await stream.next() is None
            elif end == "task":
                task = asyncio.create_task(pieces(stream))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert (await stream.next()) is not None
                stream.cancel()
            del stream
            # Whole groups of a text that was given up stay in the cache until they are wanted for something.
            await settled(engine, before + 4 * 2**20)
        waiting = await engine.complete(PROMPT, greedy(max_tokens=400))
        task = asyncio.create_task(pieces(waiting))
        await asyncio.sleep(0.05)
        waiting.cancel()
        assert isinstance(await task, list)

    with_engine(use)


def test_a_stream_has_one_reader_at_a_time():
    async def use(engine):
        # One text runs, so the other waits, and with it who reads it first.
        running = await engine.complete(PROMPT, greedy(max_tokens=400))
        assert (await running.next()).is_CONTENT()
        waiting = await engine.complete(PROMPT, greedy())
        results = await asyncio.gather(*(waiting.next() for _ in range(3)), return_exceptions=True)
        assert [type(it) for it in results[1:]] == [LacunaError.InUse] * 2
        assert results[0].is_CONTENT()

    with_engine(use, max_running=1)


def test_a_stream_keeps_its_engine():
    async def run():
        engine = await Engine.open("demo", usual())
        stream = await engine.complete(PROMPT, greedy())
        del engine
        return await stream.text()

    assert asyncio.run(run()) == with_engine(lambda engine: whole(engine))


async def whole(engine):
    return await (await engine.complete(PROMPT, greedy())).text()


async def written(session, **settings):
    await session.begin(greedy(**settings))
    text = ""
    while (piece := await session.next()) is not None:
        text += piece
    return text


def test_sessions_fork_go_back_and_are_kept(tmp_path):
    async def use(engine):
        session = await engine.session()
        await session.append(PROMPT)
        start = len(await session.tokens())
        text = await written(session)
        assert text == await whole(engine)
        assert len(await session.tokens()) == start + 24

        # A fork goes its own way, and the one it was made from does not notice.
        before = await session.tokens()
        fork = await session.fork()
        await fork.append(" And then")
        await written(fork)
        assert await session.tokens() == before

        # Cut back to its first tokens, it says the same again.
        await session.truncate(start)
        await session.append_tokens([])
        await session.truncate(start - 1)
        await session.append_tokens(before[start - 1 : start])
        assert await written(session) == text

        path = str(tmp_path / "session")
        await session.save(path)
        other = await engine.load_session(path)
        assert await other.tokens() == await session.tokens()
        await other.append(" So")
        await session.append(" So")
        assert await written(other) == await written(session)

    with_engine(use)


def test_memory_follows_the_budget_and_the_text_does_not_change():
    async def use(engine):
        memory = engine.memory()
        assert memory.budget_bytes == 64 * 2**20 > memory.least_budget_bytes
        text = await whole(engine)
        with pytest.raises(LacunaError.BudgetExceeded, match="MiB"):
            engine.set_budget(memory.least_budget_bytes - 1)
        # The least holds a token; this has a few rows more.
        little = memory.least_budget_bytes + 2**20
        engine.set_budget(little)
        assert await whole(engine) == text
        # The account is of some moment between steps.
        for _ in range(500):
            if engine.memory().budget_bytes == little:
                break
            await asyncio.sleep(0.01)
        assert engine.memory().budget_bytes == little

    with_engine(use, budget_bytes=64 * 2**20)


def test_what_a_model_takes_is_known_before_and_is_enough():
    async def run():
        needs = await lacuna.needs("demo", usual())
        assert 0 < needs.least_bytes <= needs.working_bytes <= needs.most_bytes
        engine = await Engine.open("demo", usual(budget_bytes=needs.least_bytes))
        text = await whole(engine)
        await engine.shut_down()
        with pytest.raises(LacunaError.BudgetExceeded):
            await Engine.open("demo", usual(budget_bytes=1_000_000))
        return text

    assert asyncio.run(run()) == with_engine(whole)


def test_a_cache_folder_outlives_the_engine(tmp_path):
    prompt = "Ownership and borrowing, lifetimes and traits. " * 30

    async def use(engine):
        *_, end = await pieces(await engine.complete(prompt, greedy()))
        return end.usage

    settings = {"cache_folder": str(tmp_path / "kv"), "cache_folder_bytes": 64 * 2**20}
    assert with_engine(use, **settings).reused_tokens == 0
    again = with_engine(use, **settings)
    assert again.reused_tokens > again.prompt_tokens // 2


def test_progress_is_told():
    class Listener(lacuna.LoadProgress):
        def __init__(self):
            self.told = []

        def progressed(self, done_bytes, total_bytes):
            self.told.append((done_bytes, total_bytes))

    async def run(listener):
        # With a budget, weights are read into memory.
        engine = await Engine.open("demo", usual(budget_bytes=64 * 2**20), listener)
        read = engine.memory().weight_bytes
        await engine.shut_down()
        return read

    listener = Listener()
    read = asyncio.run(run(listener))
    assert (read == 0) == (not listener.told)
    assert all(before <= after for (before, _), (after, _) in zip(listener.told, listener.told[1:]))


def test_tokens_are_told_and_errors_are_typed(tmp_path):
    async def use(engine):
        text = "Ownership, borrowing <|im_end|>"
        assert engine.detokenize(engine.tokenize(text)) == text
        assert engine.context_tokens() == 512
        with pytest.raises(LacunaError.InvalidValue, match="token"):
            engine.detokenize([10**6])
        with pytest.raises(LacunaError.InvalidValue):
            engine.tokenize("word " * 10**6)
        with pytest.raises(LacunaError.InvalidValue, match="temperature"):
            await engine.complete(PROMPT, TextSettings(temperature=-1.0))
        session = await engine.session()
        with pytest.raises(LacunaError.InvalidValue, match="empty"):
            await session.begin()
        with pytest.raises(LacunaError.ContextTooLong, match="512"):
            await session.append_tokens([1] * 513)
        with pytest.raises(LacunaError.InvalidValue, match="out of range"):
            await session.append_tokens([10**6])
        assert await session.tokens() == []
        with pytest.raises(LacunaError.SavedSession):
            await engine.load_session(str(tmp_path / "nothing"))
        stream = await engine.complete(PROMPT, greedy(max_tokens=400))
        await engine.shut_down()
        await engine.shut_down()
        with pytest.raises(LacunaError.Closed):
            await pieces(stream)
        with pytest.raises(LacunaError.Closed):
            await engine.chat(QUESTION)
        with pytest.raises(LacunaError.Closed):
            await session.append(PROMPT)
            await written(session)

    with_engine(use)


@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64])
def test_what_is_no_model_is_refused(tmp_path, content):
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LacunaError.Model):
        asyncio.run(Engine.open(str(path)))
    with pytest.raises(LacunaError.Model):
        asyncio.run(lacuna.needs(str(path), EngineSettings()))


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"max_running": 0}, {"kv_type": "f17"}])
def test_settings_that_are_none_are_refused(wrong):
    with pytest.raises(LacunaError.InvalidValue):
        asyncio.run(Engine.open("demo", EngineSettings(**wrong)))


def test_embeddings_do_not_depend_on_the_texts_beside_them():
    async def run():
        embedder = await lacuna.Embedder.open(str(ENCODER), EngineSettings(threads=1))
        texts = ["abc", "a longer text of some words", "abc"]
        together = await embedder.embed(texts)
        alone = [(await embedder.embed([text]))[0] for text in texts]
        assert together == alone and together[0] == together[2] != together[1]
        assert [len(vector) for vector in together] == [embedder.dimensions()] * 3
        with pytest.raises(LacunaError.Model):
            await lacuna.Embedder.open("demo")

    asyncio.run(run())
