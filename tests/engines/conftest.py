"""Fixtures of the engine tests; the helpers are in `engine_models.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import virtual_time
from engine_models import make_model


@pytest.fixture(scope="session")
def qwen3() -> Any:
    """Shared by tests that do not change it."""
    return make_model()


@pytest.fixture
def run_async() -> Callable[[Any], Any]:
    """Run a coroutine; pytest ends one that hangs."""
    return asyncio.run


@pytest.fixture
def run_virtually() -> Callable[[Any], Any]:
    """Run a coroutine in virtual time."""
    return virtual_time.run_virtually
