"""The content flags of a run: together with the inputs they decide every byte of the store.

A run that resumes another must have the same settings. Run flags (workers, memory, --max-errors) may change from one
attempt to the next; they stay in the `Request`. Of --on-error, only keep-damaged decides bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tokenmill.engines import Tokenizer
from tokenmill.errors import UsageError
from tokenmill.readers.base import ReadOptions, split_key
from tokenmill.supervision.options import Supervision

if TYPE_CHECKING:
    from tokenmill.supervision.renderer import Renderer

__all__ = ["KEEP_DAMAGED", "ON_ERROR", "Settings", "TokenPolicy", "supervision_of"]

OnError = Literal["fail", "skip", "keep-damaged"]
ON_ERROR, KEEP_DAMAGED = "on-error", "keep-damaged"
_SUPERVISION_FLAGS = {
    "messages-key": "messages_key",
    "prompt-key": "prompt_key",
    "response-key": "response_key",
    "template": "template",
    "chat-template": "chat_template",
    "weight-key": "weight_key",
    "eos-after-messages": "ends_messages",
}
"""The flags of supervised data in every manifest, and the fields of `Supervision`."""
_CHOICES = {
    "template-date": "template_date",
    "template-values": "template_values",
    "train-on": "train_on",
    "train-roles": "train_roles",
    "mask-reasoning": "mask_reasoning",
    "mask-tool-calls": "mask_tool_calls",
    "allow-no-stop": "allow_no_stop",
    "chosen-key": "chosen_key",
    "rejected-key": "rejected_key",
    "prompts-only": "prompts_only",
}
"""The flags that are in a manifest only if they were used."""


class TokenPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The ids around every document, and how to read special-token strings inside it."""

    bos_id: int | None = None
    eos_id: int | None = None
    special_tokens: Literal["as-text", "parse", "error"] = "as-text"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The content flags of a run, with automatic values resolved."""

    tokenizer_sha256: str
    policy: TokenPolicy
    reading: ReadOptions
    supervision: Supervision | None = None
    format: str = "auto"
    val_fraction: float = 0.0
    seed: int = 0
    limit: int | None = None
    task_bytes: int
    keeps_damaged: bool = False
    """Whether text that no checksum confirms is kept."""

    def flags(self) -> dict[str, Any]:
        """Return the settings by flag name, for messages and the manifest."""
        reading = self.reading
        flags: dict[str, Any] = {
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
        if self.keeps_damaged:
            flags[ON_ERROR] = KEEP_DAMAGED
        if self.supervision is not None:
            flags |= {flag: getattr(self.supervision, name) for flag, name in _SUPERVISION_FLAGS.items()}
            chosen = msgspec.to_builtins(self.supervision)
            usual = msgspec.to_builtins(Supervision())
            flags |= {flag: chosen[name] for flag, name in _CHOICES.items() if chosen[name] != usual[name]}
        return flags

    def renderer(self, tokenizer: Tokenizer) -> Renderer | None:
        """Return the renderer that turns records into texts; None if the data is already text."""
        if self.supervision is None:
            return None
        # Text without supervision starts sooner without templates and their compiler.
        from tokenmill.supervision.preferences import PairRenderer
        from tokenmill.supervision.prompts import PromptRenderer
        from tokenmill.supervision.renderer import Renderer

        kind = {None: Renderer, "pairs": PairRenderer, "prompts": PromptRenderer}[self.supervision.holds]
        return kind(
            self.supervision,
            tokenizer,
            check_specials=self.policy.special_tokens == "error",
            max_bytes=self.reading.max_document_bytes,
        )

    def check(self) -> None:
        """Raise for an invalid value, with the name of its flag."""
        if not 0.0 <= self.val_fraction < 1.0:
            raise UsageError(f"--val-fraction {self.val_fraction} must be at least 0 and below 1")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"--limit {self.limit} must be at least 1")
        if self.task_bytes < 1:
            raise UsageError(f"--task-bytes {self.task_bytes} must be positive")
        if self.reading.max_document_bytes < 1:
            raise UsageError(f"--max-document-bytes {self.reading.max_document_bytes} must be positive")
        if self.reading.separator == "":
            raise UsageError("--separator is empty; pass the string that separates two documents")
        for key in (self.reading.text_key, *self.reading.keep_keys, *self.reading.record_keys):
            split_key(key)


def supervision_of(flags: Mapping[str, Any]) -> Supervision | None:
    """Rebuild the settings of supervised data from the flags in a manifest."""
    if "messages-key" not in flags:
        return None
    known = {**_SUPERVISION_FLAGS, **_CHOICES}
    return msgspec.convert({name: flags[flag] for flag, name in known.items() if flag in flags}, Supervision)
