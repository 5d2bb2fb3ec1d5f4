"""The options of supervised data: the fields of a record, and how to combine them."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any, Literal

import msgspec

from tokenmill.errors import UsageError

__all__ = ["DEFAULT_TEMPLATE", "PAIR_TEMPLATE", "REASONING_FIELDS", "Holds", "Supervision", "parse_choices"]

DEFAULT_TEMPLATE = "{prompt}\n{response}"
PAIR_TEMPLATE = "{prompt}{response}"
"""The default for preference pairs: TRL's preparation puts nothing between a prompt and an answer."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""The names under which a message may have its reasoning."""
Holds = Literal["pairs", "prompts"]
"""What the documents of a store are, if they are not texts of their own: two answers to a prompt, or a prompt alone."""


class Supervision(msgspec.Struct, frozen=True, kw_only=True):
    """The flags that define examples.

    A record has messages, or a prompt and a response, or two answers of which one was preferred, or only a prompt.
    """

    messages_key: str | None = None
    prompt_key: str | None = None
    response_key: str | None = None
    template: str = DEFAULT_TEMPLATE
    """How to combine prompt and response."""
    chat_template: str | None = None
    """The Jinja source that renders messages."""
    weight_key: str | None = None
    ends_messages: bool = False
    """Whether conversations also get an end-of-text token, after the text of the template."""
    template_date: str | None = None
    """The date that `strftime_now` writes in a chat template, as 2026-01-31."""
    template_values: dict[str, Any] = {}
    """More names that the chat template may look at, such as `enable_thinking`."""
    train_on: str = "all"
    """The turns to train on: all, last, or numbers from 1 on; negative ones count from the end."""
    train_roles: tuple[str, ...] = ("assistant",)
    mask_reasoning: bool = False
    mask_tool_calls: bool = False
    allow_no_stop: bool = False
    """Whether a data set may be without any trained token that ends a turn."""
    chosen_key: str | None = None
    rejected_key: str | None = None
    prompts_only: bool = False
    """Whether records are prompts, in which nothing is trained on."""

    @property
    def turn_numbers(self) -> list[int] | None:
        """The numbers of the turns to train on; None for all."""
        if self.train_on == "all":
            return None
        return [-1] if self.train_on == "last" else [int(number) for number in self.train_on.split(",")]

    @property
    def holds(self) -> Holds | None:
        """What the store will hold; None for documents that are trained on one by one."""
        return "pairs" if self.chosen_key is not None else "prompts" if self.prompts_only else None

    @property
    def fields(self) -> tuple[str | None, ...]:
        """The fields of messages, tools, prompt, response, weight and two answers. Tools are beside the messages."""
        beside = self.messages_key or self.chosen_key or (self.prompt_key if self.prompts_only else None)
        tools = beside and ".".join([*beside.split(".")[:-1], "tools"])
        answers = self.response_key, self.weight_key, self.chosen_key, self.rejected_key
        return self.messages_key, tools, self.prompt_key, *answers

    @property
    def keys(self) -> tuple[str, ...]:
        """The fields to read from each record."""
        return tuple(key for key in self.fields if key)


def parse_choices(
    *, train_on: str | int | None, train_roles: str | list[str] | None, date: str | None, values: Any
) -> dict[str, Any]:
    """Check the flags that say what to train on and what a chat template may look at; return them as options."""
    chosen: dict[str, Any] = {}
    if train_on is not None:
        text = str(train_on).replace(" ", "")
        if text not in ("all", "last") and not re.fullmatch(r"-?[1-9][0-9]{0,5}(,-?[1-9][0-9]{0,5})*", text):
            raise UsageError(f"--train-on {train_on}: expected all, last, or numbers of turns such as 1,-1")
        chosen["train_on"] = text
    if train_roles is not None:
        names = train_roles.split(",") if isinstance(train_roles, str) else train_roles
        roles = tuple(name.strip() for name in names if name.strip())
        if not roles:
            raise UsageError("--train-roles is empty; expected roles such as assistant,tool")
        chosen["train_roles"] = roles
    if date is not None:
        try:
            chosen["template_date"] = datetime.date.fromisoformat(str(date)).isoformat()
        except ValueError:
            raise UsageError(f"--template-date {date}: expected a date such as 2026-01-31") from None
    if values is not None:
        try:
            parsed = json.loads(values) if isinstance(values, str) else values
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict) or not all(isinstance(name, str) and name.isidentifier() for name in parsed):
            raise UsageError(
                f"--template-values {values}: expected a JSON object of names and values, such as "
                """'{"enable_thinking": false}'"""
            )
        chosen["template_values"] = parsed
    return chosen
