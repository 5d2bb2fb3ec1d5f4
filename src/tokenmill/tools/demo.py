"""`demo`: all steps on text that every machine has, in seconds and without a network.

The text is Python's standard library: its sources, and the docstrings in them. Every step calls the same function as
the command of the same name.
"""

from __future__ import annotations

import ast
import os
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from tokenmill.display import Silence
from tokenmill.display.tables import make_facts
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.formatting import format_bytes, plural
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.run import run
from tokenmill.store.store import TokenStore
from tokenmill.tools.inspect import render_document
from tokenmill.tools.inspect.statistics import measure_text_bytes
from tokenmill.tools.train_tokenizer import train_tokenizer
from tokenmill.tools.verify import Verification, verify

__all__ = ["run_demo"]

SOURCE_BYTES = 7_000_000
DOCSTRING_BYTES = 1_000_000
TRAINING_BYTES = 2_000_000
VOCAB_SIZE = 4096
SHOWN_TOKENS = 90
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}


def run_demo(folder: Path | None, console: Console) -> None:
    """Collect text, train a tokenizer, tokenize, verify, and inspect the result.

    All files are written to `folder`, by default a new temporary one, and stay there for the commands that are
    printed at the end.
    """
    home = _prepare(folder)
    console.print(Text(f"everything is written to {home}", style="dim"), soft_wrap=True)
    _say(console, "1", "collect text: the sources and docstrings of Python's standard library")
    inputs = _collect(home / "text", console)
    _say(console, "2", "train a tokenizer on a part of it")
    _train(inputs, home / "tokenizer", console)
    _say(console, "3", "tokenize all of it, after proving that the ids equal the reference's")
    store, figures = _tokenize(inputs, home, console)
    _say(console, "4", "verify every byte, and ids against the reference")
    result = _verify(store, inputs, console)
    _say(console, "5", "inspect a document: its tokens and ids")
    console.print(render_document(store, _pick_document(store), max_tokens=SHOWN_TOKENS))
    _say(console, "6", "the figures")
    _show_figures(store, result, figures, console)
    _say(console, "", "try next")
    text = home / "text"
    for command in (
        f"inspect {store.path}",
        f"status {store.path}",
        f"verify {store.path} --against {text} --all",
        f"tokenize {text} -o {home / 'bytes'} --tokenizer bytes",
    ):
        console.print(Text(f"  tokenmill {command}"), soft_wrap=True)


def _prepare(folder: Path | None) -> Path:
    """Make the directory of the demo; refuse one that holds other files."""
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="tokenmill-demo-"))
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / "text").is_dir())):
        raise UsageError(f"{folder} holds other files; choose an empty directory for the demo")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _say(console: Console, number: str, what: str) -> None:
    console.print()
    console.print(Text.assemble((f"{number} ".lstrip(), "bold cyan"), (what, "bold")))


def _collect(folder: Path, console: Console) -> list[str]:
    """Write sources as plain JSON lines, and docstrings as compressed ones."""
    import zstandard

    folder.mkdir(parents=True, exist_ok=True)
    sources = [*_read_sources(SOURCE_BYTES)]
    if not sources:
        raise TokenmillError("this Python has no readable standard library; use tokenmill tokenize on text of your own")
    docstrings = [*_read_docstrings(sources, DOCSTRING_BYTES)]
    plain, packed = folder / "sources.jsonl", folder / "docstrings.jsonl.zst"
    encode = msgspec.json.Encoder().encode
    plain.write_bytes(b"".join(encode({"text": text, "module": name}) + b"\n" for name, text in sources))
    lines = b"".join(encode({"text": text, "module": name}) + b"\n" for name, text in docstrings)
    packed.write_bytes(zstandard.ZstdCompressor().compress(lines))
    for path, count in ((plain, len(sources)), (packed, len(docstrings))):
        console.print(
            f"  {path.name}: {plural(count, 'document')}, {format_bytes(path.stat().st_size)}", highlight=False
        )
    return [str(plain), str(packed)]


