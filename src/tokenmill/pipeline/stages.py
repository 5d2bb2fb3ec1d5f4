"""How much work was done, and where its time went."""

from __future__ import annotations

import msgspec

__all__ = ["Stages"]


class Stages(msgspec.Struct):
    """Counts of finished work and the seconds each stage took."""

    num_bytes: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_rejects: int = 0
    read: float = 0.0
    encode: float = 0.0
    write: float = 0.0

    def add(self, other: Stages) -> None:
        """Count another piece of work too."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def bottleneck(self) -> str:
        """The stage that took the most time."""
        return max(("read", "encode", "write"), key=lambda name: float(getattr(self, name)))
