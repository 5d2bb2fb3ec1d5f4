"""Which files of a repository are a data set: by its card, else by how files and folders are called.

Both are read as the `datasets` library reads them, so that the same words give the same documents: the card's `configs`
name patterns for each split; without them, `data/train-00000-of-00004.parquet`, then folders, then files with the
name of a split in theirs, and if there are none, everything is the train split. Nothing here asks the network.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from tokenmill.errors import UsageError

__all__ = [
    "Configuration",
    "Selection",
    "by_names",
    "choose_config",
    "choose_split",
    "configurations",
    "fixed_folder",
    "has_magic",
    "match",
    "readable",
    "select",
]

KEYWORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}
KINDS = ("text", "json", "jsonl", "parquet")
"""What can be read, the preferred last where a repository has as many files of each."""
DATA_FILE = re.compile(r"\.(?:(parquet)|(jsonl|ndjson)(?:\.gz|\.zst)?|(json)(?:\.gz|\.zst)?|(te?xt)(?:\.gz|\.zst)?)$")
NO_DATA = re.compile(
    r"(?:config|dataset_infos?|dataset_dict|state)\.json|(?:readme|license|requirements|notice)\b.*", re.IGNORECASE
)
SHARDED = re.compile(r"data/([\w.]+(?:-[\w.]+)*?)-\d{5}-of-\d{5}[^/]*")
SEPARATORS = re.compile(r"[-._ 0-9]+")

Files = Callable[[str], Iterable[str]]
"""The files below a folder of a repository; its top is empty."""


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that a card describes."""

    name: str
    is_default: bool = False
    folder: str = ""
    """Where files are looked for if there are no patterns."""
    patterns: dict[str, list[str]] | None = None
    """By split."""


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one split of one configuration."""

    paths: list[str]
    config: str | None
    split: str


def configurations(card: Mapping[str, Any]) -> list[Configuration]:
    """The configurations of a card; none where it has none, or says something that nobody can read."""
    found = []
    listed = card.get("configs")
    for entry in listed if isinstance(listed, list) else ():
        if not isinstance(entry, dict) or not isinstance(entry.get("config_name"), str):
            continue
        found.append(
            Configuration(
                name=entry["config_name"],
                is_default=entry.get("default") is True,
                folder=str(entry.get("data_dir") or "").strip("/"),
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


def select(name: str, card: Mapping[str, Any], files: Files, words: Sequence[str]) -> Selection | None:
    """The files that a data set's own description gives for a configuration and a split.

    None: there is no file that can be read, and the Hub's conversion may have one.
    """
    known = {config.name: config for config in configurations(card)}
    default = next((config.name for config in known.values() if config.is_default), "default")
    chosen, split = choose_config(name, list(known), words, default)
    splits = _find_splits(name, known.get(chosen or ""), files)
    return choose_split(name, splits, chosen, split) if splits else None


def choose_config(
    name: str, known: Sequence[str], words: Sequence[str], default: str = "default"
) -> tuple[str | None, str | None]:
    """The configuration, and the word that is left for a split; the only configuration need not be named."""
    listed = f"there is {_list(known)}" if known else "its card names none"
    if words and words[0] in known:
        return words[0], words[1] if len(words) > 1 else None
    if len(words) > 1 and (known or words[0] != default):
        raise UsageError(f"{name} has no configuration {words[0]!r}; {listed}")
    split = words[-1] if words else None
    if not known:
        return None, split
    chosen = default if default in known else known[0] if len(known) == 1 else None
    if split is not None and split not in KEYWORDS and len(known) > 1:
        raise UsageError(f"{name} has no configuration {split!r}; {listed}")
    if chosen is None:
        raise UsageError(f"{name} has several configurations, and none is the default; write {name}:NAME, {listed}")
    return chosen, split


def _find_splits(name: str, config: Configuration | None, files: Files) -> dict[str, list[str]]:
    """The files of each split of a configuration, or of a data set whose card has none."""
    if config is None or config.patterns is None:
        return by_names(files, config.folder if config is not None else "")
    splits = {}
    for split, patterns in config.patterns.items():
        found: dict[str, None] = {}
        for pattern in patterns:
            if "://" in pattern:
                raise UsageError(f"{name} takes its files from {pattern}, which is elsewhere; name them yourself")
            pattern = "/".join(part for part in (config.folder, pattern.removeprefix("./").strip("/")) if part)
            folder = fixed_folder(pattern)
            found |= dict.fromkeys(match(pattern, files(folder)))
        paths = readable(found)
        if paths:
            splits[split] = paths
    return splits


def by_names(files: Files, folder: str = "") -> dict[str, list[str]]:
    """The files of each split, where only names tell: of files in `data`, of folders, of files."""
    skip = len(folder) + 1 if folder else 0
    paths = {path[skip:]: path for path in readable(files(folder))}
    for find in (_sharded_split, _folder_splits, _file_splits):
        splits: dict[str, list[str]] = {}
        for short, path in paths.items():
            for split in find(short):
                splits.setdefault(split, []).append(path)
        if splits:
            return {split: splits[split] for split in sorted(splits, key=_split_order)}
    return {"train": list(paths.values())} if paths else {}


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


def choose_split(name: str, splits: Mapping[str, list[str]], config: str | None, split: str | None) -> Selection:
    """One split: the one that was named, else train, else the only one there is."""
    if split is None:
        split = "train" if "train" in splits else next(iter(splits)) if len(splits) == 1 else None
    if split is None or split not in splits:
        where = f"{name}:{config}" if config is not None else name
        missing = "no train split" if split is None else f"no split {split!r}"
        raise UsageError(f"{where} has {missing}; there is {_list(splits)}")
    return Selection(paths=splits[split], config=config, split=split)


def readable(paths: Iterable[str]) -> list[str]:
    """The files that hold documents, of the kind that most of them are, sorted."""
    kinds = {path: kind for path in paths if (kind := _kind(path))}
    if not kinds:
        return []
    counts = Counter(kinds.values())
    most = max(counts, key=lambda kind: (counts[kind], KINDS.index(kind)))
    return sorted(path for path, kind in kinds.items() if kind == most)


def _kind(path: str) -> str | None:
    """What a data file holds by its name; None for what is no data, hidden, or of a kind that is not read."""
    *folders, file = path.split("/")
    if any(part.startswith(".") for part in (*folders, file)) or any(part.startswith("__") for part in folders):
        return None
    found = DATA_FILE.search(file.lower())
    if found is None or NO_DATA.fullmatch(file):
        return None
    return ("parquet", "jsonl", "json", "text")[(found.lastindex or 1) - 1]


def has_magic(path: str) -> bool:
    """Whether a path is a pattern."""
    return any(character in path for character in "*?[")


def fixed_folder(pattern: str) -> str:
    """The folder that a pattern does not leave, so that no more than this has to be listed."""
    fixed = []
    for part in pattern.split("/")[:-1]:
        if has_magic(part):
            break
        fixed.append(part)
    return "/".join(fixed)


def match(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that a pattern means: `*` within one name, `**` for any folders, a folder for all that is in it."""
    parts = pattern.split("/")
    return [path for path in paths if _matches(path.split("/"), parts) or path.startswith(f"{pattern}/")]


def _matches(names: Sequence[str], parts: Sequence[str]) -> bool:
    if not parts or not names:
        return not names and all(part == "**" for part in parts)
    if parts[0] == "**":
        # What is hidden has to be asked for by its dot.
        is_shown = not names[0].startswith(".")
        if len(parts) == 1:
            return is_shown and (len(names) == 1 or _matches(names[1:], parts))
        return _matches(names, parts[1:]) or (is_shown and _matches(names[1:], parts))
    if names[0].startswith(".") and not parts[0].startswith("."):
        return False
    return fnmatchcase(names[0], parts[0]) and _matches(names[1:], parts[1:])


def _list(names: Sequence[str] | Mapping[str, Any], most: int = 12) -> str:
    listed = list(names)
    more = [f"{len(listed) - most} more"] if len(listed) > most else []
    shown = listed[:most] + more
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
