"""nanoGPT: `train.bin` and `val.bin`, bare ids without header or index.

Documents end with the end-of-text token, as they do in a store, so the bytes of both are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenmill.errors import UsageError
from tokenmill.formats._token_blocks import file_blocks, write_stream
from tokenmill.formats.base import Array, Exporter, Opener, Shape, SplitSource, TokenFile, bare_file, id_type

__all__ = ["NanoGpt"]

SUFFIX, DTYPE = ".bin", "<u2"


class NanoGpt(Opener, Exporter):
    """One bare file of uint16 per split; opens any `.bin` that no other format knows, each as one document."""

    label = "nanoGPT"
    pattern = f"*{SUFFIX}"
    shape: Shape = "documents"

    def recognise(self, path: Path) -> Path | None:
        """Take any `.bin`."""
        return path if path.suffix == SUFFIX and path.is_file() else None

    def describe_file(self, path: Path, dtype: str | None) -> TokenFile:
        """Check that the size is a whole number of ids."""
        return bare_file(path, id_type(dtype))

    def check(self, split: SplitSource) -> None:
        """Refuse ids that need more than two bytes."""
        if split.vocab_size is not None and not split.is_narrow:
            raise UsageError(
                f"--to nanogpt holds ids up to 65,535, and {split.path} has a vocabulary of {split.vocab_size:,} "
                "tokens; use megatron or llmc, or a smaller tokenizer"
            )

    def write(self, split: SplitSource, folder: Path) -> None:
        """Join the shards."""
        write_stream(split, folder / f"{split.name}{SUFFIX}", DTYPE)

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """Read the whole file."""
        return file_blocks(folder / f"{split.name}{SUFFIX}", DTYPE)
