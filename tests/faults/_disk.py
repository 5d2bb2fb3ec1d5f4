"""A disk in memory that replays a log of file operations and knows what a power cut may leave of them.

Only what was synced is certain. The data of a file is certain after a sync of the file, a change of names (a create,
rename, link, unlink, mkdir or rmdir) after a sync of its directory. Of the rest, any part may survive, in any order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath

Tree = dict[str, bytes | None]
"""Relative paths and contents; None for a directory."""


@dataclass(frozen=True)
class Operation:
    """One line of the log that `shim.c` writes."""

    kind: str
    path: PurePath
    other: PurePath
    inode: int
    offset: int
    data: bytes

    @classmethod
    def from_line(cls, line: str, root: Path) -> Operation:
        kind, path, other, inode, offset, data = line.split("\t")
        inside = [
            PurePath(name).relative_to(root) if name.startswith(f"{root}") else PurePath() for name in (path, other)
        ]
        return cls(kind, inside[0], inside[1], int(inode), int(offset), bytes.fromhex(data))


def read_log(path: Path, root: Path) -> list[Operation]:
    """Read what a run did below `root`."""
    return [Operation.from_line(line, root) for line in path.read_text().splitlines()]


@dataclass(eq=False)
class _File:
    """The synced content of a file, and the writes since the last sync; data of None truncates at the offset."""

    synced: bytes = b""
    writes: list[tuple[int, bytes | None]] = field(default_factory=list)

    def content(self, loss: str, rng: random.Random) -> bytes:
        """Return the writes that survive; `loss` is one of `LOSSES`."""
        if not self.writes or loss == "all lost":
            return self.synced
        data = bytearray(self.synced)
        last = len(self.writes) - 1
        for number, (offset, piece) in enumerate(self.writes):
            if piece is None:
                del data[offset:]
                data += bytes(offset - len(data))
                continue
            data += bytes(max(0, offset + len(piece) - len(data)))
            kept = {
                "none lost": len(piece),
                "only zeros": 0,
                "last torn": len(piece) // 2 if number == last else len(piece),
                "only last": len(piece) if number == last else 0,
                "mixed": rng.choice((0, len(piece) // 2, len(piece))),
            }[loss]
            if loss == "last torn" and number == last:
                del data[offset + kept :]
            data[offset : offset + kept] = piece[:kept]
        return bytes(data)


LOSSES = ("all lost", "none lost", "only zeros", "last torn", "only last")


@dataclass(eq=False)
class _Directory:
    """The names that were synced, the names as the run sees them, and the changes in between."""

    synced: dict[str, _File | _Directory] = field(default_factory=dict)
    now: dict[str, _File | _Directory] = field(default_factory=dict)
    changes: list[_Change] = field(default_factory=list)


_Change = dict[str, "_File | _Directory | None"]
"""Names that one operation sets or removes, all of them or none: a rename sets one and removes the other."""


class Disk:
    """Replays operations one by one; `cuts` gives the trees that a power cut at this moment may leave."""

    def __init__(self, root: Path) -> None:
        self._files: dict[int, _File] = {}
        self._root = self._load(root)

    def _load(self, path: Path) -> _Directory:
        """Everything that exists before the run counts as synced."""
        found: dict[str, _File | _Directory] = {}
        for child in path.iterdir():
            if child.is_dir():
                found[child.name] = self._load(child)
            else:
                found[child.name] = self._files[child.stat().st_ino] = _File(child.read_bytes())
        return _Directory(dict(found), found)

    def apply(self, operation: Operation) -> None:
        """Perform one operation of the log."""
        name = operation.path.name
        if operation.kind in ("write", "truncate"):
            data = operation.data if operation.kind == "write" else None
            self._files[operation.inode].writes.append((operation.offset, data))
        elif operation.kind == "sync":
            self._sync(operation)
        elif operation.kind == "create":
            self._files[operation.inode] = _File()
            self._change(operation.path, {name: self._files[operation.inode]})
        elif operation.kind == "mkdir":
            self._change(operation.path, {name: _Directory()})
        elif operation.kind in ("unlink", "rmdir"):
            self._change(operation.path, {name: None})
        elif operation.kind in ("rename", "link"):
            assert operation.path.parent == operation.other.parent, operation
            node = self._find(operation.path.parent).now[name]
            removed: _Change = {name: None} if operation.kind == "rename" else {}
            self._change(operation.other, {**removed, operation.other.name: node})
        else:
            raise AssertionError(operation.kind)

    def _sync(self, operation: Operation) -> None:
        node: _File | _Directory = self._root
        for name in operation.path.parts:
            assert isinstance(node, _Directory)
            node = node.now[name]
        if isinstance(node, _Directory):
            node.synced, node.changes = dict(node.now), []
        else:
            node.synced, node.writes = node.content("none lost", random.Random()), []

    def _find(self, path: PurePath) -> _Directory:
        node: _File | _Directory = self._root
        for name in path.parts:
            assert isinstance(node, _Directory)
            node = node.now[name]
        assert isinstance(node, _Directory)
        return node

    def _change(self, path: PurePath, change: _Change) -> None:
        directory = self._find(path.parent)
        directory.changes.append(change)
        _make(change, directory.now)

    def cuts(self, rng: random.Random, num_mixed: int) -> Iterator[Tree]:
        """Yield the trees that may survive: the extremes, single changes of names lost or kept, random mixtures."""
        changes = [id(change) for change in self._pending(self._root)]
        for loss in LOSSES:
            yield self._tree(lambda _: True, loss, rng)
        yield self._tree(lambda _: False, "all lost", rng)
        for one in changes:
            yield self._tree(lambda change, one=one: id(change) != one, "all lost", rng)  # type: ignore[misc]
            yield self._tree(lambda change, one=one: id(change) == one, "all lost", rng)  # type: ignore[misc]
        for _ in range(num_mixed):
            kept = {one for one in changes if rng.random() < 0.5}
            yield self._tree(lambda change, kept=kept: id(change) in kept, "mixed", rng)  # type: ignore[misc]

    def _pending(self, directory: _Directory) -> Iterator[_Change]:
        yield from directory.changes
        for node in {id(node): node for node in (*directory.synced.values(), *directory.now.values())}.values():
            if isinstance(node, _Directory):
                yield from self._pending(node)

    def _tree(self, survives: Callable[[_Change], bool], loss: str, rng: random.Random) -> Tree:
        tree: Tree = {}

        def collect(directory: _Directory, above: str) -> None:
            names = dict(directory.synced)
            for change in directory.changes:
                if survives(change):
                    _make(change, names)
            for name, node in sorted(names.items()):
                if isinstance(node, _Directory):
                    tree[f"{above}{name}"] = None
                    collect(node, f"{above}{name}/")
                else:
                    tree[f"{above}{name}"] = node.content(loss, rng)

        collect(self._root, "")
        return tree


def _make(change: _Change, names: dict[str, _File | _Directory]) -> None:
    for name, node in change.items():
        names.pop(name, None)
        if node is not None:
            names[name] = node


def write_tree(tree: Tree, root: Path) -> None:
    """Put a tree on a real disk."""
    root.mkdir(parents=True)
    for name, data in tree.items():
        if data is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(data)
