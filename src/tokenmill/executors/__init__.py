"""Executors: where the processes of a run come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill.executors.base import Executor

__all__ = ["EXECUTORS", "create"]

EXECUTORS = ("local", "ray")


def create(name: str, preload: str) -> Executor:
    """Make an executor by its name, whose processes call `preload` before their first call."""
    executor: Executor
    if name == "ray":
        from tokenmill.executors.ray import RayExecutor

        executor = RayExecutor()
    else:
        from tokenmill.executors.local import LocalExecutor

        executor = LocalExecutor()
    executor.warm(preload, b"")
    return executor
