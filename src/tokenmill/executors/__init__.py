"""Executors: where the processes of a run come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill.executors.base import Cluster, Executor

__all__ = ["EXECUTORS", "create"]

EXECUTORS = ("local", "ray")


def create(name: str) -> Executor | Cluster:
    """An executor by its name, with what it does by itself."""
    if name == "ray":
        from tokenmill.executors.ray import RayExecutor

        return RayExecutor()
    from tokenmill.executors.local import start_executor

    return start_executor()
