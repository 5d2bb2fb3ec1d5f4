"""The functions that the commands are made of, from Python: they take what a program has, and print what it asks."""

from __future__ import annotations

from pathlib import Path

import pytest

import tokenmill as tm
from tests.conftest import make_texts, write_jsonl
from tests.support.in_process import tokenmill_here
from tokenmill.display import JsonLines, PlainLines, Silence, as_display
from tokenmill.errors import UsageError


def test_estimate_takes_the_flags_of_tokenize(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(300, seed=1))
    found = tm.estimate(path, tokenizer="bytes", limit=100, seq_len=64)
    assert found.documents.value == 100
    assert repr(found).startswith("sample ")
    assert "\ntokens " in repr(found)
    tokenmill_here("estimate", path, "--tokenizer", "bytes", "--seq-len", 64, "-o", tmp_path)
    printed = repr(tm.estimate(path, tokenizer="bytes", seq_len=64, out=tmp_path))
    assert [line.partition(" ")[0] for line in printed.splitlines()][:4] == ["sample", "documents", "tokens", "per"]
    with pytest.raises(UsageError, match="--limti is not a flag of tokenize"):
        tm.estimate(path, tokenizer="bytes", limti=3)  # type: ignore[call-arg]


def test_verify_and_report_take_a_store_or_its_path(tiny_store: Path, tmp_path: Path) -> None:
    store = tm.open(tiny_store)
    assert isinstance(store, tm.TokenStore)
    assert repr(tm.verify(store)) == repr(tm.verify(str(tiny_store)))
    assert repr(tm.verify(store)).endswith("\nsound")
    figures = tm.report(store, tmp_path / "a.html")
    tm.report(str(tiny_store), str(tmp_path / "b.html"), json=str(tmp_path / "b.json"))
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert (
        repr(figures)
        == f"Figures(store: {store.manifest.num_documents} documents, {store.manifest.num_tokens:,} tokens)"
    )
    (tiny_store / "tokenizer" / "tokenizer.json").unlink()
    assert repr(tm.verify(tiny_store)).splitlines()[-1].startswith(f"{tiny_store}/tokenizer")


def test_inspect_prints_itself_as_the_command_does(tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for flags in ({}, {"document": 3}, {"row": 2, "seq_len": 64}, {"row": 2, "seq_len": 64, "packing": "best-fit"}):
        words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        found = tm.inspect(tm.open(tiny_store), **flags)  # type: ignore[arg-type]
        printed = tokenmill_here("inspect", tiny_store, *words, env={"COLUMNS": "80"}).stdout
        assert repr(found).rstrip() == "\n".join(line.rstrip() for line in printed.splitlines()).rstrip()
        assert found._repr_html_().startswith("<pre ")
    assert tm.inspect(tiny_store).as_json()["splits"]["train"]["documents"] > 0
    with pytest.raises(UsageError, match="not both"):
        tm.inspect(tiny_store, row=1, document=1)


def test_tokenize_shows_progress_unless_it_is_asked_to_be_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one text"])
    tm.tokenize(path, tmp_path / "loud", tokenizer="bytes", workers=1)
    shown = capsys.readouterr()
    assert "example    one text<eos>" in shown.err
    assert f"\nstore      {tmp_path / 'loud'}: 1 document, 9 tokens in 00:" in shown.err
    tm.tokenize(path, tmp_path / "quiet", tokenizer="bytes", workers=1, display="quiet")
    assert capsys.readouterr() == ("", "")
    tm.tokenize(path, tmp_path / "json", tokenizer="bytes", workers=1, display="json")
    assert all(line.startswith('{"time"') for line in capsys.readouterr().err.splitlines())
    with pytest.raises(UsageError, match="display 'loud' is unknown; expected auto, monitor, json, quiet"):
        tm.tokenize(path, tmp_path / "x", tokenizer="bytes", display="loud")  # type: ignore[call-overload]


def test_a_display_is_named_or_passed() -> None:
    mine = Silence()
    assert as_display(mine) is mine
    assert isinstance(as_display("quiet"), Silence)
    assert isinstance(as_display("json"), JsonLines)
    assert isinstance(as_display("auto"), PlainLines)
    assert isinstance(as_display("monitor"), PlainLines)
