"""nanoGPT: a `.bin` of bare tokens, and nothing that says what they are or where documents end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenmill.store.foreign.base import TokenFile, bare_file, id_type, one_document

__all__ = ["NanoGpt"]


class NanoGpt:
    """Any `.bin` that no other format knows; a file counts as one document."""

    name = "nanoGPT"
    pattern = "*.bin"

    def recognise(self, path: Path) -> Path | None:
        """The file itself."""
        return path if path.suffix == ".bin" and path.is_file() else None

    def describe(self, paths: Sequence[Path], dtype: str | None) -> list[TokenFile]:
        """Sizes must be whole numbers of ids."""
        return [bare_file(path, id_type(dtype), one_document()) for path in paths]
