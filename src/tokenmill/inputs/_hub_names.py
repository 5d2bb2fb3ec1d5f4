"""How a user writes a data set of the Hub, and the data sets that have a short name.

    hf://datasets/owner/name                     the data set: its default configuration, the train split
    hf://datasets/owner/name/folder/*.parquet    files of it: a path, a folder or a glob
    hf://datasets/owner/name@revision/...        the same at a commit, a tag or a branch
    owner/name:config:split                      a configuration and a split; either may be omitted
    tinystories@revision:split                   a short name from the table below, with the same endings

Names and configurations of the Hub contain no colons, so the endings are unambiguous. After a slash, everything is part
of the path.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from urllib.parse import unquote

import msgspec

from tokenmill.errors import UsageError

__all__ = ["CONVERTED", "MAIN", "Target", "explain_absence", "find_named", "may_be_on_hub", "parse", "suggest"]

MAIN = "main"
CONVERTED = "refs/convert/parquet"
"""The branch on which the Hub keeps a Parquet conversion of a data set."""
PREFIX = "hf://datasets/"


class NamedDataset(msgspec.Struct, frozen=True):
    """The data set that a short name stands for."""

    repository: str
    config: str | None = None
    text_key: str = "text"


DATASETS = {
    "finewebedu": NamedDataset("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "openwebtext": NamedDataset("Skylion007/openwebtext"),
    "slimpajama": NamedDataset("cerebras/SlimPajama-627B"),
    "tinystories": NamedDataset("roneneldan/TinyStories"),
    "wikitext-103": NamedDataset("Salesforce/wikitext", "wikitext-103-raw-v1"),
}
"""FineWeb-Edu has 10 TB in total, so its short name stands for the sample that people start with."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the Hub that a user named."""

    item: str
    """As the user wrote it."""
    repository: str
    revision: str = MAIN
    path: str = ""
    """A file, folder or glob; empty for a split of the data set."""
    words: tuple[str, ...] = ()
    """The parts after colons: a configuration, a split, or both."""
    text_key: str | None = None

    @property
    def looks_local(self) -> bool:
        """Whether the user may have meant a path on this machine."""
        return "://" not in self.item and find_named(self.item) is None


SEGMENT = r"[A-Za-z0-9][\w.-]*"
REVISION = r"(?:@(refs/convert/[\w.-]+|refs/pr/\d+|~parquet|[^/:@]+))?"
WORDS = r"((?::[^/:]+){0,2})"
URL = re.compile(rf"{PREFIX}({SEGMENT}/{SEGMENT}){REVISION}(?:{WORDS}|/(.*))")
BARE = re.compile(rf"({SEGMENT}/{SEGMENT}){REVISION}{WORDS}")
NAME = re.compile(rf"([\w-]+){REVISION}{WORDS}")
FILE = re.compile(r"\.(jsonl?|ndjson|parquet|te?xt|csv|tsv|md|arrow|bin|tar|gz|zst|zip|bz2|xz)$", re.IGNORECASE)


def find_named(item: str) -> NamedDataset | None:
    """The data set with this short name; endings such as `:split` may follow it."""
    found = NAME.fullmatch(item)
    return DATASETS.get(found[1].lower()) if found is not None else None


def may_be_on_hub(item: str) -> bool:
    """Whether an item that is not on this machine may be a data set: a short name, or `owner/name`.

    A name with the ending of a data file is not one, and neither is a path in an existing folder, so that a typo in a
    local path is not looked up on the network.
    """
    return find_named(item) is not None or (_is_like_data_set(item) and not Path(item).parent.is_dir())


def _is_like_data_set(item: str) -> bool:
    return BARE.fullmatch(item) is not None and not FILE.search(item)


def explain_absence(item: str) -> str:
    """The end of the sentence that refuses an item: why it is no input, and what the user may have meant."""
    if _is_like_data_set(item) and Path(item).parent.is_dir():
        return f" does not exist in the folder {Path(item).parent}; for the data set of the Hub, write {PREFIX}{item}"
    return f" does not exist{suggest(item)}"


def suggest(item: str) -> str:
    """The end of a sentence that names a data set similar to an unknown one; empty if there is none."""
    owner, _, rest = item.partition("/")
    if rest and owner.lower() in DATASETS:
        return f"; a configuration of {owner.lower()} is written {owner.lower()}:{rest}"
    known = {dataset.repository.lower(): dataset.repository for dataset in DATASETS.values()}
    known |= {name: f"{name} ({PREFIX}{dataset.repository})" for name, dataset in DATASETS.items()}
    near = difflib.get_close_matches(item.partition(":")[0].lower(), known, 1, 0.75)
    return f"; did you mean {known[near[0]]}?" if near else ""


def parse(item: str) -> Target:
    """Parse an item; raises a `UsageError` that lists the accepted forms."""
    named = find_named(item)
    found = (NAME if named is not None else BARE).fullmatch(item) or URL.fullmatch(item)
    if found is None:
        raise UsageError(
            f"input {item} cannot be read; expected hf://datasets/owner/name, hf://datasets/owner/name/path or "
            "hf://datasets/owner/name:config:split, each with @revision after the name if needed"
        )
    revision = CONVERTED if found[2] == "~parquet" else unquote(found[2] or MAIN)
    words = tuple((found[3] or "").split(":")[1:])
    if named is None:
        path = (found[4] or "").strip("/") if found.re is URL else ""
        return Target(item=item, repository=found[1], revision=revision, path=path, words=words)
    # A split after a short name is a split of the configuration that the name stands for.
    if named.config is not None and (not words or words in (("train",), ("validation",), ("test",))):
        words = (named.config, *words)
    return Target(item=item, repository=named.repository, revision=revision, words=words, text_key=named.text_key)
