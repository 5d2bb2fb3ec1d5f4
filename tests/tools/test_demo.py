"""`demo` goes the whole way on text that every machine has."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from tokenmill.errors import UsageError
from tokenmill.store.store import TokenStore
from tokenmill.tools import demo
from tokenmill.tools.verify import verify


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Where a small demo ran, and what it showed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "SOURCE_BYTES", 400_000)
        patch.setattr(demo, "DOCSTRING_BYTES", 50_000)
        patch.setattr(demo, "VOCAB_SIZE", 800)
        home = tmp_path_factory.mktemp("demo") / "home"
        yield home, show(home)


def show(folder: Path | None) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    demo.run_demo(folder, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_demo_shows_every_step_and_leaves_a_store_that_verifies(small_demo: tuple[Path, str]) -> None:
    home, shown = small_demo
    for heading in ("collect text", "train a tokenizer", "tokenize", "verify", "inspect a document", "try next"):
        assert heading in shown
    store = TokenStore(home / "store")
    assert f"{store.num_documents:,} documents, {store.num_tokens:,} tokens" in shown
    assert f"{store.num_documents:,} documents end with EOS" in shown
    assert "│" in shown
    assert "0 differ" in shown
    assert f"tokenmill inspect {home / 'store'}" in shown
    assert max(cell_len(line) for line in shown.replace(str(home), "home").split("\n")) <= 80
    result = verify(store.path, against=[str(home / "text")], every=True)
    assert result.problems == []
    assert result.num_compared == store.num_documents


def test_the_demo_can_be_run_again_and_gives_the_same_store(small_demo: tuple[Path, str]) -> None:
    home, _ = small_demo
    before = (home / "store" / "manifest.json").read_bytes()
    show(home)
    assert (home / "store" / "manifest.json").read_bytes() == before


def test_the_demo_leaves_other_directories_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="holds other files; choose an empty directory"):
        show(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_the_text_of_the_demo_is_bounded_and_in_a_fixed_order() -> None:
    once, again = [*demo._read_sources(300_000)], [*demo._read_sources(300_000)]
    assert once == again
    assert sum(len(text) for _, text in once[:-1]) < 300_000
    docstrings = [*demo._read_docstrings(once, 20_000)]
    assert len(docstrings) > 20
    assert sum(len(text) for _, text in docstrings[:-1]) < 25_000
