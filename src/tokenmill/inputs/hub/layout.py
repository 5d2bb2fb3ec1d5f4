"""Which files of a repository are a data set: by its card, else by how files and folders are called.

Both are read as the `datasets` library reads them, so that the same words give the same documents: the card's `configs`
name patterns for each split; without them, `data/train-00000-of-00004.parquet`, then folders, then files with the
name of a split in theirs, and if there are none, everything is the train split. Only then is it asked which kind of
file the documents of a split are in. Nothing here asks the network.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from tokenmill.errors import UsageError
from tokenmill.inputs.hub.kinds import is_data, sort_out
from tokenmill.inputs.hub.patterns import fixed_folder, is_hidden, match

__all__ = ["Configuration", "Offer", "Selection", "by_names", "configurations", "converted", "described"]

KEYWORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}
IGNORED = {"README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dummy_data.zip", "dataset_dict.json"}
"""No data, unless a pattern ends in just this name."""
NOTES = re.compile(r"(?:readme|license|requirements|notice)\b.*\.txt", re.IGNORECASE)
"""Texts about a data set. The library takes them for documents where there are many; a card's patterns may do so."""
SHARDED = re.compile(r"data/([\w.]+(?:-[\w.]+)*?)-\d{5}-of-\d{5}[^/]*")
SEPARATORS = re.compile(r"[-._ 0-9]+")
DEFAULT = "default"
PARTIAL = "partial-"

Files = Callable[[str], Iterable[str]]
"""The files below a folder of a repository; its top is empty."""
Splits = dict[str, list[str]]
"""The data files of each split, of all kinds."""


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that a card describes."""

    name: str
    is_default: bool = False
    folder: str = ""
    """Where files are looked for."""
    patterns: dict[str, list[str]] | None = None
    """By split; None: names tell."""


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one split of one configuration."""

    paths: list[str]
    config: str | None
    """None: the data set has no configurations."""
    split: str
    num_others: int = 0
    """Data files of the split that are of other kinds, and are left out."""
    not_read: str | None = None
    """The ending of its files, if it is one that cannot be read."""


def configurations(card: Mapping[str, Any]) -> list[Configuration]:
    """The configurations of a card; none where it has none, or says something that nobody can read."""
    found = []
    listed = card.get("configs")
    for entry in listed if isinstance(listed, list) else ():
        # YAML takes `2023` for a number.
        if isinstance(entry, dict) and isinstance(entry.get("config_name"), (str, int, float)):
            found.append(
                Configuration(
                    name=str(entry["config_name"]),
                    is_default=bool(entry.get("default")),
                    folder=_tidy(str(entry.get("data_dir") or "")),
                    patterns=_patterns(entry.get("data_files")),
                )
            )
    return found


def _patterns(described: Any) -> dict[str, list[str]] | None:
    """`data_files` in each of the forms that cards have it in."""
    if described is None:
        return None
    if isinstance(described, dict):
        return {str(split): _as_list(paths) for split, paths in described.items()}
    entries = described if isinstance(described, list) else [described]
    patterns: dict[str, list[str]] = {}
    for entry in entries:
        if isinstance(entry, dict):
            patterns.setdefault(str(entry.get("split", "train")), []).extend(_as_list(entry.get("path")))
        else:
            patterns.setdefault("train", []).append(str(entry))
    return patterns


def _as_list(paths: Any) -> list[str]:
    return [str(path) for path in (paths if isinstance(paths, list) else [paths]) if path is not None]


def _tidy(path: str) -> str:
    """`./en/` is the folder `en`."""
    tidy = posixpath.normpath(path.strip("/"))
    return "" if tidy == "." else tidy


class Offer(msgspec.Struct, frozen=True):
    """What a data set has: its configurations, each with a way to find its splits."""

    name: str
    configs: dict[str, Callable[[], Splits]]
    default: str | None
    """The configuration that need not be named."""
    has_configs: bool = True
    """Whether somebody has described them, so that they are worth telling."""

    def choose(self, words: Sequence[str]) -> Selection | None:
        """The split that is meant by a configuration and a split, one of them, or none; None where there are no files.

        A single word that is no configuration is a split of the default one.
        """
        config, split = self._divide(words)
        splits = self.configs[config]()
        if not splits:
            return None
        # A part is never taken unasked.
        whole = [name for name in splits if not name.startswith(PARTIAL)]
        chosen = split or (whole[0] if len(whole) == 1 else "train")
        if chosen not in splits:
            raise UsageError(self._explain_no_split(config, split, splits, is_alone=len(words) == 1))
        files = sort_out(splits[chosen])
        assert files is not None, "splits are of data files"
        return Selection(
            paths=files.paths,
            config=config if self.has_configs else None,
            split=chosen,
            num_others=files.num_others,
            not_read=files.not_read,
        )

    def _divide(self, words: Sequence[str]) -> tuple[str, str | None]:
        """Which configuration is meant, and the word that is left for a split."""
        if words and words[0] in self.configs:
            return words[0], words[1] if len(words) > 1 else None
        listed = f"there is {_list(self.configs)}" if self.has_configs else "its card names none"
        if len(words) > 1 or (words and self.default is None and words[0] not in KEYWORDS):
            raise UsageError(f"{self.name} has no configuration {words[0]!r}; {listed}")
        if self.default is None:
            raise UsageError(
                f"{self.name} has several configurations, and none is the default; write {self.name}:NAME, {listed}"
            )
        return self.default, words[0] if words else None

    def _explain_no_split(self, config: str, split: str | None, splits: Splits, *, is_alone: bool) -> str:
        """What to say; a word that stands alone may have been meant for a configuration."""
        part = f"{PARTIAL}{split or 'train'}"
        if part in splits:
            return (
                f"input {self.name}: the Hub has converted a part of {self.name} only; to take that part, write "
                f"{self.name}:{config}:{part}"
            )
        where = f"{self.name}:{config}" if self.has_configs else self.name
        if split is None:
            return f"{where} has no train split; there is {_list(splits)}"
        if is_alone and len(self.configs) > 1:
            return (
                f"{self.name} has no configuration {split!r}; there is {_list(self.configs)}; and the default one, "
                f"{config}, has no such split; there is {_list(splits)}"
            )
        return f"{where} has no split {split!r}; there is {_list(splits)}"


