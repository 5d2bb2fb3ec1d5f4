"""Count the functions and files of tokenmill that one job walks through, and print them in call order.

    python scripts/walks.py tokenize|load [--list]

`tokenize` is one document through a whole run, with the worker in a thread of this process. `load` is one warm
`tm.load` of a store and its first torch batch. Everything is imported and used once before the count begins, so that
what is counted is the walk of every later call. Put another tree on PYTHONPATH to compare.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tokenmill as tm

PACKAGE = Path(tm.__file__).parent
DOCUMENTS = 200
MAKE_STORE = (
    "import sys, tokenmill as tm; tm.tokenize(sys.argv[1], sys.argv[2], tokenizer='bytes', workers=1, display='quiet')"
)


class Walk:
    """The functions of tokenmill that were entered, in the order in which each was entered first.

    Comprehensions, generator expressions and lambdas count as part of the function they are written in.
    """

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], None] = {}
        self._names: dict[CodeType, tuple[str, str] | None] = {}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the functions that this thread, and threads started in the meantime, enter."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code not in self._names:
            self._names[code] = _name(code)
        name = self._names[code]
        if name is not None:
            self.functions.setdefault(name)

    def show(self, *, listed: bool) -> None:
        """Print the counts and, if asked, the functions by file, files in the order in which they were entered."""
        files: dict[str, list[str]] = {}
        for file, function in self.functions:
            files.setdefault(file, []).append(function)
        print(f"{len(self.functions)} functions in {len(files)} files")
        for file, functions in files.items() if listed else ():
            print(f"{file}  ({len(functions)})")
            for function in functions:
                print(f"    {function}")


def _name(code: CodeType) -> tuple[str, str] | None:
    """The file and the qualified name of a function of tokenmill; None for any other code."""
    path = Path(code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return None
    parts = code.co_qualname.split(".<locals>.")
    while parts[-1].startswith("<"):
        if len(parts) == 1:
            return None  # the body of a module or a class
        parts.pop()
    return str(path.relative_to(PACKAGE)), ".".join(parts)


def walk_load(folder: Path) -> Walk:
    """One warm `tm.load` of a store and its first torch batch."""
    text, store = folder / "text.jsonl", folder / "store"
    text.write_text("".join(f'{{"text": "document {number} of a small corpus"}}\n' for number in range(DOCUMENTS)))
    # In a process of its own: a pipeline that ran here before would have warmed, or changed, what load uses.
    subprocess.run([sys.executable, "-c", MAKE_STORE, str(text), str(store)], check=True)

    def load_one_batch() -> None:
        next(iter(tm.load(store, seq_len=64, batch_size=4, framework="torch")))

    load_one_batch()
    walk = Walk()
    with walk.counted():
        load_one_batch()
    return walk


def walk_tokenize(folder: Path) -> Walk:
    """One document through a run: planned, scheduled, tokenized, published and in the manifest."""
    sys.path.insert(0, str(PACKAGE.parents[1]))
    from tests.support.running import ThreadExecutor
    from tokenmill.display import Silence

    text = folder / "text.jsonl"
    text.write_text('{"text": "one document"}\n')

    def tokenize(out: str) -> None:
        tm.tokenize(str(text), folder / out, tokenizer="bytes", executor=ThreadExecutor(), display=Silence())

    tokenize("warm")
    walk = Walk()
    with walk.counted():
        tokenize("counted")
    return walk


WALKS: dict[str, Callable[[Path], Walk]] = {"tokenize": walk_tokenize, "load": walk_load}


def main() -> None:
    """Count one walk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walk", choices=WALKS)
    parser.add_argument("--list", action="store_true", help="print every function, by file and in call order")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        WALKS[arguments.walk](Path(folder)).show(listed=arguments.list)


if __name__ == "__main__":
    main()
