"""What a run was asked to do, in two parts that must not be mixed up.

`Settings` are the content flags: together with the inputs they decide every byte of the
store, and a run that continues another one must have the same. `RunOptions` are the run
flags: how many workers, how much memory, what to do with bad records. They may change from
one attempt to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from tokenmill.engines import Tokenizer
from tokenmill.errors import UsageError
from tokenmill.readers.base import ReadOptions
from tokenmill.readers.fields import split_key
from tokenmill.supervision.rendering import Renderer
from tokenmill.supervision.settings import Supervision

__all__ = ["RunOptions", "Settings", "TokenPolicy", "supervision_of"]

OnError = Literal["fail", "skip"]


class TokenPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The ids around every document, and how special-token strings inside it are read."""

    bos_id: int | None = None
    eos_id: int | None = None
    special_tokens: Literal["as-text", "parse", "error"] = "as-text"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The content flags of a run, resolved: automatic values are replaced by what they came to."""

    tokenizer_sha256: str
    policy: TokenPolicy
    reading: ReadOptions
    supervision: Supervision | None = None
    format: str = "auto"
    val_fraction: float = 0.0
    seed: int = 0
    limit: int | None = None
    task_bytes: int

    def flags(self) -> dict[str, Any]:
        """The settings under the names of the flags that set them, for messages and the manifest."""
        return self._text_flags() | (supervision_flags(self.supervision) if self.supervision else {})

    def _text_flags(self) -> dict[str, Any]:
        reading = self.reading
        return {
            "tokenizer": self.tokenizer_sha256,
            "bos": self.policy.bos_id,
            "eos": self.policy.eos_id,
            "special-tokens": self.policy.special_tokens,
            "format": self.format,
            "text-key": reading.text_key,
            "keep-keys": list(reading.keep_keys),
            "separator": reading.separator,
            "whole-files": reading.whole_files,
            "max-document-bytes": reading.max_document_bytes,
            "val-fraction": self.val_fraction,
            "seed": self.seed,
            "limit": self.limit,
            "task-bytes": self.task_bytes,
        }

    def renderer(self, tokenizer: Tokenizer) -> Renderer | None:
        """What turns records into texts; None for data that is text already."""
        if self.supervision is None:
            return None
        return Renderer(
            self.supervision,
            tokenizer,
            check_specials=self.policy.special_tokens == "error",
            max_bytes=self.reading.max_document_bytes,
        )

    def check(self) -> None:
        """Refuse values that cannot work, by the name of their flag."""
        if not 0.0 <= self.val_fraction < 1.0:
            raise UsageError(f"--val-fraction {self.val_fraction} must be at least 0 and below 1")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"--limit {self.limit} must be at least 1")
        if self.task_bytes < 1:
            raise UsageError(f"--task-bytes {self.task_bytes} must be positive")
        if self.reading.max_document_bytes < 1:
            raise UsageError(f"--max-document-bytes {self.reading.max_document_bytes} must be positive")
        if self.reading.separator == "":
            raise UsageError("--separator is empty; pass the string that stands between two documents")
        for key in (self.reading.text_key, *self.reading.keep_keys, *self.reading.record_keys):
            split_key(key)


def supervision_flags(supervision: Supervision) -> dict[str, Any]:
    """The flags of supervised data under their names."""
    return {
        "messages-key": supervision.messages_key,
        "prompt-key": supervision.prompt_key,
        "response-key": supervision.response_key,
        "template": supervision.template,
        "chat-template": supervision.chat_template,
        "weight-key": supervision.weight_key,
        "eos-after-messages": supervision.ends_messages,
    }


def supervision_of(flags: Mapping[str, Any]) -> Supervision | None:
    """The same from the flags in a manifest."""
    if "messages-key" not in flags:
        return None
    return Supervision(
        messages_key=flags["messages-key"],
        prompt_key=flags["prompt-key"],
        response_key=flags["response-key"],
        template=flags["template"],
        chat_template=flags["chat-template"],
        weight_key=flags["weight-key"],
        ends_messages=flags["eos-after-messages"],
    )


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The run flags; None means that tokenmill decides."""

    workers: int | None = None
    memory_bytes: int | None = None
    batch_size: int | None = None
    engine: str = "auto"
    on_error: OnError = "fail"
    max_errors: int | None = None
    overwrite: bool = False
