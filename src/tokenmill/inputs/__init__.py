"""Inputs: the items that a user names, turned into the files that a run reads.

An item with a scheme goes to the backend of that scheme. A file, directory or glob of this machine is local. Any other
item may be a data set of the Hub.
"""

# ruff: noqa: PTH100, PTH120
from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

import msgspec

from tokenmill.display import Display, Silence
from tokenmill.errors import UsageError
from tokenmill.inputs._hub_names import explain_absence, find_named, may_be_on_hub
from tokenmill.inputs.base import Backend, Expansion, Extent, Input
from tokenmill.inputs.local import is_here

__all__ = ["DEFAULT_TEXT_KEY", "SCHEMES", "Expansion", "Input", "expand_inputs", "name_inputs", "text_key_of"]

SCHEMES = {"hf": "hub", "s3": "objects", "gs": "objects", "az": "objects"}
"""Which module of this folder knows the URLs of a scheme."""
DEFAULT_TEXT_KEY = "text"


def expand_inputs(
    inputs: Sequence[str], display: Display | None = None, limit: int | None = None, *, is_sample: bool = False
) -> list[Input]:
    """The files that paths, globs, URLs and `@lists` of them stand for, in the order given.

    A file that several globs match is read once, at its first place. A file that is named twice is an error, because
    the user may not have meant it. Files of the Hub are fetched, and `display` shows the progress: only as many as
    `limit` documents need, and for a sample a few files with weights.
    """
    display = display or Silence()
    extent = Extent(limit, is_sample=is_sample and limit is None)
    named: dict[str, bool] = {}
    found: dict[str, Input] = {}
    for item in _with_lists(inputs):
        files, is_named = _backend_of(item, display).expand(item, display, extent)
        for file in files:
            key = file.path if "://" in file.path else os.path.abspath(file.path)
            if key not in named:
                named[key] = is_named
                found[key] = file
            elif is_named and named[key]:
                raise UsageError(f"input {file.path} is named twice; to repeat it, change its weight when loading")
            else:
                named[key] = named[key] or is_named
                if file.folder is None:
                    found[key] = msgspec.structs.replace(found[key], is_chosen=True)
    if not found:
        raise UsageError("no input files were given")
    _check_revisions(found.values())
    return list(found.values())


def _check_revisions(inputs: Iterable[Input]) -> None:
    """Refuse a file of the Hub at two revisions: both have the same name in the manifest, and most of their content."""
    origins: dict[str, str | None] = {}
    for item in inputs:
        if item.name is not None and origins.setdefault(item.name, item.origin) != item.origin:
            raise UsageError(
                f"{item.name} is given at two revisions, {origins[item.name]} and {item.origin}; name one of them, or "
                "make a store of each"
            )


def _with_lists(inputs: Iterable[str]) -> Iterator[str]:
    for item in inputs:
        if not item.startswith("@"):
            yield item
            continue
        if "://" in item:
            raise UsageError(f"list of inputs {item[1:]} must be a file of this machine; copy it here first")
        try:
            lines = Path(item[1:]).read_text("utf-8-sig").splitlines()
        except OSError as error:
            raise UsageError(f"list of inputs {item[1:]} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"list of inputs {item[1:]} is not UTF-8 text with one path per line") from None
        paths = [line.strip() for line in lines if line.strip()]
        if not paths:
            raise UsageError(f"list of inputs {item[1:]} names no files")
        yield from paths


def _backend_of(item: str, display: Display) -> Backend:
    """The module that expands an item; a file of this machine comes before a data set of the same name."""
    scheme, separator, _ = item.partition("://")
    if item == "-":
        raise UsageError(
            "standard input is not read, because a run reads its inputs again when it is resumed or verified; write "
            "it to a file first: ... | zstd > corpus.jsonl.zst"
        )
    if separator:
        if scheme not in SCHEMES:
            known = ", ".join(f"{known}://" for known in SCHEMES)
            raise UsageError(f"input {item}: {scheme}:// is not read; expected a path, a glob, or {known}")
        return _load(SCHEMES[scheme])
    if is_here(item):
        named = find_named(item)
        if named is not None:
            display.say(f"{item} is a local path; the data set is hf://datasets/{named.repository}", style="yellow")
        return _load("local")
    if may_be_on_hub(item):
        return _load("hub")
    raise UsageError(f"input {item}{explain_absence(item)}")


def _load(module: str) -> Backend:
    return cast("Backend", import_module(f"tokenmill.inputs.{module}"))


def name_inputs(inputs: Sequence[Input]) -> list[str]:
    """The names of inputs in a manifest: local files below their common folder, so that no path is absolute."""
    absolute = {index: os.path.abspath(item.path) for index, item in enumerate(inputs) if item.name is None}
    folder = os.path.commonpath([os.path.dirname(path) for path in absolute.values()]) if absolute else ""
    skip = len(folder) if folder.endswith(os.sep) else len(folder) + 1
    below = {index: path[skip:].replace(os.sep, "/") for index, path in absolute.items()}
    return [below[index] if item.name is None else item.name for index, item in enumerate(inputs)]


def text_key_of(inputs: Sequence[Input], given: str | None, display: Display | None = None) -> str:
    """The field that holds the text: the one `given`, else the one that the inputs name, else `text`."""
    if given is not None:
        return given
    keys = sorted({item.text_key or DEFAULT_TEXT_KEY for item in inputs})
    if len(keys) > 1:
        raise UsageError(
            f"the inputs have their text in different fields, {', '.join(keys)}; pass --text-key, or tokenize them "
            "separately"
        )
    if keys != [DEFAULT_TEXT_KEY]:
        (display or Silence()).say(f"text       in {keys[0]!r}, the only field of strings; --text-key names another")
    return keys[0]
