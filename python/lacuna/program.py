"""The program `lacuna`, which comes with the package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from lacuna import settings
from lacuna.errors import InvalidRequest


def program() -> Path:
    """Where it is.

    Raises:
        FileNotFoundError: when the package was installed without it.
    """
    name = "lacuna.exe" if sys.platform == "win32" else "lacuna"
    user = sysconfig.get_preferred_scheme("user")
    folders = [
        sysconfig.get_path("scripts"),
        sysconfig.get_path("scripts", user),
        # Of a folder that was named to `pip install --target`.
        str(Path(__file__).parent.parent / "bin"),
    ]
    for folder in folders:
        found = Path(folder) / name
        if found.is_file():
            return found
    raise FileNotFoundError(f"there is no `{name}` in any of {folders}")


def plan(
    model: str | os.PathLike[str],
    ctx: int | None = None,
    budget: str | int | None = None,
    **more: str | int | bool | None,
) -> dict[str, Any]:
    """Where every byte would go, before any of them is used: what `lacuna plan --json` says.

    `model` may also be a published shape, such as `"qwen3-4b"`, of which nothing is downloaded. `more` has further
    arguments of `lacuna plan`, such as `kv_type="q8_0"`. With a budget that it does not fit, `verdict` says what would.

    Raises:
        InvalidRequest: for a model or an argument that is none.
    """
    given = settings.written({"ctx": ctx, "budget": budget, **more})
    arguments = [
        f"--{name.replace('_', '-')}" + ("" if value is None else f"={value}")
        for name, value in given
    ]
    command = [program(), "plan", "--json", *arguments, "--", os.fspath(model)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.stdout.startswith("{"):
        return json.loads(done.stdout)
    message = _said(done.stderr)
    raise InvalidRequest(message or f"`lacuna plan` ended with {done.returncode}", "invalid_value")


def _said(errors: str) -> str:
    """What the program says is wrong, with the names of arguments in place of its options."""
    said = re.split(r"^(?:Usage:|For more information)", errors, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line.strip() for line in said.splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith("tip: to pass"))
    return re.sub(r"--([a-z][a-z-]*)", lambda name: name[1].replace("-", "_"), text).removeprefix("error: ")
