"""Which files of a repository are a data set: the `datasets` library answers.

It reads the card's `configs`, else the names of folders and files, so that the same words give the same documents as
`load_dataset`. Only its functions for patterns and formats are called: a builder would open archives, create a cache of
its own and list the first configuration for every other one. Nothing is downloaded but the card; scripts never run.
"""

from __future__ import annotations

import glob
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.errors import UsageError
from tokenmill.inputs._glob import translate
from tokenmill.inputs._hub_client import File, HubUnreachable, Repository
from tokenmill.inputs._hub_names import CONVERTED
from tokenmill.inputs._peek import text_column_of_card

__all__ = ["Layout", "Selection"]

READ = {"parquet", "json", "text"}
"""The library's names for the formats that tokenmill reads."""
FORMATS = "Parquet, JSON lines, JSON or text"
ABOUT = {"harbor", "eval"}
"""Formats of the library whose files (`.md`, `.toml`, `.eval`) describe a data set more often than they are one."""
NOTICE = re.compile(r"(?:readme|license|requirements|notice)\b.*\.txt", re.IGNORECASE)
"""Texts about a data set, which the library takes for documents if the card does not name the files."""
PACKED = {"zip", "tar", "bz2", "xz", "lz4", "7z", "rar"}
NUMBERED = re.compile(r"(.*[-.])(\d{5})-of-(\d{5})(.*)")
DEFAULT = "default"
PARTIAL = "partial-"
MOST_LISTED = 12


