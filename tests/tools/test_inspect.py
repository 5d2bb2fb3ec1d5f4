"""`inspect` shows a store as it is: true numbers, whole characters, no control character."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType

from tests.conftest import make_texts, write_jsonl
from tests.support.running import tokenize_here
from tokenmill.engines import load_tokenizer
from tokenmill.engines.decoder import Decoder
from tokenmill.errors import UsageError
from tokenmill.formatting import show_safely
from tokenmill.store.store import TokenStore
from tokenmill.tools.inspect import overview_json, render_document, render_overview
from tokenmill.tools.inspect.statistics import measure_lengths, measure_text_bytes
from tokenmill.tools.inspect.token_view import group_tokens

BYTES = Decoder(load_tokenizer("bytes"))


def draw(what: RenderableType, *, colour: bool = False, width: int = 80) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        color_system="256" if colour else None,
        highlight=False,
        legacy_windows=False,
    )
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture(scope="module")
def byte_store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    folder = tmp_path_factory.mktemp("bytes")
    texts = ["naïve 😀 漢字\nend", "", "\x1b[31mred\x07 \u202eback", "long " * 2000, "a b"]
    path = write_jsonl(folder / "in.jsonl", texts, id=["one", None, "\x1b[2J", "4", "five"])
    return tokenize_here(path, folder / "store", tokenizer="bytes", keep_keys=["id"], bos=True)


def test_the_overview_says_what_the_store_holds(open_tiny_store: Callable[[], TokenStore]) -> None:
    store = open_tiny_store()
    shown = draw(render_overview(store))
    lengths = np.concatenate([*store.splits["train"].lengths()])
    assert f"{store.num_documents:,}" in shown
    assert f"{store.num_tokens:,}" in shown
    assert f"{lengths.mean():,.1f}" in shown
    assert f"{np.median(lengths):,.1f}" in shown
    assert f"{lengths.max():,}" in shown
    assert "EOS <|endoftext|> (0)" in shown
    assert "BOS none" in shown
    assert "uint16" in shown
    assert "2 of 302: 1 " in shown
    assert "tokens per document, train" in shown


def test_everything_fits_80_columns(open_tiny_store: Callable[[], TokenStore], byte_store: TokenStore) -> None:
    for store in (open_tiny_store(), byte_store):
        documents = [render_document(store, number) for number in range(5)]
        for shown in map(draw, [render_overview(store), *documents]):
            lines = shown.replace(str(store.path), "data/tok").split("\n")
            assert max(map(cell_len, lines)) <= 80


def test_the_histogram_counts_every_document_once(open_tiny_store: Callable[[], TokenStore]) -> None:
    for split in open_tiny_store().splits.values():
        lengths = np.concatenate([*split.lengths()])
        measured = measure_lengths(split)
        assert sum(count for _, _, count in measured.powers) == split.num_documents
        for start, stop, count in measured.powers:
            assert count == np.count_nonzero((lengths >= start) & (lengths <= stop))
        assert measured.median == np.median(lengths)
        assert (measured.shortest, measured.longest) == (lengths.min(), lengths.max())


def test_the_median_of_very_long_documents_is_exact(monkeypatch: pytest.MonkeyPatch, byte_store: TokenStore) -> None:
    monkeypatch.setattr("tokenmill.tools.inspect.statistics.EXACT_LENGTHS", 4)
    monkeypatch.setattr("tokenmill.tools.inspect.statistics.LENGTHS_AT_ONCE", 2)
    lengths = np.concatenate([*byte_store.splits["train"].lengths()])
    assert measure_lengths(byte_store.splits["train"]).median == np.median(lengths)


def test_bytes_per_token_is_measured_on_the_text_itself(byte_store: TokenStore) -> None:
    measured = measure_text_bytes(byte_store)
    assert measured is not None
    # The long document is cut at 2,048 tokens, BOS among them; the others have BOS and EOS.
    sizes = [len("naïve 😀 漢字\nend".encode()), 0, len("\x1b[31mred\x07 \u202eback".encode()), 2047, 3]
    assert measured == (pytest.approx(sum(sizes) / (sum(sizes) + 9)), 5)


def test_the_overview_as_json_has_the_same_numbers(open_tiny_store: Callable[[], TokenStore]) -> None:
    store = open_tiny_store()
    overview = json.loads(json.dumps(overview_json(store)))
    assert overview["splits"]["train"]["documents"] == store.num_documents
    assert overview["splits"]["train"]["tokens"] == store.num_tokens
    assert sum(row["documents"] for row in overview["splits"]["val"]["histogram"]) == store.splits["val"].num_documents
    assert overview["eos_id"] == 0
    assert sum(overview["rejects"].values()) == 2
    assert overview["input_bytes"] == sum(file.bytes for file in store.manifest.inputs)


def test_a_document_shows_where_it_came_from_and_what_was_kept(byte_store: TokenStore) -> None:
    shown = draw(render_document(byte_store, 4))
    assert "4 of train (5 documents), 5 tokens" in shown
    assert "in.jsonl, position" in shown
    assert "five" in shown
    assert "not given" in draw(render_document(byte_store, 1))


def test_without_colour_a_bar_stands_between_tokens(byte_store: TokenStore) -> None:
    shown = draw(render_document(byte_store, 4))
    assert "<bos>│a│ │b│<eos>" in shown
    assert "\x1b" not in shown
    assert "257   97 32 98 256" in shown


def test_with_colour_neighbouring_tokens_differ_and_special_ones_stand_out(byte_store: TokenStore) -> None:
    shown = draw(render_document(byte_store, 4), colour=True)
    assert "│" not in shown
    assert "48;5;90m<bos>" in shown
    assert "48;5;222ma" in shown
    assert "48;5;117m " in shown


def test_a_character_of_several_tokens_is_shown_whole(byte_store: TokenStore) -> None:
    shown = draw(render_document(byte_store, 0))
    assert "n│a│ï│v│e│ │😀│ │漢│字│↵" in shown
    assert "\ufffd" not in shown
    assert "240 159 152 128" in shown


def test_a_combining_mark_that_is_a_token_of_its_own_is_shown_beside_its_letter(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["e\u0301"])
    shown = draw(render_document(tokenize_here(path, tmp_path / "store", tokenizer="bytes"), 0))
    assert "e│◌\u0301│<eos>" in shown


def test_no_document_can_reach_the_terminal_with_control_characters(byte_store: TokenStore) -> None:
    shown = draw(render_document(byte_store, 2))
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\u202e" not in shown
    assert "␛" in shown
    assert "<202E>" in shown


def test_a_long_document_is_cut_and_its_end_still_shown(byte_store: TokenStore) -> None:
    shown = draw(render_document(byte_store, 3, max_tokens=50))
    assert shown.count("... 9,950 more tokens ...") == 2
    assert shown.count("<eos>") == 2
    assert len(shown.splitlines()) < 20


def test_a_cut_never_falls_inside_a_character(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["漢" * 50])
    store = tokenize_here(path, tmp_path / "store", tokenizer="bytes")
    for limit in range(1, 140):
        assert "\ufffd" not in draw(render_document(store, 0, max_tokens=limit))


def test_a_document_or_split_that_is_not_there_is_refused(byte_store: TokenStore) -> None:
    with pytest.raises(UsageError, match="document 5 is not in .*train, which has 5, from 0 on"):
        render_document(byte_store, 5)
    with pytest.raises(UsageError, match="no split 'val'; it has train"):
        render_document(byte_store, 0, "val")


def test_documents_of_a_trained_tokenizer_read_as_their_text(open_tiny_store: Callable[[], TokenStore]) -> None:
    store = open_tiny_store()
    decoder, specials = Decoder(store.tokenizer), {0, 1}
    texts = set(make_texts(300, seed=1))
    for number in range(0, store.num_documents, 7):
        groups = group_tokens(store.document(number).tolist(), decoder, specials)
        assert groups[-1].special
        assert "".join(group.text for group in groups[:-1]) in texts


@given(st.text())
def test_grouped_bytes_of_any_text_are_that_text_again(text: str) -> None:
    groups = group_tokens([*text.encode(), 256], BYTES, {256, 257})
    assert "".join(group.text for group in groups[:-1]) == text
    assert all(len(group.text) == 1 for group in groups[:-1])
    assert [token for group in groups for token in group.ids] == [*text.encode(), 256]


@given(st.text())
def test_text_made_safe_has_nothing_but_printable_characters(text: str) -> None:
    for character in show_safely(text):
        assert character.isprintable() or character in "\u200c\u200d" or character.isspace()
        assert character not in "\n\r\t\v\f\x1b\x85\u2028\u2029"


def test_a_store_without_documents_has_an_overview(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("")
    store = tokenize_here(tmp_path / "in.jsonl", tmp_path / "store", tokenizer="bytes")
    assert "train          0       0" in draw(render_overview(store))
    assert overview_json(store)["splits"]["train"]["histogram"] == []
    with pytest.raises(UsageError, match="document 0 is not in store/train, which has 0"):
        render_document(store, 0)
