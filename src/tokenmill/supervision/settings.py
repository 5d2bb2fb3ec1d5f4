"""Which fields of a record make an example, and how they are put together."""

from __future__ import annotations

import msgspec

__all__ = ["DEFAULT_TEMPLATE", "Supervision"]

DEFAULT_TEMPLATE = "{prompt}\n{response}"


class Supervision(msgspec.Struct, frozen=True, kw_only=True):
    """The content flags of supervised data; a record has messages, or else a prompt and a response."""

    messages_key: str | None = None
    prompt_key: str | None = None
    response_key: str | None = None
    template: str = DEFAULT_TEMPLATE
    """How prompt and response are put together."""
    chat_template: str | None = None
    """The Jinja source that renders messages."""
    weight_key: str | None = None
    ends_messages: bool = False
    """Whether conversations get an end-of-text token too, beyond what the template writes."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The fields to read of each record; the tools of a conversation lie beside its messages."""
        tools = self.messages_key and ".".join([*self.messages_key.split(".")[:-1], "tools"])
        keys = (self.messages_key, tools, self.prompt_key, self.response_key, self.weight_key)
        return tuple(key for key in keys if key)
