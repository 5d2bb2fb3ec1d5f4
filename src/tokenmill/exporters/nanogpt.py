"""nanoGPT: `train.bin` and `val.bin`, bare uint16 ids without header or index.

Documents end with the end-of-text token there as they do in a store, so the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenmill.errors import UsageError
from tokenmill.exporters.base import Array, Shape, SplitSource, is_narrow
from tokenmill.exporters.writing import file_blocks, write_stream

__all__ = ["NanoGpt"]


class NanoGpt:
    """One bare file per split."""

    shape: Shape = "documents"
    is_folder = False
    carries_mask = False
    can_link = False

    def check(self, split: SplitSource) -> None:
        """Refuse ids that need more than two bytes."""
        if split.vocab_size is not None and not is_narrow(split):
            raise UsageError(
                f"--to nanogpt holds ids up to 65,535, and {split.path} has a vocabulary of {split.vocab_size:,} "
                "tokens; use megatron or llmc, or a smaller tokenizer"
            )

    def write(self, split: SplitSource, folder: Path) -> None:
        """Join the shards."""
        write_stream(split, folder / f"{split.name}.bin", "<u2")

    def read(self, split: SplitSource, folder: Path) -> Iterator[Array]:
        """The file as it is."""
        return file_blocks(folder / f"{split.name}.bin", "<u2")
