"""How data sets of the Hub are written, and the names that need no more than a word.

    hf://datasets/owner/name                     the data set: its default configuration, the train split
    hf://datasets/owner/name/folder/*.parquet    files of it: a path, a folder or a glob
    hf://datasets/owner/name@revision/...        as it was at a commit, a tag or on a branch
    owner/name:config:split                      a configuration and a split; one of them may be left out
    tinystories                                  a name from the table below, with the same endings

Colons stand in neither names nor configurations of the Hub, so an ending cannot be taken for a part of these.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from urllib.parse import unquote

import msgspec

from tokenmill.errors import UsageError

__all__ = ["CONVERTED", "DATASETS", "NamedDataset", "Target", "could_be_on_hub", "name_of", "parse", "suggest"]

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
    revision: str = "main"
    path: str = ""
    """A file, folder or glob; empty: what the data set itself says."""
    words: tuple[str, ...] = ()
    """What came after colons: a configuration, a split, or both."""
    text_key: str | None = None

    @property
    def is_bare(self) -> bool:
        """Whether it was written like a path of this machine, and might have been meant as one."""
        return "://" not in self.item and self.item.partition(":")[0].lower() not in DATASETS


SEGMENT = r"[A-Za-z0-9][\w.-]*"
REVISION = r"refs/convert/[\w.-]+|refs/pr/\d+|~parquet|[^/:@]+"
WORDS = r"(?::[^/:]+){0,2}"
URL = re.compile(rf"({SEGMENT}/{SEGMENT})(?:@({REVISION}))?(?:/([^:]*))?({WORDS})")
BARE = re.compile(rf"({SEGMENT}/{SEGMENT})(?:@({REVISION}))?({WORDS})")
FILE = re.compile(r"\.(jsonl?|ndjson|parquet|te?xt|csv|tsv|md|arrow|bin|tar|gz|zst|zip|bz2|xz)$", re.IGNORECASE)


def could_be_on_hub(item: str) -> bool:
    """Whether something that is not on this machine can be a data set: a known name, or `owner/name`.

    What looks like a data file is none, and neither is a path in a folder that is here: a slip of the pen should not
    be looked up on the network.
    """
    if item.partition(":")[0].lower() in DATASETS:
        return True
    return BARE.fullmatch(item) is not None and not FILE.search(item) and not Path(item).parent.is_dir()


def name_of(item: str) -> NamedDataset | None:
    """The data set of a name, if it is one."""
    return DATASETS.get(item.lower())


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
    word, *endings = item.split(":")
    named = name_of(word)
    if named is not None:
        config = [named.config] if named.config and (not endings or _is_split(endings)) else []
        words = tuple(config + endings)
        return Target(item=item, repository=named.repository, words=words, text_key=named.text_key)
    found = URL.fullmatch(item.removeprefix(PREFIX)) if item.startswith(PREFIX) else None
    if found is None and not item.startswith("hf://"):
        bare = BARE.fullmatch(item)
        if bare is not None:
            return _target(item, bare[1], bare[2], "", bare[3])
    if found is None or (found[3] and found[4]):
        raise UsageError(
            f"input {item} cannot be read; expected hf://datasets/owner/name, hf://datasets/owner/name/path or "
            "hf://datasets/owner/name:config:split, each with @revision behind the name if needed"
        )
    return _target(item, found[1], found[2], (found[3] or "").strip("/"), found[4])


def _target(item: str, repository: str, revision: str | None, path: str, words: str) -> Target:
    revision = unquote(revision or "main")
    return Target(
        item=item,
        repository=repository,
        revision=CONVERTED if revision == "~parquet" else revision,
        path=path,
        words=tuple(words.split(":")[1:]),
    )


def _is_split(endings: list[str]) -> bool:
    """Whether what follows a name is a split of the configuration that it stands for."""
    return len(endings) == 1 and endings[0] in ("train", "validation", "test")
