"""Small stores to export: two-byte and four-byte ids, empty documents, two splits, a loss mask, conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import tokenmill
from tests.support.exports import add_mask
from tokenmill.store.store import TokenStore

TEXTS = ["one document", "", "größer 日本", "x" * 5000, "w1 w69999 w500 the last"] * 50


TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def make_stores(folder: Path) -> dict[str, TokenStore]:
    """Make stores by name.

    `narrow` is uint16 with two splits, `wide` is int32, `bare` has no EOS, `supervised` a random mask, and `chat` has
    conversations of several turns with an EOS at the end.
    """
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    wide = folder / "tokenizer"
    make_wide_tokenizer(wide)

    def make(name: str, tokenizer: str, **flags: Any) -> TokenStore:
        out = folder / f"store-{name}"
        # Tasks of 100 kB make several shards of 300 kB of text.
        return tokenmill.tokenize(str(source), out, tokenizer=tokenizer, task_bytes=100_000, **flags)

    stores = {
        "narrow": make("narrow", "bytes", val_fraction=0.2),
        "wide": make("wide", str(wide)),
        "bare": make("bare", "bytes", eos=False),
    }
    supervised = make("supervised", "bytes")
    add_mask(supervised.path, np.random.default_rng(0).integers(0, 2, supervised.num_tokens, np.uint8))
    return {**stores, "supervised": TokenStore(supervised.path), "chat": make_chat(folder)}


def make_chat(folder: Path) -> TokenStore:
    """Make a store of conversations of one to four turns of the assistant."""
    (folder / "chat.jinja").write_text(TEMPLATE)
    turns = [{"role": "user", "content": "how many?"}, {"role": "assistant", "content": "exactly eleven"}]
    lines = [json.dumps({"messages": turns * (1 + number % 4)}) for number in range(40)]
    (folder / "chat.jsonl").write_text("\n".join(lines))
    flags: dict[str, Any] = {"messages_key": "messages", "chat_template": str(folder / "chat.jinja"), "eos": True}
    return tokenmill.tokenize(str(folder / "chat.jsonl"), folder / "store-chat", tokenizer="bytes", **flags)


def make_wide_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a vocabulary above 65,536, so that ids are int32."""
    vocab = {f"w{number}": number for number in range(70_000)}
    vocab |= {"[UNK]": 70_000, "</s>": 70_001}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    config = {
        "version": "1.0",
        "added_tokens": [{"id": 70_001, "content": "</s>", **special}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
    }
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
