"""A folder that is either complete or absent: written under a temporary name, synced, and renamed last.

Each destination has one temporary name, which is locked while an export writes there. So the next export removes what
a killed one left, and two exports at once cannot mix.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tokenmill.errors import UsageError
from tokenmill.file_lock import is_same_file, try_lock
from tokenmill.files import sync_directory

__all__ = ["RECEIPT", "check_destination", "new_folder", "sync_tree"]

RECEIPT = ".tokenmill.json"
"""The file in every export that says what it holds; only folders with this file are ever overwritten."""
MOST_SYNCS = 2000
"""With more files than this, sync the whole file system: syncing 185,000 small files one by one takes minutes."""


def check_destination(dest: Path, store: Path, folders: Iterable[Path], *, overwrite: bool) -> Path:
    """Return the absolute path of a destination that may be written; `folders` hold the files of the store."""
    place, inside = dest.resolve(), store.resolve()
    is_within = inside.is_dir() and (place == inside or inside in place.parents)
    if is_within or any(place == folder or place in folder.parents for folder in map(Path.resolve, folders)):
        raise UsageError(f"{dest} and the store {store} lie in each other; export to a folder beside it")
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return place
    if not (place / RECEIPT).is_file():
        raise UsageError(f"{dest} exists and was not made by tokenmill export; use another name, or remove it yourself")
    if not overwrite:
        raise UsageError(f"{dest} exists; use another name, or --overwrite")
    return place


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """Provide a folder to write into; on success it is renamed to `place` and replaces an older export there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name}.export.tmp")
    lock = _lock(temporary, place)
    try:
        _clear(temporary)
        yield temporary
        sync_tree(temporary)
        _replace(place, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _lock(temporary: Path, place: Path) -> int:
    temporary.mkdir(exist_ok=True)
    descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    has_lock = False
    with suppress(OSError):
        has_lock = try_lock(descriptor) and is_same_file(descriptor, temporary)
    if not has_lock:
        os.close(descriptor)
        raise UsageError(f"another export to {place} is running; wait for it, or use another name")
    return descriptor


def _clear(folder: Path) -> None:
    """Remove the files of an export that was killed."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _replace(place: Path, temporary: Path) -> None:
    old = place.with_name(f".{place.name}.export.old")
    shutil.rmtree(old, ignore_errors=True)
    if (place / RECEIPT).exists():
        place.rename(old)
    try:
        temporary.rename(place)
    except OSError as error:
        raise UsageError(f"the finished export cannot be renamed to {place}: {error.strerror}") from None
    sync_directory(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Make all files below a folder survive a power failure."""
    folders, files = [folder], list[Path]()
    for path in folder.rglob("*"):
        (folders if path.is_dir() else files).append(path)
    if len(files) > MOST_SYNCS and _sync_file_system(folder):
        return
    for path in [*files, *folders]:
        sync_directory(path)


def _sync_file_system(folder: Path) -> bool:
    """Sync the file system that holds a folder; False if the operating system has no such call."""
    syncfs = getattr(ctypes.CDLL(None), "syncfs", None)
    if syncfs is None:
        return False
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return int(syncfs(descriptor)) == 0
    finally:
        os.close(descriptor)
