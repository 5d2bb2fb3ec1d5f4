"""`demo` goes the whole way on text that every machine has."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from tokenmill import demo
from tokenmill.errors import UsageError
from tokenmill.store.store import TokenStore
from tokenmill.verification import verify


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SOURCE_BYTES", 400_000)
    monkeypatch.setattr(demo, "DOCSTRING_BYTES", 50_000)
    monkeypatch.setattr(demo, "VOCAB_SIZE", 800)


def show(folder: Path | None) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    demo.run_demo(folder, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.usefixtures("small_demo")
def test_the_demo_shows_every_step_and_leaves_a_store_that_verifies(tmp_path: Path) -> None:
    home = tmp_path / "demo"
    shown = show(home)
    for heading in ("gather text", "train a tokenizer", "tokenize", "verify", "look at a document", "try next"):
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


@pytest.mark.usefixtures("small_demo")
def test_the_demo_can_be_run_again_and_gives_the_same_store(tmp_path: Path) -> None:
    show(tmp_path)
    before = (tmp_path / "store" / "manifest.json").read_bytes()
    show(tmp_path)
    assert (tmp_path / "store" / "manifest.json").read_bytes() == before


def test_the_demo_leaves_other_directories_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="holds other things; choose an empty directory"):
        show(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_the_text_of_the_demo_is_bounded_and_in_a_fixed_order() -> None:
    once, again = [*demo._read_sources(300_000)], [*demo._read_sources(300_000)]
    assert once == again
    assert sum(len(text) for _, text in once[:-1]) < 300_000
    docstrings = [*demo._read_docstrings(once, 20_000)]
    assert len(docstrings) > 20
    assert sum(len(text) for _, text in docstrings[:-1]) < 25_000
