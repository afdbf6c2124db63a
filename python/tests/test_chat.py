"""Conversations in the process and over HTTP: the same words, and the same errors."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until

import lacuna

MESSAGES = [{"role": "user", "content": "What is ownership?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


def posted(server: lacuna.Server, path: str, value: Any, key: str | None = None) -> Any:
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(server.url + path, json.dumps(value).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def test_a_chat_is_what_the_server_says(engine: lacuna.Engine) -> None:
    mine = engine.chat(MESSAGES, **GREEDY)
    with engine.serve() as server:
        served = posted(server, "/v1/chat/completions", {"messages": MESSAGES, **GREEDY})
    assert mine["choices"] == served["choices"]
    assert mine["object"] == served["object"] == "chat.completion"
    again = engine.chat(MESSAGES, **GREEDY)
    assert again["choices"] == mine["choices"], "the engine goes on when its server is closed"


def test_chunks_come_to_the_whole(engine: lacuna.Engine) -> None:
    whole = engine.chat(MESSAGES, **GREEDY)["choices"][0]["message"]["content"]
    chunks = list(engine.chat(MESSAGES, stream=True, **GREEDY))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")


async def test_tasks_have_them_too(engine: lacuna.Engine) -> None:
    whole = (await engine.achat(MESSAGES, **GREEDY))["choices"][0]["message"]["content"]
    text = ""
    async for chunk in engine.achat_stream(MESSAGES, **GREEDY):
        text += chunk["choices"][0]["delta"].get("content", "")
    assert text == whole


def test_tools_and_schemas_are_the_servers(engine: lacuna.Engine) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {"exact": {"type": "boolean"}},
                "required": ["exact"],
                "additionalProperties": False,
            },
        },
    }
    reply = engine.chat(MESSAGES, tools=[tool], tool_choice="required", **{**GREEDY, "max_tokens": 200})
    calls = reply["choices"][0]["message"]["tool_calls"]
    assert calls[0]["function"]["name"] == "look_up"
    assert isinstance(json.loads(calls[0]["function"]["arguments"])["exact"], bool)


def test_the_official_client_works_without_a_network(engine: lacuna.Engine) -> None:
    openai = pytest.importorskip("openai")
    client = engine.openai()
    reply = client.chat.completions.create(model="demo", messages=MESSAGES, **GREEDY)  # pyright: ignore
    assert reply.choices[0].message.content == engine.chat(MESSAGES, **GREEDY)["choices"][0]["message"]["content"]
    stream = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True, **GREEDY)  # pyright: ignore
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)  # pyright: ignore
    assert text == reply.choices[0].message.content
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=MESSAGES)  # pyright: ignore


async def test_the_official_client_for_tasks(engine: lacuna.Engine) -> None:
    pytest.importorskip("openai")
    client = engine.async_openai()
    reply = await client.chat.completions.create(model="demo", messages=MESSAGES, **GREEDY)  # pyright: ignore
    assert reply.choices[0].message.content
    stream = await client.chat.completions.create(model="demo", messages=MESSAGES, stream=True, **GREEDY)  # pyright: ignore
    text = ""
    async for chunk in stream:  # pyright: ignore
        text += chunk.choices[0].delta.content or ""
    assert text == reply.choices[0].message.content


def test_the_official_client_gives_up_when_it_was_told_to(alone: lacuna.Engine) -> None:
    openai = pytest.importorskip("openai")
    fields: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 900}
    fields["extra_body"] = {"ignore_eos": True}
    client = alone.openai()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).chat.completions.create(**fields)
    wait_until(lambda: alone.kv_bytes_in_use == 0)
    fields["max_tokens"] = 2
    assert client.with_options(timeout=60).chat.completions.create(**fields).choices


async def test_the_official_client_for_tasks_gives_up_when_it_was_told_to(alone: lacuna.Engine) -> None:
    openai = pytest.importorskip("openai")
    fields: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 900}
    fields["extra_body"] = {"ignore_eos": True}
    client = alone.async_openai()
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=0.05).chat.completions.create(**fields)
    await asyncio.to_thread(wait_until, lambda: alone.kv_bytes_in_use == 0)
    fields["max_tokens"] = 2
    assert (await client.with_options(timeout=60).chat.completions.create(**fields)).choices


def test_a_model_that_sees_is_shown_pictures() -> None:
    """Engines of Python left the part of the model that sees out, and every picture was refused."""
    folder = Path(__file__).parents[2] / "reference" / "vision" / "gemma3"
    picture = base64.b64encode((folder / "image-0.png").read_bytes()).decode()
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, shown]}]
    models: list[tuple[Path, dict[str, Any]]] = [(folder / "hf", {}), (folder / "model.gguf", {"mmproj": folder / "mmproj.gguf"})]
    for model, more in models:
        with lacuna.Engine(model, threads=1, **more) as engine:
            seen = engine.chat(messages, max_tokens=2, ignore_eos=True)
            blind = engine.chat([{"role": "user", "content": "a"}], max_tokens=2, ignore_eos=True)
            assert seen["usage"]["prompt_tokens"] > blind["usage"]["prompt_tokens"]


def test_a_server_of_its_own_is_there_at_once_and_gone_when_closed() -> None:
    with lacuna.serve("demo", ctx=256, threads=1, api_keys=["a-long-enough-key"]) as server:
        body = {"messages": MESSAGES, "max_tokens": 2}
        assert posted(server, "/v1/chat/completions", body, "a-long-enough-key")["choices"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            posted(server, "/v1/chat/completions", body)
        assert refused.value.code == 401
        url = server.url
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url + "/health", timeout=5)


def test_addresses_that_are_none_are_refused(engine: lacuna.Engine) -> None:
    with pytest.raises(lacuna.InvalidRequest, match="key"):
        engine.serve(host="0.0.0.0")
    with pytest.raises(lacuna.InvalidRequest):
        engine.serve(host="nowhere at all")
    with pytest.raises(lacuna.InvalidRequest):
        engine.serve(api_keys=["short"])
    with pytest.raises(TypeError):
        engine.serve(api_keys="one-key-and-not-a-key-for-each-letter")
    with pytest.raises(OverflowError):
        engine.serve(port=10**6)
    with engine.serve() as server, pytest.raises(lacuna.LacunaError, match="listen"):
        engine.serve(port=server.port)


def test_memory_names_who_has_what(engine: lacuna.Engine) -> None:
    # What is told is as old as 100 ms, and so many texts take longer.
    with engine.stream("What is ownership?", ignore_eos=True, max_tokens=900, n=32) as stream:
        next(stream)
        wait_until(lambda: engine.memory()["running"] > 0)
        assert engine.memory()["ledger"]["committed_bytes"] > 0


def test_a_budget_can_be_changed_while_it_runs() -> None:
    with lacuna.Engine("demo", ctx=1024, threads=1, budget="64MiB") as engine:
        (before,) = engine.generate("What is ownership?", temperature=0)
        engine.set_budget(48 << 20)
        (after,) = engine.generate("What is ownership?", temperature=0)
        assert before.text == after.text
        wait_until(lambda: engine.memory()["budget"]["budget_bytes"] == 48 << 20)
        with pytest.raises(lacuna.BudgetExceeded):
            engine.set_budget(1 << 10)
