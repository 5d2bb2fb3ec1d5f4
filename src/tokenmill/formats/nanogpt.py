"""nanoGPT: `train.bin` and `val.bin`, bare ids without header or index.

Documents end with the end-of-text token, as they do in a store, so the bytes of both are the same.
"""

from __future__ import annotations

from pathlib import Path

from tokenmill.errors import UsageError
from tokenmill.formats._token_blocks import BareTokens
from tokenmill.formats.base import Opener, SplitSource, TokenFile, bare_file, id_type

__all__ = ["NanoGpt"]


class NanoGpt(Opener, BareTokens):
    """One bare file of uint16 per split; opens any `.bin` that no other format knows, each as one document."""

    label = "nanoGPT"
    pattern = "*.bin"
    tokens_suffix = ".bin"
    narrow = wide = "<u2"

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