def _read_sources(limit_bytes: int) -> Iterator[tuple[str, str]]:
    """Read names and texts of modules, folder by folder in the order of their names, up to a size."""
    root = Path(sysconfig.get_path("stdlib"))
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(set(inner) - LEFT_OUT)
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
            if limit_bytes <= 0:
                return
            try:
                text = path.read_bytes().decode()
            except (OSError, UnicodeDecodeError):
                continue
            limit_bytes -= len(text)
            yield path.relative_to(root).as_posix(), text


def _read_docstrings(sources: list[tuple[str, str]], limit_bytes: int) -> Iterator[tuple[str, str]]:
    for name, text in sources:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = ast.get_docstring(node)
                if limit_bytes <= 0:
                    return
                if docstring:
                    limit_bytes -= len(docstring)
                    yield name, docstring


def _train(inputs: list[str], folder: Path, console: Console) -> None:
    started = time.perf_counter()
    trained = train_tokenizer(inputs, folder, vocab_size=VOCAB_SIZE, limit_bytes=TRAINING_BYTES, overwrite=True)
    seconds = time.perf_counter() - started
    read = f"{plural(trained.num_documents, 'document')}, {format_bytes(trained.num_bytes)}"
    console.print(f"  {plural(trained.vocab_size, 'token')} from {read}, in {seconds:.1f} s", highlight=False)


def _tokenize(inputs: list[str], home: Path, console: Console) -> tuple[TokenStore, dict[str, str]]:
    """Tokenize; return the store, and the speed and memory of the run."""
    flags = {"inputs": inputs, "out": str(home / "store"), "tokenizer": str(home / "tokenizer")}
    request = Request.from_flags({**flags, "keep_keys": ["module"], "overwrite": True})
    started = time.perf_counter()
    outcome = run(request, Silence())
    seconds = time.perf_counter() - started
    assert outcome.observer is not None
    assert outcome.observer.snapshot is not None
    moment = outcome.observer.snapshot
    manifest = outcome.manifest
    assert manifest is not None
    counted = f"{plural(manifest.num_documents, 'document')}, {plural(manifest.num_tokens, 'token')}"
    console.print(f"  {counted}, in {seconds:.1f} s with start-up", highlight=False)
    speed = f"{moment.num_text_bytes / seconds / 1e6:.1f} MB/s with start-up, which is most of it at this size"
    memory = f"{format_bytes(outcome.observer.peak_memory_bytes)} at most, all processes together"
    return TokenStore(home / "store"), {"speed": speed, "memory": memory}


def _verify(store: TokenStore, inputs: list[str], console: Console) -> Verification:
    started = time.perf_counter()
    result = verify(store.path, against=inputs)
    seconds = time.perf_counter() - started
    for problem in result.problems:
        console.print(Text(f"  {problem}", style="bold red"))
    if result.problems:
        raise TokenmillError("the demo's store did not verify, which is a fault of tokenmill; please report it")
    read = f"{result.num_files} files, {format_bytes(result.num_bytes)}: no problem"
    compared = f"{plural(result.num_compared, 'document')} encoded again by {result.reference}: equal"
    console.print(f"  {read}\n  {compared}, in {seconds:.1f} s", highlight=False)
    return result


def _pick_document(store: TokenStore) -> int:
    """Choose a docstring of medium length near the end: prose that is short enough to be shown whole."""
    split = store.splits["train"]
    for number in range(split.num_documents - 1, -1, -1):
        if SHOWN_TOKENS // 2 < len(split.document(number)) <= SHOWN_TOKENS:
            return number
    return 0


def _show_figures(store: TokenStore, result: Verification, figures: dict[str, str], console: Console) -> None:
    manifest, measured = store.manifest, measure_text_bytes(store)
    rows = [
        ("documents", f"{store.num_documents:,}"),
        ("tokens", f"{store.num_tokens:,} ({manifest.dtype}), {result.num_with_eos:,} documents end with EOS"),
    ]
    if measured is not None:
        rows.append(("text", f"{measured[0]:.2f} bytes per token"))
    rows += figures.items()
    if (parity := manifest.engine.parity) is not None:
        texts = f"{parity.num_documents + parity.num_awkward:,} texts, {parity.num_mismatches} differ"
        rows.append(("parity", f"{manifest.engine.name} and {parity.reference}: {texts}"))
    console.print(make_facts((f"  {name}", value) for name, value in rows))
