"""Arrays to a framework, with ranks, prefetching and a state that can be saved: one file per framework."""

from __future__ import annotations

from tokenmill.loaders.base import FRAMEWORKS, make_loader

__all__ = ["FRAMEWORKS", "make_loader"]