def described(name: str, card: Mapping[str, Any], files: Files) -> Offer:
    """What a data set has by its own description."""
    known = {config.name: config for config in configurations(card)}
    if not known:
        return Offer(name, {DEFAULT: partial(by_names, files)}, DEFAULT, has_configs=False)
    default = next((config.name for config in known.values() if config.is_default), _default_of(known))
    return Offer(name, {key: partial(_find_splits, name, config, files) for key, config in known.items()}, default)


def converted(name: str, files: Iterable[str]) -> Offer:
    """What the Hub has made of a data set: a folder for each configuration, and in it one for each split."""
    configs: dict[str, Splits] = {}
    for path in files:
        folders = path.split("/")
        if len(folders) > 2 and is_data(path):
            configs.setdefault(folders[0], {}).setdefault(folders[1], []).append(path)
    return Offer(name, {key: partial(dict, splits) for key, splits in configs.items()}, _default_of(configs))


def _default_of(configs: Iterable[str]) -> str | None:
    """`default`, or the only one there is."""
    names = list(configs)
    return DEFAULT if DEFAULT in names else names[0] if len(names) == 1 else None


def _find_splits(name: str, config: Configuration, files: Files) -> Splits:
    """The data files of each split of a configuration."""
    if config.patterns is None:
        return by_names(files, config.folder)
    splits = {}
    for split, patterns in config.patterns.items():
        found: dict[str, None] = {}
        for written in patterns:
            pattern = _tidy(f"{config.folder}/{_inside(name, written)}")
            ignored = IGNORED - {posixpath.basename(pattern)}
            paths = match(pattern, files(fixed_folder(pattern)))
            found |= dict.fromkeys(path for path in paths if posixpath.basename(path) not in ignored and is_data(path))
        if found:
            splits[split] = list(found)
    return splits


def _inside(name: str, pattern: str) -> str:
    """A pattern of a card, which may be written as a URL of its own repository."""
    pattern = pattern.removeprefix(f"hf://datasets/{name}/")
    if "://" in pattern:
        raise UsageError(f"{name} takes its files from {pattern}, which is elsewhere; name them yourself")
    return pattern


def by_names(files: Files, folder: str = "") -> Splits:
    """The data files of each split, where only names tell: of files in `data`, of folders, of files."""
    skip = len(folder) + 1 if folder else 0
    paths = {path[skip:]: path for path in sorted(files(folder)) if _may_be_data(path[skip:])}
    for find in (_sharded_split, _folder_splits, _file_splits):
        splits: Splits = {}
        for short, path in paths.items():
            for split in find(short):
                splits.setdefault(split, []).append(path)
        if splits:
            return {split: splits[split] for split in sorted(splits, key=_split_order)}
    return {"train": list(paths.values())} if paths else {}


def _may_be_data(path: str) -> bool:
    name = posixpath.basename(path)
    return is_data(path) and not is_hidden(path) and name not in IGNORED and not NOTES.fullmatch(name)


def _split_order(split: str) -> tuple[bool, int, str]:
    usual = list(KEYWORDS)
    return split not in usual, usual.index(split) if split in usual else 0, split


def _sharded_split(path: str) -> list[str]:
    found = SHARDED.fullmatch(path)
    return [found[1]] if found else []


def _folder_splits(path: str) -> list[str]:
    words = {word for part in path.split("/")[:-1] for word in SEPARATORS.split(part)}
    return [split for split, keywords in KEYWORDS.items() if keywords & words]


def _file_splits(path: str) -> list[str]:
    words = set(SEPARATORS.split(path.split("/")[-1])[:-1])
    return [split for split, keywords in KEYWORDS.items() if keywords & words]


def _list(names: Iterable[str], most: int = 12) -> str:
    listed = list(names)
    more = [f"{len(listed) - most} more"] if len(listed) > most else []
    shown = listed[:most] + more
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
