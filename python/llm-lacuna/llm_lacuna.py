"""Models of Lacuna for `llm`: its own client of OpenAI, over an engine in the process instead of a network."""

from __future__ import annotations

import functools
import json
import subprocess
from typing import Any

import llm
from llm.default_plugins.openai_models import AsyncChat, Chat

import lacuna

CONFIG = "lacuna.json"


@functools.cache
def engine(settings: str) -> lacuna.Engine:
    """The engine of these settings, which stays loaded as long as the process runs."""
    return lacuna.Engine(**json.loads(settings))


class _Local:
    """What the two kinds of model have in common."""

    # None of it leaves the process.
    needs_key = None
    key_env_var = None
    settings: str
    model_name: str | None

    def get_client(self, key: str | None, *, async_: bool = False) -> Any:
        """The client that requests go to."""
        chosen = engine(self.settings)
        self.model_name = chosen.name
        return chosen.async_openai() if async_ else chosen.openai()

    def __str__(self) -> str:
        return f"Lacuna: {self.model_id}"  # pyright: ignore


class LacunaChat(_Local, Chat):  # pyright: ignore
    """A model that answers."""

    def __init__(self, model_id: str, settings: str) -> None:
        super().__init__(model_id, supports_schema=True, supports_tools=True)
        self.settings = settings


class AsyncLacunaChat(_Local, AsyncChat):  # pyright: ignore
    """The same for tasks."""

    def __init__(self, model_id: str, settings: str) -> None:
        super().__init__(model_id, supports_schema=True, supports_tools=True)
        self.settings = settings


def _downloaded() -> list[str]:
    """Names of models in the Hugging Face cache."""
    try:
        command = [lacuna.program(), "list", "--json"]
        done = subprocess.run(command, capture_output=True, check=True)
        return [model["name"] for model in json.loads(done.stdout)["models"]]
    except (OSError, subprocess.CalledProcessError, ValueError, KeyError):
        # The list is a convenience: without it the models that are named are there.
        return []


def models() -> dict[str, dict[str, Any]]:
    """Names and the settings of their engines."""
    found: dict[str, dict[str, Any]] = {name: {"model": name} for name in ["demo", *_downloaded()]}
    path = llm.user_dir() / CONFIG
    if path.exists():
        found |= json.loads(path.read_text())
    return found


@llm.hookimpl
def register_models(register: Any) -> None:
    """Tells llm of the models."""
    for name, settings in models().items():
        written = json.dumps(settings, sort_keys=True)
        id = f"lacuna/{name}"
        register(LacunaChat(id, written), AsyncLacunaChat(id, written))
