"""Conversations of every shape that chat templates know, for comparisons with other renderers."""

from __future__ import annotations

from typing import Any

__all__ = ["CONVERSATIONS", "TOOLS"]

Record = dict[str, Any]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "The city."}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    },
]


def say(role: str, content: Any, **fields: Any) -> Record:
    return {"role": role, "content": content, **fields}


def call(name: str, number: int = 0, **arguments: Any) -> Record:
    return {"type": "function", "id": f"call{number:05d}", "function": {"name": name, "arguments": arguments}}


def answer(name: str, content: Any, number: int = 0) -> Record:
    return say("tool", content, name=name, tool_call_id=f"call{number:05d}")


SYSTEM = say("system", "You are brief.")
HI, HELLO = say("user", "Hi there"), say("assistant", "Hello! How can I help?")
SUM, FOUR = say("user", "What is 2 + 2?"), say("assistant", "It is 4.")
WEATHER = say("user", "What is the weather in Paris?")
ASKS = say("assistant", "", tool_calls=[call("get_weather", city="Paris")])
SUNNY = answer("get_weather", "sunny, 21 degrees")
REPORTS = say("assistant", "It is sunny in Paris.")

CONVERSATIONS: dict[str, Record] = {
    "one turn": {"messages": [HI, HELLO]},
    "system": {"messages": [SYSTEM, HI, HELLO]},
    "many turns": {"messages": [SYSTEM, HI, HELLO, SUM, FOUR, say("user", "And 3 + 3?"), say("assistant", "6")]},
    "trailing question": {"messages": [HI, HELLO, SUM]},
    "empty answer": {"messages": [HI, say("assistant", ""), SUM, FOUR]},
    "white space": {"messages": [say("user", " a \n"), say("assistant", "\n b \n\n"), SUM, say("assistant", "  4")]},
    "other scripts": {"messages": [say("user", "Grüß dich 你好"), say("assistant", "🙂 é\u0301 سلام"), SUM, FOUR]},
    "markup": {"messages": [HI, say("assistant", "<b>x</b> <t> a < b"), SUM, say("assistant", "<think")]},
    "reasoning": {"messages": [SUM, say("assistant", "It is 4.", reasoning_content="Two and two make four.")]},
    "reasoning twice": {
        "messages": [
            HI,
            say("assistant", "Hello!", reasoning_content="They greet me."),
            SUM,
            say("assistant", "It is 4.", reasoning_content="Two and two make four."),
        ]
    },
    "reasoning in the content": {
        "messages": [SUM, say("assistant", "<think>\nTwo and two make four.\n</think>\n\nIt is 4."), HI, HELLO]
    },
    "tools unused": {"messages": [SYSTEM, HI, HELLO], "tools": TOOLS},
    "call at the end": {"messages": [WEATHER, ASKS], "tools": TOOLS},
    "call and result": {"messages": [WEATHER, ASKS, SUNNY, REPORTS], "tools": TOOLS},
    "call, result, more": {"messages": [SYSTEM, WEATHER, ASKS, SUNNY, REPORTS, SUM, FOUR], "tools": TOOLS},
    "call with words": {
        "messages": [WEATHER, {**ASKS, "content": "Let me look."}, SUNNY, REPORTS, SUM, FOUR],
        "tools": TOOLS,
    },
    "call with reasoning": {
        "messages": [
            WEATHER,
            {**ASKS, "reasoning_content": "I need the weather."},
            SUNNY,
            {**REPORTS, "reasoning_content": "The tool says sunny."},
        ],
        "tools": TOOLS,
    },
    "two calls": {
        "messages": [
            say("user", "The weather in Paris and in Rome?"),
            say("assistant", "", tool_calls=[call("get_weather", city="Paris"), call("get_weather", 1, city="Rome")]),
            SUNNY,
            answer("get_weather", "rain", 1),
            say("assistant", "Sunny and rain."),
        ],
        "tools": TOOLS,
    },
    "calls in a row": {
        "messages": [
            say("user", "Add 1, 2 and 3."),
            say("assistant", "", tool_calls=[call("add", a=1, b=2)]),
            answer("add", "3"),
            say("assistant", "", tool_calls=[call("add", 1, a=3, b=3)]),
            answer("add", "6", 1),
            say("assistant", "6"),
        ],
        "tools": TOOLS,
    },
    "empty result": {"messages": [WEATHER, ASKS, answer("get_weather", ""), REPORTS], "tools": TOOLS},
    "null content": {"messages": [WEATHER, {**ASKS, "content": None}, SUNNY, REPORTS], "tools": TOOLS},
    "parts of text": {
        "messages": [
            say("user", [{"type": "text", "text": "Hi there"}]),
            say("assistant", [{"type": "text", "text": "Hello!"}]),
        ]
    },
    "image": {
        "messages": [
            say("user", [{"type": "image", "url": "cat.png"}, {"type": "text", "text": "What is it?"}]),
            say("assistant", [{"type": "text", "text": "A cat."}]),
        ]
    },
}
