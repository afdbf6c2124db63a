"""The plugin as llm's users meet it: the command line and the library."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llm
import llm_lacuna
import pytest

import lacuna

QUESTION = "What is ownership?"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    return tmp_path


def expected() -> str:
    with lacuna.Engine("demo") as engine:
        messages = [{"role": "user", "content": QUESTION}]
        reply = engine.chat(messages, temperature=0, max_tokens=20)
        return reply["choices"][0]["message"]["content"]


def command(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "llm", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_line_has_the_model_and_what_the_file_names(home: Path) -> None:
    settings = {"notes": {"model": "demo", "budget": "64MiB", "ctx": 512}}
    (home / "lacuna.json").write_text(json.dumps(settings))
    listed = command("models", "list")
    assert "lacuna/demo" in listed and "lacuna/notes" in listed
    said = expected()
    for more in [[], ["--no-stream"]]:
        for model in ["lacuna/demo", "lacuna/notes"]:
            options = ["-m", model, "-o", "temperature", "0", "-o", "max_tokens", "20", *more]
            assert command(*options, QUESTION).strip() == said.strip()


@pytest.mark.parametrize("text", ["{", "[]", '{"notes": "demo"}', '{"notes": {"ctx": 512}}', "\xff"])
def test_a_file_that_cannot_be_used_does_not_take_the_other_models_along(home: Path, text: str) -> None:
    file = home / "lacuna.json"
    file.write_bytes(text.encode("latin-1"))
    done = subprocess.run(
        [sys.executable, "-m", "llm", "models", "list"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "lacuna/demo" in done.stdout
    assert str(file) in done.stderr, "what is passed over is told"


def test_threads_that_ask_at_once_have_one_engine() -> None:
    with ThreadPoolExecutor(4) as threads:
        settings = json.dumps({"model": "demo", "ctx": 768})
        assert len(set(threads.map(llm_lacuna.engine, [settings] * 4))) == 1


def test_conversations_go_on_and_say_what_they_took() -> None:
    model = llm.get_model("lacuna/demo")
    conversation = model.conversation()
    first = conversation.prompt(QUESTION, temperature=0, max_tokens=20)
    assert first.text() == expected()
    second = conversation.prompt("And borrowing?", temperature=0, max_tokens=20)
    second.text()
    usage = (first.usage(), second.usage())
    assert usage[0].input and usage[1].input and usage[1].input > usage[0].input


def test_schemas_are_kept_to() -> None:
    schema = {
        "type": "object",
        "properties": {"safe": {"type": "boolean"}},
        "required": ["safe"],
        "additionalProperties": False,
    }
    reply = llm.get_model("lacuna/demo").prompt(QUESTION, schema=schema, temperature=0, max_tokens=200)
    assert isinstance(json.loads(reply.text())["safe"], bool)


async def test_tasks_have_it_too() -> None:
    model = llm.get_async_model("lacuna/demo")
    text = ""
    async for piece in model.prompt(QUESTION, temperature=0, max_tokens=20):
        text += piece
    assert text == expected()
