"""The flags of a run as keyword arguments with types, for editors and type checkers; `Request` checks them."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from tokenmill.engines import EngineName, SpecialTokens
from tokenmill.pipeline.settings import OnError

__all__ = ["RunFlags", "SharedRunFlags"]


class ContentFlags(TypedDict, total=False):
    """The flags that decide every byte of a store, except for the seed, which batches have, too."""

    text_key: str | None
    keep_keys: list[str]
    format: Literal["auto", "jsonl", "json", "parquet", "text"]
    separator: str | None
    whole_files: bool
    max_document_bytes: str | int
    eos: bool | None
    bos: bool | None
    eos_token: str | int | None
    bos_token: str | int | None
    special_tokens: SpecialTokens | None
    messages_key: str | None
    prompt_key: str | None
    response_key: str | None
    chosen_key: str | None
    rejected_key: str | None
    prompts_only: bool
    template: str | None
    chat_template: str | None
    weight_key: str | None
    template_date: str | None
    template_values: dict[str, Any] | str | None
    train_on: str | int | None
    train_roles: list[str] | str | None
    mask_reasoning: bool
    mask_tool_calls: bool
    allow_no_stop: bool
    val_fraction: float
    limit: int | None
    task_bytes: str | int | None


class SharedRunFlags(ContentFlags, total=False):
    """The flags of `tokenize` that `stream` has, too: all but those of ranks, executors and existing stores."""

    workers: int | Literal["auto"]
    memory: str | int
    engine: EngineName | Literal["auto"]
    on_error: OnError
    max_errors: int | None
    affinity: bool
    numa: bool
    profile: str | None


class RunFlags(SharedRunFlags, total=False):
    """The flags of `tokenize`."""

    seed: int
    batch_size: int | None
    """Documents of an engine call."""
    overwrite: bool
    scratch: str | None
    world_size: int | None
