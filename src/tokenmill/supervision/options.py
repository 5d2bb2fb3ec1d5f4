"""The options of supervised data: the fields of a record, and how to combine them."""

from __future__ import annotations

import msgspec

__all__ = ["DEFAULT_TEMPLATE", "Supervision"]

DEFAULT_TEMPLATE = "{prompt}\n{response}"


class Supervision(msgspec.Struct, frozen=True, kw_only=True):
    """The flags that define examples. A record has either messages, or a prompt and a response."""

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

    @property
    def fields(self) -> tuple[str | None, ...]:
        """The fields of messages, tools, prompt, response and weight. Tools are beside the messages."""
        tools = self.messages_key and ".".join([*self.messages_key.split(".")[:-1], "tools"])
        return self.messages_key, tools, self.prompt_key, self.response_key, self.weight_key

    @property
    def keys(self) -> tuple[str, ...]:
        """The fields to read from each record."""
        return tuple(key for key in self.fields if key)
