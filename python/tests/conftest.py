"""The demo model, and how to wait for what is not there at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

import lacuna


@pytest.fixture(scope="session")
def engine() -> Iterator[lacuna.Engine]:
    with lacuna.Engine("demo", ctx=1024, threads=1) as engine:
        yield engine


@pytest.fixture
def alone() -> Iterator[lacuna.Engine]:
    """An engine that keeps nothing, so that what is in use is what somebody has."""
    with lacuna.Engine("demo", ctx=1024, threads=1, prefix_cache=False) as engine:
        yield engine


def wait_until(holds: Callable[[], bool]) -> None:
    """Fails when it still does not after long."""
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)