class Selection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The files that a user means, by their paths in the repository."""

    files: dict[str, File] = {}
    obstacle: str | None = None
    """Why tokenmill cannot read them, as the end of a sentence about the repository."""
    config: str | None = None
    split: str | None = None
    is_named: bool = False
    """Whether the user named exactly this file."""
    notes: tuple[str, ...] = ()
    text_key: str | None = None
    """The text column by the card."""


class Layout:
    """A repository as the library sees it: on the Hub, or in a folder of the cache."""

    def __init__(self, repository: Repository) -> None:
        from datasets.packaged_modules import _EXTENSION_TO_MODULE
        from fsspec.core import url_to_fs

        self._repository = repository
        self._base = str(repository.cache) if repository.is_snapshot else repository.origin
        self._pattern_base = glob.escape(self._base)
        self._system, self._root = url_to_fs(self._base)
        self._formats = {ending: name for ending, (name, _) in _EXTENSION_TO_MODULE.items() if name not in ABOUT}
        self._endings = [case(ending) for ending in (*self._formats, ".zip") for case in (str.lower, str.upper)]

    def select_path(self, path: str) -> Selection:
        """Select a file, the data files of a folder in all its splits, or the files that a glob matches."""
        item, name = self._repository.target.item, self._repository.id
        # A name may contain the characters of a glob, so the file of that name comes first.
        if self._is_file(path):
            return Selection(files=self._describe([path], glob.escape(path)), is_named=True)
        if glob.has_magic(path):
            paths = self._match(path, is_data=False)
            if not paths:
                raise UsageError(f"input {item}: no file of {name} matches {path}")
            return Selection(files=self._describe(paths, path))
        paths, ending, notes = self._choose_format(self._match(f"{glob.escape(path)}/**"))
        if not paths:
            hint = f"; a split is written after the name, {name}:SPLIT" if ":" in path else ""
            raise UsageError(f"input {item}: nothing at {path} of {name} is {FORMATS}{hint}")
        if ending is not None:
            where = f"the data at {path} of {name} is in .{ending} files"
            raise UsageError(f"input {item}: {where}, which are not read; expected {FORMATS}")
        with suppress(ValueError):
            splits = list(self._patterns({"data_dir": path}))
            if len(splits) > 1:
                notes = (f"{item} has files of {', '.join(splits)}; all of them are read", *notes)
        return Selection(files=self._describe(paths), notes=notes)

    def select_split(self, words: Sequence[str]) -> Selection:
        """Select the files of a configuration and a split, of one of them, or of the defaults."""
        item, name = self._repository.target.item, self._repository.id
        card = self._converted_card() if self._repository.target.revision == CONVERTED else self._card()
        try:
            # YAML reads the name `2023` as a number.
            configs = {str(config["config_name"]): config for config in card.get("configs") or []}
            script = f"{name.partition('/')[2]}.py"
            if not configs and self._is_file(script):
                return Selection(obstacle=f"is a loading script, {script}, which is not run")
            config, split = _divide(name, configs, words)
            chosen = configs.get(config, {})
            splits = self._patterns(chosen)
        except (KeyError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(
                f"input {item}: the datasets library cannot read the layout of {name} ({reason}); name files of it"
            ) from None
        if not splits:
            return Selection(obstacle=f"has no {FORMATS}")
        split = _choose_split(name, configs, config, split, splits, is_alone=len(words) == 1)
        paths = sorted({path for pattern in splits[split] for path in self._match(pattern)})
        if chosen.get("data_files") is None:
            paths = [path for path in paths if not NOTICE.fullmatch(posixpath.basename(path))]
        paths, ending, notes = self._choose_format(paths)
        if not paths:
            return Selection(obstacle=f"has no {FORMATS}")
        if ending is not None:
            return Selection(obstacle=f"is in .{ending} files, which are not read")
        return Selection(
            files=self._describe(paths),
            config=config if configs else None,
            split=split,
            notes=notes,
            text_key=text_column_of_card(card, config),
        )

    def _card(self) -> dict[str, Any]:
        """The metadata of README.md, overridden by that of `.huggingface.yaml`; empty if neither is valid."""
        import yaml
        from huggingface_hub import metadata_load

        card: dict[str, Any] = {}
        for name, load in (("README.md", metadata_load), (".huggingface.yaml", _load_yaml)):
            path = self._find_text(name)
            with suppress(yaml.YAMLError, ValueError):
                card |= (load(path) or {}) if path is not None else {}
        return card

    def _find_text(self, name: str) -> Path | None:
        """Where a small file is in the cache; it is fetched if necessary."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        path = self._repository.cache / name
        if not path.is_file():
            if self._repository.is_snapshot:
                return None
            try:
                hf_hub_download(self._repository.id, name, repo_type="dataset", revision=self._repository.commit)
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                return None
        return path

    def _converted_card(self) -> dict[str, Any]:
        """A card for the Hub's own conversion: a folder for each configuration, and in it one for each split.

        The library would ask the dataset viewer, which other endpoints than huggingface.co do not have.
        """
        configs: dict[str, dict[str, list[str]]] = {}
        for path in self._match("*/*/*.parquet"):
            config, split, _ = path.split("/")
            configs.setdefault(config, {})[split] = [f"{glob.escape(f'{config}/{split}')}/*.parquet"]
        if not configs:
            item, name = self._repository.target.item, self._repository.id
            raise UsageError(f"input {item}: the branch {CONVERTED} of {name} is empty")
        return {"configs": [{"config_name": name, "data_files": splits} for name, splits in configs.items()]}

    def _patterns(self, config: Mapping[str, Any]) -> dict[str, list[str]]:
        """The patterns of each split of a configuration; without `data_files`, those that names of files match."""
        from datasets.data_files import EmptyDatasetError, get_data_patterns, sanitize_patterns

        folder = posixpath.normpath(config.get("data_dir") or "")
        if config.get("data_files") is not None:
            found = sanitize_patterns(config["data_files"])
        else:
            try:
                found = get_data_patterns(f"{self._pattern_base}/{glob.escape(folder)}".removesuffix("/."))
            except EmptyDatasetError:
                found = {}
        return {str(split): [self._inside(folder, pattern) for pattern in found[split]] for split in found}

    def _inside(self, folder: str, pattern: str) -> str:
        """A pattern relative to the repository; a card may write it as a URL of its own repository."""
        name = self._repository.id
        pattern = str(pattern).removeprefix(f"hf://datasets/{name}/")
        if "://" in pattern:
            raise UsageError(f"{name} takes its files from {pattern}, which is elsewhere; name them yourself")
        return posixpath.normpath(f"{folder}/{pattern}")

    def _is_file(self, path: str) -> bool:
        """Whether there is such a file; the library's `isfile` and `exists` say no if the network fails."""
        try:
            return bool(self._system.info(f"{self._root}/{path}")["type"] != "directory")
        except FileNotFoundError:
            return False

    def _match(self, pattern: str, *, is_data: bool = True) -> list[str]:
        """The files that a pattern matches; of all formats, or those with the ending of a data file."""
        from datasets.data_files import resolve_pattern

        if not glob.has_magic(pattern) and not self._is_file(pattern):
            return []
        try:
            found = resolve_pattern(pattern, self._pattern_base, self._endings if is_data else None)
        except FileNotFoundError:
            return []
        return sorted(path.removeprefix(f"{self._base}/") for path in found)

    def _choose_format(self, paths: Sequence[str]) -> tuple[list[str], str | None, tuple[str, ...]]:
        """The files of the most frequent format, the ending that makes them unreadable if there is one, and notes."""
        from datasets.load import infer_module_for_data_files_list

        # The library would open archives to see what is in them, so leave them out.
        name, _ = infer_module_for_data_files_list([path for path in paths if "zip" not in _endings(path)])
        same = {ending[1:] for ending, other in self._formats.items() if other == name} | {"zip"}
        chosen = [path for path in paths if same.intersection(_endings(path))]
        num_others = len(paths) - len(chosen)
        files = "1 data file is" if num_others == 1 else f"{num_others:,} data files are"
        notes = (f"           {files} of another format than most, and not read",) if num_others else ()
        for path in chosen:
            last = _endings(path)[-1]
            if name not in READ:
                return chosen, next(ending for ending in _endings(path) if ending in same), notes
            if last in PACKED or (name == "parquet" and last in ("gz", "zst")):
                return chosen, last, notes
        return chosen, None, notes

    def _describe(self, paths: Sequence[str], pattern: str = "**") -> dict[str, File]:
        """The sizes and contents of the files that `pattern` matched, from the listing that the match has made."""
        if self._repository.is_snapshot:
            self._check_numbers(paths, pattern)
        if len(paths) == 1:
            entries = [self._system.info(f"{self._root}/{paths[0]}")]
        else:
            folders = {posixpath.dirname(f"{self._root}/{path}") for path in paths}
            entries = [entry for folder in folders for entry in self._system.ls(folder, detail=True)]
        by_path = {entry["name"].removeprefix(f"{self._root}/"): entry for entry in entries}
        return {path: _to_file(by_path[path]) for path in paths}

    def _check_numbers(self, paths: Iterable[str], pattern: str) -> None:
        """Refuse a part of files whose names say how many there are: `train-00000-of-00004.parquet`."""
        here: dict[tuple[str, int], tuple[str, set[int]]] = {}
        for path in paths:
            if (name := NUMBERED.fullmatch(path)) is not None:
                here.setdefault((name[1], int(name[3])), (name[4], set()))[1].add(int(name[2]))
        for (head, total), (tail, numbers) in here.items():
            others = (f"{head}{number:05d}-of-{total:05d}{tail}" for number in range(total) if number not in numbers)
            missing = next(filter(translate(pattern).fullmatch, others), None)
            if missing is not None:
                raise HubUnreachable(
                    f"input {self._repository.target.item}: the cache does not have {missing} of "
                    f"{self._repository.id}, one of {total} such files, and the Hub cannot be asked; run once with a "
                    "network"
                )


