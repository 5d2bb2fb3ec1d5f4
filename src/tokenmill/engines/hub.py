"""Fetching a tokenizer's files from the Hugging Face Hub, through its own client and cache."""

from __future__ import annotations

from pathlib import Path

from tokenmill.errors import UsageError

__all__ = ["download_tokenizer"]

PATTERNS = [
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "*.tiktoken",
    "tokenizer_config.json",
    "special_tokens_map.json",
]


def download_tokenizer(name: str) -> Path:
    """The local folder of a Hub repository's tokenizer files, downloaded unless cached."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:
        reason = type(error).__name__
        raise UsageError(
            f"--tokenizer {name} is not a local path, and fetching it from the Hub failed ({reason}); "
            "check the name and the network (HF_TOKEN for gated models), or pass a directory with its tokenizer.json"
        ) from None
