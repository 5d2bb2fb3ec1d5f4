"""Stores with files made to harm the reader: opening, verifying and inspecting each ends at once, in one sentence.

Every case runs in a process of its own with a deadline and a limit on memory. A finding is a traceback, a hang, a death
by a signal, or a hostile store that is called sound.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from tests.faults._tally import Tally

SECONDS, MEMORY_BYTES = 30, 3 << 30
CHILD = """
import sys, tokenmill as tm
from tokenmill.tools.verify import verify
what, store = sys.argv[1:]
try:
    if what == "verify":
        problems = verify(store).problems
        print("\\n".join(problems) or "sound")
    else:
        opened = tm.open(store)
        opened.document(0), opened.decode([1]), opened.read(0, opened.num_tokens)
        print("sound")
except tm.TokenmillError as error:
    print(error)
"""
Case = tuple[str, Callable[[Path], object], bool]
"""A name, what is done to a store, and whether it may be called sound."""


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def gigabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


def terabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def link_out(path: Path) -> None:
    shutil.copy(path, path.parents[2] / f"outside-{path.name}")
    link(path, str(path.parents[2] / f"outside-{path.name}"))


FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": pipe,
    "/dev/zero": lambda path: link(path, "/dev/zero"),
    "a gigabyte": gigabyte,
    "a terabyte": terabyte,
    "nested lists": lambda path: path.write_bytes(b"[" * 1_000_000),
    "nested objects": lambda path: path.write_bytes(b'{\n "checksum": "' + b'","x":' + b'{"a":' * 500_000),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe" * 100),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link to nothing": lambda path: link(path, "nowhere"),
    "a link to itself": lambda path: link(path, path.name),
    "a link out": link_out,
}
VALUES: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 2**70, 1e300, "", "..", "../../etc/passwd", "/etc/passwd", "a/../../b", "\0", "x",
    "\u2028", "x" * 5000, [], {}, [[]], {"": {}}, {"../../x": {"bytes": 1, "xxh3": "0"}},
]  # fmt: skip


def seal(path: Path, manifest: Any) -> None:
    """Write a manifest whose checksum is right."""
    if isinstance(manifest, dict):
        manifest["checksum"] = ""
    text = json.dumps(manifest, indent=1).encode() + b"\n"
    digest = xxhash.xxh3_64_hexdigest(text).encode()
    path.write_bytes(text.replace(b'"checksum": ""', b'"checksum": "' + digest + b'"', 1))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(item, (*path, key))


def mutation(at: tuple[Any, ...], value: Any, how: str) -> Callable[[Path], None]:
    """Replace or remove the value at a place, or put it under another name."""

    def change(store: Path) -> None:
        manifest = json.loads((store / "manifest.json").read_bytes())
        parent = manifest
        for key in at[:-1]:
            parent = parent[key]
        if how == "remove":
            del parent[at[-1]]
        elif how == "rename" and isinstance(parent, dict):
            parent[str(value)] = parent.pop(at[-1])
        else:
            parent[at[-1]] = value
        seal(store / "manifest.json", manifest)

    return change


def naming(place: Callable[[Any], tuple[Any, Any]], name: str) -> Callable[[Path], None]:
    """Give the thing at a place of a manifest a name that leads out of the store."""

    def change(store: Path) -> None:
        manifest = json.loads((store / "manifest.json").read_bytes())
        parent, key = place(manifest)
        if key == "name":
            parent[key] = name
        else:
            parent[f"/{name}" if key == ".bin" else name] = parent.get(key, {"bytes": 1, "xxh3": "0" * 16})
        seal(store / "manifest.json", manifest)

    return change


OUTSIDE: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "a split named": lambda manifest: (manifest["splits"], "train"),
    "a shard named": lambda manifest: (manifest["splits"]["train"]["shards"][0], "name"),
    "a suffix named": lambda manifest: (manifest["splits"]["train"]["shards"][0]["files"], ".bin"),
    "a file of the tokenizer named": lambda manifest: (manifest["tokenizer"]["files"], "tokenizer.json"),
    "a file named": lambda manifest: (manifest["files"], "rejects.jsonl"),
}
"""Where a manifest names files: an object, and a key of it that is the name, or that has it."""


def move_tokenizer(store: Path) -> None:
    (store / "tokenizer").rename(store.parent / "elsewhere")
    (store / "tokenizer").symlink_to(store.parent / "elsewhere")


def cases(store: Path, count: int) -> Iterator[Case]:
    names = sorted(str(path.relative_to(store)) for path in store.rglob("*") if path.is_file())
    for name in names:
        for what, harm in FILES.items():
            may_pass = name == "run.json" and what in ("missing", "a link to nothing")
            yield f"{name} is {what}", lambda at, name=name, harm=harm: harm(at / name), may_pass  # type: ignore[misc]
    yield "tokenizer/ is a link out", move_tokenizer, False
    for what, place in OUTSIDE.items():
        for name in ("../outside", "/etc/passwd", "a/../../outside", ".."):
            yield f"{what} {name!r}", naming(place, name), False
    manifest = json.loads((store / "manifest.json").read_bytes())
    known, choose = [at for at in places(manifest) if at != ("checksum",)], random.Random(0)
    for _ in range(count):
        at, value = choose.choice(known), choose.choice(VALUES)
        how = choose.choice(["replace", "replace", "remove", "rename"])
        yield f"{how} {at} {str(value)[:40]!r}", mutation(at, value, how), True


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def judge(sound: Path, case: Case) -> str:
    """Describe what is wrong with the handling of a hostile store; empty if nothing is."""
    _, harm, may_pass = case
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "deeper" / "store"
        shutil.copytree(sound, store)
        harm(store)
        for what in ("open", "verify"):
            command = [sys.executable, "-c", CHILD, what, str(store)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, preexec_fn=limit)
            except subprocess.TimeoutExpired:
                return f"{what} does not end"
            if done.returncode or done.stderr or not done.stdout.strip():
                return f"{what}: exit {done.returncode}, {(done.stderr.strip() or 'nothing said')[-300:]}"
            if what == "verify" and done.stdout.strip() == "sound" and not may_pass:
                return "verify calls it sound"
    return ""


def main() -> None:
    tally, count = Tally("hostile_stores"), int(sys.argv[1]) if len(sys.argv) > 1 else 150
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        texts, store = Path(folder) / "in.jsonl", Path(folder) / "store"
        texts.write_text('{"text": "one two"}\n{"no": "text"}\n{"text": "three"}\n' * 20)
        command = [sys.executable, "-m", "tokenmill", "tokenize", texts, "--tokenizer", "bytes", "-o", store]
        subprocess.run([*command, "--on-error", "skip", "-q"], check=True, capture_output=True)
        chosen = list(cases(store, count))
        for case, finding in zip(chosen, pool.map(lambda case: judge(store, case), chosen), strict=True):
            tally.case(case[0], finding)
    tally.end()


if __name__ == "__main__":
    main()
