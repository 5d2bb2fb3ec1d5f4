"""Executors: where the processes of a run come from."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill.executors.base import Executor

__all__ = ["EXECUTORS", "create"]

EXECUTORS = {"local": "LocalExecutor", "ray": "RayExecutor"}
"""The class of each executor, in a module with the executor's name."""


def create(name: str, preload: str) -> Executor:
    """Make an executor by its name, whose processes call `preload` before their first call."""
    executor: Executor = getattr(import_module(f"tokenmill.executors.{name}"), EXECUTORS[name])()
    executor.warm(preload, b"")
    return executor
