"""Models of Lacuna for `llm`: its own client of OpenAI, over an engine in the process instead of a network."""

from __future__ import annotations

import json
import subprocess
import threading
import warnings
from pathlib import Path
from typing import Any, cast

import llm
from llm.default_plugins.openai_models import AsyncChat, Chat

import lacuna

CONFIG = "lacuna.json"


_engines: dict[str, lacuna.Engine] = {}
_loading = threading.Lock()


def engine(settings: str) -> lacuna.Engine:
    """The engine of these settings, which stays loaded as long as the process runs."""
    # Two threads that ask at once would each load the model.
    with _loading:
        if settings not in _engines:
            _engines[settings] = lacuna.Engine(**json.loads(settings))
        return _engines[settings]


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
    return found | _named(llm.user_dir() / CONFIG)


def _named(path: Path) -> dict[str, dict[str, Any]]:
    """What the file at `path` names. One that cannot be used is told of: llm has other models, which it is not to end."""
    try:
        named = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(named, dict):
            raise TypeError("it is no object of names and settings")
        for name, settings in cast("dict[str, Any]", named).items():
            if not isinstance(settings, dict) or "model" not in settings:
                raise TypeError(f"`{name}` is no object of settings with a `model`")
        return cast("dict[str, dict[str, Any]]", named)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        warnings.warn(f"{path} is passed over: {error}", stacklevel=2)
        return {}


@llm.hookimpl
def register_models(register: Any) -> None:
    """Tells llm of the models."""
    for name, settings in models().items():
        written = json.dumps(settings, sort_keys=True)
        id = f"lacuna/{name}"
        register(LacunaChat(id, written), AsyncLacunaChat(id, written))
