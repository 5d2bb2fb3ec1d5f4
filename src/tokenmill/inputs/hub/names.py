"""How data sets of the Hub are written, and the names that need no more than a word.

    hf://datasets/owner/name                     the data set: its default configuration, the train split
    hf://datasets/owner/name/folder/*.parquet    files of it: a path, a folder or a glob
    hf://datasets/owner/name@revision/...        as it was at a commit, a tag or on a branch
    owner/name:config:split                      a configuration and a split; one of them may be left out
    tinystories@revision:split                   a name from the table below, with the same endings

Colons stand in neither names nor configurations of the Hub, so an ending cannot be taken for a part of these; behind a
slash everything is a path.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from urllib.parse import unquote

import msgspec

from tokenmill.errors import UsageError

__all__ = [
    "CONVERTED",
    "DATASETS",
    "MAIN",
    "NamedDataset",
    "Target",
    "could_be_on_hub",
    "explain_absence",
    "name_of",
    "parse",
    "suggest",
]

MAIN = "main"
CONVERTED = "refs/convert/parquet"
"""The branch on which the Hub keeps data sets as Parquet, whatever they are on the main one."""
PREFIX = "hf://datasets/"


class NamedDataset(msgspec.Struct, frozen=True):
    """What a name stands for."""

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
"""All of FineWeb-Edu is 10 TB, so its name stands for the sample that people begin with."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What of the Hub is meant."""

    item: str
    """As the user wrote it."""
    repository: str
    revision: str = MAIN
    path: str = ""
    """A file, folder or glob; empty: what the data set itself says."""
    words: tuple[str, ...] = ()
    """What came after colons: a configuration, a split, or both."""
    text_key: str | None = None

    @property
    def is_bare(self) -> bool:
        """Whether it was written like a path of this machine, and might have been meant as one."""
        return "://" not in self.item and name_of(self.item) is None


SEGMENT = r"[A-Za-z0-9][\w.-]*"
REVISION = r"refs/convert/[\w.-]+|refs/pr/\d+|~parquet|[^/:@]+"
WORDS = r"(?::[^/:]+){0,2}"
URL = re.compile(rf"({SEGMENT}/{SEGMENT})(?:@({REVISION}))?(?:/(.*)|({WORDS}))")
BARE = re.compile(rf"({SEGMENT}/{SEGMENT})(?:@({REVISION}))?({WORDS})")
NAME = re.compile(rf"([\w-]+)(?:@({REVISION}))?({WORDS})")
FILE = re.compile(r"\.(jsonl?|ndjson|parquet|te?xt|csv|tsv|md|arrow|bin|tar|gz|zst|zip|bz2|xz)$", re.IGNORECASE)


def could_be_on_hub(item: str) -> bool:
    """Whether something that is not on this machine can be a data set: a known name, or `owner/name`.

    What looks like a data file is none, and neither is a path in a folder that is here: a slip of the pen should not
    be looked up on the network.
    """
    return name_of(item) is not None or (_is_like_data_set(item) and not Path(item).parent.is_dir())


def name_of(item: str) -> NamedDataset | None:
    """The data set that has a name of its own, if this is one, with whatever endings."""
    found = NAME.fullmatch(item)
    return DATASETS.get(found[1].lower()) if found is not None else None


def _is_like_data_set(item: str) -> bool:
    return BARE.fullmatch(item) is not None and not FILE.search(item)


def explain_absence(item: str) -> str:
    """Why something is no input, behind its name, and what may have been meant."""
    if _is_like_data_set(item) and Path(item).parent.is_dir():
        return f" does not exist in the folder {Path(item).parent}; for the data set of the Hub, write {PREFIX}{item}"
    return f" does not exist{suggest(item)}"


def suggest(item: str) -> str:
    """What else may have been meant by an unknown name, as the end of a sentence; empty if nothing comes near."""
    owner, _, rest = item.partition("/")
    if rest and owner.lower() in DATASETS:
        return f"; a configuration of {owner.lower()} is written {owner.lower()}:{rest}"
    known = {dataset.repository.lower(): dataset.repository for dataset in DATASETS.values()}
    known |= {name: f"{name} (hf://datasets/{dataset.repository})" for name, dataset in DATASETS.items()}
    near = difflib.get_close_matches(item.partition(":")[0].lower(), known, 1, 0.75)
    return f"; did you mean {known[near[0]]}?" if near else ""


def parse(item: str) -> Target:
    """What a user wrote, taken apart."""
    named = name_of(item)
    if named is not None:
        return _parse_name(item, named)
    bare = BARE.fullmatch(item)
    if bare is not None:
        return Target(item=item, repository=bare[1], revision=_revision(bare[2]), words=_words(bare[3]))
    url = URL.fullmatch(item.removeprefix(PREFIX)) if item.startswith(PREFIX) else None
    if url is None:
        raise UsageError(
            f"input {item} cannot be read; expected hf://datasets/owner/name, hf://datasets/owner/name/path or "
            "hf://datasets/owner/name:config:split, each with @revision behind the name if needed"
        )
    path = (url[3] or "").strip("/")
    return Target(item=item, repository=url[1], revision=_revision(url[2]), path=path, words=_words(url[4]))


def _parse_name(item: str, named: NamedDataset) -> Target:
    """What a name stands for; a split behind it is one of its own configuration."""
    found = NAME.fullmatch(item)
    assert found is not None
    words = _words(found[3])
    if named.config is not None and (not words or words in (("train",), ("validation",), ("test",))):
        words = (named.config, *words)
    return Target(
        item=item,
        repository=named.repository,
        revision=_revision(found[2]),
        words=words,
        text_key=named.text_key,
    )


def _revision(written: str | None) -> str:
    return CONVERTED if written == "~parquet" else unquote(written or MAIN)


def _words(written: str | None) -> tuple[str, ...]:
    return tuple((written or "").split(":")[1:])
