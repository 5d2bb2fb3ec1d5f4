"""How much work was done, and where its time went."""

from __future__ import annotations

import msgspec

__all__ = ["STAGES", "Stages"]

STAGES = ("read", "decompress", "parse", "encode", "write")


class Stages(msgspec.Struct):
    """Counts of finished work and the seconds each stage took."""

    num_bytes: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_rejects: int = 0
    read: float = 0.0
    decompress: float = 0.0
    parse: float = 0.0
    encode: float = 0.0
    write: float = 0.0

    def add(self, other: Stages) -> None:
        """Count another piece of work too."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def since(self, earlier: Stages) -> Stages:
        """What has come on top of an earlier count."""
        return Stages(*(getattr(self, name) - getattr(earlier, name) for name in self.__struct_fields__))

    @property
    def bottleneck(self) -> str:
        """The stage that took the most time."""
        return max(STAGES, key=lambda name: float(getattr(self, name)))

    @property
    def shares(self) -> dict[str, float]:
        """The part of all time that each stage took."""
        total = sum(float(getattr(self, name)) for name in STAGES) or 1.0
        return {name: round(getattr(self, name) / total, 4) for name in STAGES}
