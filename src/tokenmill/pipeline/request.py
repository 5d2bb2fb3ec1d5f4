"""The user's request for a run: the flags of `tokenmill tokenize`, by their Python names.

The command line, a YAML file and `tokenmill.tokenize` all make a `Request`, so that each flag is
named, checked and explained in one place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from tokenmill.arguments import is_remote
from tokenmill.engines import SpecialTokens, Tokenizer
from tokenmill.errors import UsageError
from tokenmill.inputs import DEFAULT_TEXT_KEY
from tokenmill.machine import parse_bytes
from tokenmill.pipeline.input_file import InputFile, default_task_bytes
from tokenmill.pipeline.settings import KEEP_DAMAGED, OnError, Settings, TokenPolicy
from tokenmill.readers.base import ReadOptions
from tokenmill.remote.object_request import SCHEMES
from tokenmill.supervision.options import DEFAULT_TEMPLATE, PAIR_TEMPLATE, Supervision, parse_choices

__all__ = ["Request"]

CHAT_FLAGS = (
    "chat_template",
    "template_date",
    "template_values",
    "train_on",
    "train_roles",
    "mask_reasoning",
    "mask_tool_calls",
    "allow_no_stop",
)
"""The flags that only conversations have."""
RENDERING_FLAGS = ("chat_template", "template_date", "template_values")
"""Those that preference pairs and prompts have, too: the others choose what is trained on of a conversation."""


class Request(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """All flags of a run; sizes may be written as `512MB`."""

    inputs: list[str]
    out: str
    tokenizer: str
    text_key: str | None = None
    """None means the field that the inputs name, or `text` if they name none."""
    keep_keys: list[str] = []
    format: Literal["auto", "jsonl", "json", "parquet", "text"] = "auto"
    separator: str | None = None
    whole_files: bool = False
    max_document_bytes: str | int = "256MB"
    eos: bool | None = None
    bos: bool | None = None
    eos_token: str | int | None = None
    bos_token: str | int | None = None
    special_tokens: SpecialTokens | None = None
    messages_key: str | None = None
    prompt_key: str | None = None
    response_key: str | None = None
    chosen_key: str | None = None
    rejected_key: str | None = None
    prompts_only: bool = False
    template: str | None = None
    chat_template: str | None = None
    weight_key: str | None = None
    template_date: str | None = None
    template_values: dict[str, Any] | str | None = None
    train_on: str | int | None = None
    train_roles: list[str] | str | None = None
    mask_reasoning: bool = False
    mask_tool_calls: bool = False
    allow_no_stop: bool = False
    val_fraction: float = 0.0
    seed: Annotated[int, Meta(ge=0, lt=1 << 62)] = 0
    limit: Annotated[int, Meta(ge=1, lt=1 << 62)] | None = None
    task_bytes: str | int | None = None
    workers: Annotated[int, Meta(ge=1)] | Literal["auto"] = "auto"
    memory: str | int = "auto"
    batch_size: Annotated[int, Meta(ge=1)] | None = None
    engine: str = "auto"
    on_error: OnError = "fail"
    max_errors: Annotated[int, Meta(ge=0)] | None = None
    overwrite: bool = False
    scratch: str | None = None
    executor: Literal["local", "ray"] = "local"
    rank: Annotated[int, Meta(ge=0)] | Literal["slurm", "kubernetes"] | None = None
    world_size: Annotated[int, Meta(ge=1)] | None = None
    affinity: bool = False
    numa: bool = False
    profile: str | None = None

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Request:
        """Make a request from flags; check names, types and choices, and raise an error that names the flag."""
        known = set(cls.__struct_fields__)
        for name in flags:
            if name not in known:
                raise UsageError(f"{_flag(name)} is not a flag of tokenize; see tokenmill tokenize --help")
        rank = flags.get("rank")
        if isinstance(rank, str) and re.fullmatch(r"-?[0-9]+", rank):
            # Command lines and environment variables pass numbers as strings.
            flags = {**flags, "rank": int(rank)}
        try:
            request = msgspec.convert(dict(flags), cls)
        except msgspec.ValidationError as error:
            raise UsageError(_explain(str(error), flags)) from None
        if request.max_errors is not None and request.on_error == "fail":
            raise UsageError(
                f"--max-errors {request.max_errors} counts what is skipped, and --on-error fail stops at the first bad "
                "record; add --on-error skip"
            )
        if request.rank is not None and request.overwrite:
            raise UsageError(
                f"--overwrite would make every rank remove the work of the others; remove the store first (rm -r "
                f"{request.out}), then start all ranks without it"
            )
        for name in ("out", "tokenizer", "scratch", "profile"):
            _check_utf8(name, getattr(request, name))
        scheme, _, rest = request.out.partition("://")
        if rest and scheme not in SCHEMES:
            expected = " or ".join(f"{known}://" for known in SCHEMES)
            raise UsageError(f"-o {request.out}: {scheme}:// is not written to; expected a path, or {expected}")
        if request.scratch is not None and not rest:
            raise UsageError(
                f"--scratch {request.scratch} is for a store in a bucket, and -o {request.out} is a directory"
            )
        if request.profile is not None and not Path(request.profile).absolute().parent.is_dir():
            raise UsageError(f"--profile {request.profile}: there is no directory {Path(request.profile).parent}")
        return request

    def reading(self) -> ReadOptions:
        """Return the options for finding documents in the inputs."""
        if self.separator is not None and self.whole_files:
            raise UsageError("--separator and --whole-files exclude each other: pass one of them")
        return ReadOptions(
            text_key=self.text_key or DEFAULT_TEXT_KEY,
            keep_keys=tuple(self.keep_keys),
            record_keys=self._supervised_keys(),
            needed_keys=self._needed_keys(),
            separator=self.separator,
            whole_files=self.whole_files,
            max_document_bytes=parse_bytes(self.max_document_bytes, "--max-document-bytes"),
        )

    def policy(self, tokenizer: Tokenizer) -> TokenPolicy:
        """Decide which ids surround documents: those of the flags, else those of the tokenizer's files.

        Special-token strings are read as text, unless a template writes them.
        """
        bos, eos = tokenizer.bos_id, tokenizer.eos_id
        if self.bos_token is not None:
            bos = tokenizer.token_id(str(self.bos_token), "--bos-token")
        if self.eos_token is not None:
            eos = tokenizer.token_id(str(self.eos_token), "--eos-token")
        wants_bos = tokenizer.adds_bos or self.bos_token is not None if self.bos is None else self.bos
        if wants_bos and bos is None:
            raise UsageError(f"{tokenizer.name} names no beginning-of-text token; pass --bos-token TOKEN, or --no-bos")
        wants_eos = self.eos if self.eos is not None else self.messages_key is None or self.prompt_key is not None
        wants_eos = wants_eos and not self.prompts_only
        if wants_eos and eos is None:
            raise UsageError(f"{tokenizer.name} names no end-of-text token; pass --eos-token TOKEN, or --no-eos")
        supervision = self.supervision(tokenizer)
        specials = self.special_tokens or "as-text"
        if supervision is not None and _has_specials(supervision, tokenizer):
            if tokenizer.kind in {"sentencepiece", "bytes"}:
                raise UsageError(
                    f"the template writes special tokens, and {tokenizer.name} reads their strings as text, as "
                    f"{tokenizer.kind} always does; use a tokenizer.json, or a template without them"
                )
            if self.special_tokens == "as-text":
                raise UsageError(
                    "--special-tokens as-text would read the special tokens of the template as text; leave the flag "
                    "out (records that have such strings of their own are then rejected), or pass parse"
                )
            specials = self.special_tokens or "error"
        return TokenPolicy(
            bos_id=bos if wants_bos else None, eos_id=eos if wants_eos else None, special_tokens=specials
        )

    def supervision(self, tokenizer: Tokenizer) -> Supervision | None:
        """Return how records become texts, with templates loaded; None if the data is already text."""
        if not self._supervised_keys():
            if self.prompts_only:
                raise UsageError("--prompts-only needs the field of the prompts; pass --prompt-key or --messages-key")
            for name in ("template", "weight_key", *CHAT_FLAGS):
                if getattr(self, name) not in (None, False):
                    raise UsageError(
                        f"{_flag(name)} is for supervised data; name its fields with --messages-key, "
                        "--prompt-key and --response-key, or --chosen-key and --rejected-key"
                    )
            return None
        for name in CHAT_FLAGS:
            may_have = self.messages_key is not None or self.chosen_key is not None or self.prompts_only
            if not may_have and getattr(self, name) not in (None, False):
                raise UsageError(f"{_flag(name)} is for conversations; name their field with --messages-key")
        return Supervision(
            messages_key=self.messages_key,
            prompt_key=self.prompt_key,
            response_key=self.response_key,
            template=self._template(),
            chat_template=self._chat_source(tokenizer) if self._may_have_messages(tokenizer) else None,
            weight_key=self.weight_key,
            ends_messages=self.eos is True,
            mask_reasoning=self.mask_reasoning,
            mask_tool_calls=self.mask_tool_calls,
            allow_no_stop=self.allow_no_stop,
            **parse_choices(
                train_on=self.train_on,
                train_roles=self.train_roles,
                date=self.template_date,
                values=self.template_values,
            ),
            chosen_key=self.chosen_key,
            rejected_key=self.rejected_key,
            prompts_only=self.prompts_only,
        )

    def _template(self) -> str:
        """Return what combines a prompt and an answer."""
        if self.template is None:
            return DEFAULT_TEMPLATE if self.chosen_key is None else PAIR_TEMPLATE
        written = _check_template(self.template)
        if self.chosen_key is not None and "{prompt}" in written.partition("{response}")[2]:
            raise UsageError(f"--template {self.template!r} must have {{prompt}} before {{response}} only")
        return written

    def _may_have_messages(self, tokenizer: Tokenizer) -> bool:
        """Whether records may have conversations; those of pairs and prompts show only when they are read."""
        if self.chosen_key is None and not self.prompts_only:
            return self.messages_key is not None
        return self.chat_template is not None or tokenizer.chat_template is not None

    def _check_special_shapes(self) -> None:
        """Refuse flags that contradict each other, if the records are preference pairs or prompts alone."""
        if (self.chosen_key is None) != (self.rejected_key is None):
            missing = "--rejected-key" if self.rejected_key is None else "--chosen-key"
            raise UsageError(f"{missing} is missing: --chosen-key and --rejected-key must be passed together")
        what = "--prompts-only" if self.chosen_key is None else "--chosen-key"
        others = {"response_key", "weight_key", *CHAT_FLAGS} - {*RENDERING_FLAGS}
        if self.chosen_key is not None:
            others |= {"messages_key", "prompts_only"}
        if self.prompts_only or self.prompt_key is None:
            others.add("template")
        if self.prompts_only and self.prompt_key is not None:
            others.add("messages_key")
        for name in sorted(others):
            if getattr(self, name) not in (None, False):
                needs = " without --prompt-key" if name == "template" and self.chosen_key is not None else ""
                raise UsageError(f"{_flag(name)} has no meaning with {what}{needs}; leave one of them out")
        if self.prompts_only and self.eos is True:
            raise UsageError("--eos would end prompts that a model is to continue; leave it out with --prompts-only")

    def _supervised_keys(self) -> tuple[str, ...]:
        if self.chosen_key is not None or self.rejected_key is not None or self.prompts_only:
            self._check_special_shapes()
        if self.chosen_key is not None or (self.prompts_only and (self.prompt_key or self.messages_key)):
            return self._distinct_keys()
        if (self.prompt_key is None) != (self.response_key is None):
            missing = "--response-key" if self.response_key is None else "--prompt-key"
            hint = "" if self.prompt_key is None else "; prompts without a response are stored with --prompts-only"
            raise UsageError(f"{missing} is missing: --prompt-key and --response-key must be passed together{hint}")
        if self.messages_key is None and self.prompt_key is None:
            return ()
        return self._distinct_keys()

    def _needed_keys(self) -> tuple[str, ...]:
        """Return the fields that every record must have; with messages, a record may have a prompt instead."""
        if self.messages_key is not None:
            return ()
        keys = self.prompt_key, self.response_key, self.chosen_key, self.rejected_key
        return tuple(key for key in keys if key is not None)

    def _distinct_keys(self) -> tuple[str, ...]:
        """Return the fields of the records; each must have one role."""
        keys = Supervision(
            messages_key=self.messages_key,
            prompt_key=self.prompt_key,
            response_key=self.response_key,
            weight_key=self.weight_key,
            chosen_key=self.chosen_key,
            rejected_key=self.rejected_key,
            prompts_only=self.prompts_only,
        ).keys
        if len(set(keys)) < len(keys):
            raise UsageError(f"one field cannot have two roles: {', '.join(keys)}")
        return keys

    def _chat_source(self, tokenizer: Tokenizer) -> str:
        if self.chat_template is None:
            if tokenizer.chat_template is None:
                raise UsageError(f"{tokenizer.name} has no chat template; pass one with --chat-template FILE")
            return tokenizer.chat_template
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise UsageError(f"--chat-template {self.chat_template} cannot be read: {reason}") from None

    def settings(self, tokenizer: Tokenizer, inputs: list[InputFile]) -> Settings:
        """Return the content flags with automatic values resolved."""
        task_bytes = default_task_bytes(inputs)
        if self.task_bytes is not None:
            task_bytes = parse_bytes(self.task_bytes, "--task-bytes")
        settings = Settings(
            tokenizer_sha256=tokenizer.sha256,
            policy=self.policy(tokenizer),
            reading=self.reading(),
            supervision=self.supervision(tokenizer),
            format=self.format,
            val_fraction=self.val_fraction,
            seed=self.seed,
            limit=self.limit,
            task_bytes=task_bytes,
            keeps_damaged=self.on_error == KEEP_DAMAGED,
        )
        settings.check()
        return settings

    def memory_bytes(self) -> int | None:
        """Return the value of --memory in bytes; None for `auto`."""
        return None if self.memory == "auto" else parse_bytes(self.memory, "--memory")


def _check_utf8(name: str, value: object) -> None:
    """Refuse a path that is not UTF-8, as a whole: it is sent to workers, and recorded as JSON."""
    path = "" if not isinstance(value, str) or is_remote(value) else os.path.abspath(value)  # noqa: PTH100
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{_flag(name)} {value}: the path {path!r} is not UTF-8; choose or rename it so") from None


def _check_template(template: str) -> str:
    """Check a template; turn `\\n` and `\\t`, as typed in a shell, into line ends and tabs."""
    written = template.replace("\\n", "\n").replace("\\t", "\t")
    from tokenmill.supervision.renderer import split_template

    split_template(written)
    return written


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _explain(message: str, flags: Mapping[str, Any]) -> str:
    """Reword `Expected ..., got ... - at `$.on_error``: put the flag first, with its value if the message lacks it."""
    text, _, where = message.partition(" - at `$.")
    name = where.rstrip("`")
    kind = get_type_hints(Request).get(name)
    if text.startswith("Invalid enum value"):
        literals = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
        choices = ", ".join(choice for part in literals for choice in get_args(part))
        text += f"; expected {choices}, or a number" if int in get_args(kind) else f"; expected one of {choices}"
    elif name in flags and (least := re.match(r"Expected `int` >= (\d+)$", text)):
        return f"{_flag(name)} {flags[name]}: expected a whole number from {least[1]} on"
    elif name in flags:
        return f"{_flag(name)} {flags[name]}: {text[:1].lower()}{text[1:]}"
    return f"{_flag(name)}: {text}" if where else text


def _has_specials(supervision: Supervision, tokenizer: Tokenizer) -> bool:
    # Text without supervision starts sooner without templates and their compiler.
    from tokenmill.supervision.renderer import has_specials

    return has_specials(supervision, tokenizer)
