"""Tokenizers that a Python program holds as objects: their own files, in a folder that lasts as long as the program.

A run reads its tokenizer from files and copies them into the store. So an object is serialized with the function that
its library saves it with, and only the settings that decide ids or texts are written beside it: equal objects give
equal stores, wherever they were loaded from. The libraries are not imported here.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tokenmill.arguments import name_kind
from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.errors import UsageError

__all__ = ["TokenizerLike", "tokenizer_spec"]

UNNAMED = "tokenizer"
EXPECTED = (
    "expected a path, a Hub id, tiktoken:NAME or bytes, or an object: a tokenizers.Tokenizer, a fast tokenizer of "
    "transformers or a SentencePieceProcessor"
)


class SavedAsJson(Protocol):
    """A `tokenizers.Tokenizer`."""

    def to_str(self, pretty: bool = False) -> str:
        """The content of its `tokenizer.json`."""


class FastTokenizer(Protocol):
    """A tokenizer of `transformers` that is one of `tokenizers` inside."""

    @property
    def backend_tokenizer(self) -> Any:
        """The tokenizer inside."""


class SavedAsModel(Protocol):
    """A `SentencePieceProcessor`."""

    def serialized_model_proto(self) -> bytes:
        """The content of its `.model`."""


TokenizerLike = str | os.PathLike[str] | Tokenizer | SavedAsJson | FastTokenizer | SavedAsModel
"""What Python functions take as a tokenizer."""


def tokenizer_spec(tokenizer: TokenizerLike) -> str:
    """Return what the user wrote, or the folder with the files of an object."""
    if isinstance(tokenizer, (str, os.PathLike)):
        return os.fspath(tokenizer)
    name, files = _serialize(tokenizer)
    digest = hashlib.sha256(msgspec.msgpack.encode(sorted(files.items()))).hexdigest()
    folder = _folder() / digest[:16] / (Path(name).name or UNNAMED)
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        (folder / file).write_bytes(data)
    return str(folder)


@lru_cache(maxsize=1)
def _folder() -> Path:
    """A folder that is removed when this process ends, but not when one that was forked from it does."""
    folder, owner = Path(tempfile.mkdtemp(prefix="tokenmill-tokenizers-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def _serialize(tokenizer: Any) -> tuple[str, dict[str, bytes]]:
    """Return the name of a tokenizer, and its files."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.name, dict(tokenizer.files)
    library = {kind.__module__.partition(".")[0] for kind in type(tokenizer).__mro__}
    if "tokenizers" in library and hasattr(tokenizer, "to_str"):
        return UNNAMED, {"tokenizer.json": _to_json(tokenizer)}
    if "transformers" in library:
        return _serialize_transformers(tokenizer)
    if "sentencepiece" in library and hasattr(tokenizer, "serialized_model_proto"):
        return UNNAMED, {"tokenizer.model": tokenizer.serialized_model_proto()}
    if "tiktoken" in library:
        name = getattr(tokenizer, "name", "NAME")
        raise UsageError(f"tokenizer {name_kind(tokenizer)} cannot be saved to files; pass 'tiktoken:{name}'")
    raise UsageError(f"tokenizer {name_kind(tokenizer)} is unknown; {EXPECTED}")


def _serialize_transformers(tokenizer: Any) -> tuple[str, dict[str, bytes]]:
    """Return the files of a tokenizer of transformers.

    `save_pretrained` would also write where it was loaded from, and settings that no id depends on.
    """
    inside = getattr(tokenizer, "backend_tokenizer", None)
    if inside is None:
        raise UsageError(
            f"tokenizer {type(tokenizer).__name__} of transformers is not a fast one, which alone has a "
            "tokenizer.json; load it with AutoTokenizer, or pass the path of its files"
        )
    names = {name: token for name, token in tokenizer.special_tokens_map.items() if name.endswith("_token")}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **{name: str(token) for name, token in names.items()}}
    files = {"tokenizer.json": _to_json(inside), "tokenizer_config.json": msgspec.json.encode(config, order="sorted")}
    template = getattr(tokenizer, "chat_template", None)
    template = template.get("default") if isinstance(template, dict) else template
    if isinstance(template, str):
        files["chat_template.jinja"] = template.encode()
    return str(getattr(tokenizer, "name_or_path", "")) or UNNAMED, files


def _to_json(tokenizer: Any) -> bytes:
    try:
        return bytes(tokenizer.to_str(pretty=True), "utf-8")
    except Exception as error:
        raise UsageError(
            f"tokenizer {type(tokenizer).__name__} cannot be saved as a tokenizer.json: {error}; parts written in "
            "Python have no file that a store could keep"
        ) from None