def _load_yaml(path: Path) -> dict[str, Any]:
    import yaml

    loaded = yaml.safe_load(path.read_text("utf-8"))
    return loaded if isinstance(loaded, dict) else {}


def _endings(path: str) -> list[str]:
    return posixpath.basename(path).lower().split(".")[1:]


def _to_file(entry: Mapping[str, Any]) -> File:
    """A file of a listing; the cache knows large files by another hash than small ones."""
    large = entry.get("lfs")
    return File(entry["size"], large["sha256"] if large else entry.get("blob_id", ""))


def _divide(name: str, configs: Mapping[str, Any], words: Sequence[str]) -> tuple[str, str | None]:
    """Which configuration the words mean, and the word that is left for a split.

    A single word that is no configuration is a split of the default one.
    """
    from datasets.utils.metadata import MetadataConfigs

    if words and (words[0] in configs or (not configs and words[0] == DEFAULT)):
        return words[0], words[1] if len(words) > 1 else None
    default = MetadataConfigs(configs).get_default_config_name() if configs else DEFAULT
    listed = f"there is {_list(configs)}" if configs else "its card names none"
    if len(words) > 1 or (words and default is None and words[0] not in ("train", "validation", "test")):
        raise UsageError(f"{name} has no configuration {words[0]!r}; {listed}")
    if default is None:
        raise UsageError(f"{name} has several configurations, and none is the default; write {name}:NAME, {listed}")
    return default, words[0] if words else None


def _choose_split(
    name: str, configs: Mapping[str, Any], config: str, split: str | None, splits: Mapping[str, Any], *, is_alone: bool
) -> str:
    """The split that was asked for, else the only one, else `train`; a partial split only if the user names it."""
    whole = [one for one in splits if not one.startswith(PARTIAL)]
    chosen = split or (whole[0] if len(whole) == 1 else "train")
    if chosen in splits:
        return chosen
    if f"{PARTIAL}{chosen}" in splits:
        part = f"{name}:{config}:{PARTIAL}{chosen}"
        raise UsageError(f"input {name}: the Hub has converted only a part of {name}; to read that part, write {part}")
    where, there = (f"{name}:{config}" if configs else name), f"there is {_list(splits)}"
    if split is None:
        raise UsageError(f"{where} has no train split; {there}")
    if is_alone and len(configs) > 1:
        raise UsageError(
            f"{name} has no configuration {split!r}; there is {_list(configs)}; and the default one, {config}, has no "
            f"such split; {there}"
        )
    raise UsageError(f"{where} has no split {split!r}; {there}")


def _list(names: Iterable[str]) -> str:
    listed = list(names)
    more = [f"{len(listed) - MOST_LISTED} more"] if len(listed) > MOST_LISTED else []
    shown = listed[:MOST_LISTED] + more
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
