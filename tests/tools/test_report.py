"""`report` writes one page with true figures that is self-contained, and safe for any documents."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import make_texts, write_jsonl
from tests.support.in_process import tokenmill_here
from tests.support.running import ids_of, sentence, sources_of, tokenize_here
from tests.support.stores import make_documents, make_store
from tokenmill.dataset.pack import pack
from tokenmill.display import Snapshot
from tokenmill.engines import load_tokenizer
from tokenmill.errors import StoreError, UsageError
from tokenmill.pipeline.journal.attempts import AttemptInfo, Moment, RunInfo
from tokenmill.store.manifest import decode_sealed, encode_sealed
from tokenmill.store.store import TokenStore
from tokenmill.tools.report import browser as browsing
from tokenmill.tools.report import groups as grouping
from tokenmill.tools.report import packings as filling
from tokenmill.tools.report import report
from tokenmill.tools.report import token_counts as counting
from tokenmill.tools.report.collect import collect_figures
from tokenmill.tools.report.duplicates import DuplicateTally, ShardHashes
from tokenmill.tools.report.figures import Figures
from tokenmill.tools.report.svg import format_share
from tokenmill.tools.report.token_counts import Vocabulary, choose_pieces, cut_pieces

EVIL = [
    "</script><script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 2">',
    "<!--<script>",
    '"><svg onload=window.hacked=3>',
    "\x1b[31mred\x07 \u202eback\u2028line & <b>bold</b>",
    "\u202e\u2066 {{ 7 * 7 }} {% raw %}",
]


@pytest.fixture(scope="module")
def odd_store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Documents of bytes with everything that a report looks for."""
    folder = tmp_path_factory.mktemp("odd")
    texts = [
        *EVIL,
        "",
        "a",
        "abcd",
        "x" * 400,
        "-" * 40 + "ab" * 15,
        "broken \ufffd\ufffd text \ufffd",
        "fullwidth ，ｅ are not broken",
        *make_texts(60, seed=3),
    ]
    langs = [("en", "de", None)[number % 3] for number in range(len(texts))]
    sources = [f"<b>s{number % 25}</b>" for number in range(len(texts))]
    path = write_jsonl(folder / "in <i>put.jsonl", texts, lang=langs, source=sources, id=list(range(len(texts))))
    return tokenize_here(path, folder / "odd <s>tore", tokenizer="bytes", keep_keys=["lang", "source", "id"])


@pytest.fixture(scope="module")
def odd_figures(odd_store: TokenStore) -> Figures:
    return collect_figures(odd_store, seq_len=64)


def page_of(store: TokenStore, folder: Path, **options: Any) -> str:
    report(store, folder / "page.html", overwrite=True, **options)
    return (folder / "page.html").read_text("utf-8")


class Page(HTMLParser):
    """What a browser would see: elements with their attributes, and the text outside scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside == "style":
            self.styles.append(data)
        else:
            self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def documents(self) -> list[dict[str, Any]]:
        documents: list[dict[str, Any]] = json.loads(self.scripts[-1])["documents"]
        return documents


# Figures against plain Python.


def test_tokens_are_counted_as_they_are(odd_store: TokenStore, odd_figures: Figures) -> None:
    counts = Counter(token for ids in ids_of(odd_store) for token in ids)
    tokens = odd_figures.tokens
    assert tokens.is_everything
    assert tokens.num_seen == sum(counts.values()) == odd_store.num_tokens
    assert tokens.num_unused == 258 - len(counts)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    assert [(token.id, token.count) for token in tokens.frequent] == ranked[: len(tokens.frequent)]
    assert tokens.frequent[0].text == "␣"
    for step, share in tokens.coverage:
        assert share == pytest.approx(sum(count for _, count in ranked[:step]) / tokens.num_seen)


@pytest.mark.parametrize("piece_tokens", [1 << 16, 50, 7])
def test_the_longest_run_of_each_token_is_found(
    odd_store: TokenStore, piece_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "PIECE_TOKENS", piece_tokens)
    longest: dict[int, tuple[int, int]] = {}
    for number, ids in enumerate(ids_of(odd_store)):
        for token, run in groupby(ids):
            length = len(list(run))
            if length >= 4 and length > longest.get(token, (0, 0))[0]:
                longest[token] = (length, number)
    found = {run.id: (run.num_tokens, run.document) for run in collect_figures(odd_store).tokens.runs}
    if piece_tokens > 400:
        assert found == longest
        assert found[ord("x")][0] == 400
    else:
        # A document that is longer than a piece is cut, and its runs with it.
        assert all(found[token][0] <= length for token, (length, _) in longest.items())
        assert max(length for length, _ in found.values()) <= 2 * piece_tokens


def test_totals_by_input_and_kept_field_are_exact(odd_store: TokenStore, odd_figures: Figures) -> None:
    lengths = [len(ids) for ids in ids_of(odd_store)]
    sizes = [sum(token < 256 for token in ids) for ids in ids_of(odd_store)]
    inputs, by_lang, by_source = odd_figures.groupings
    assert [(row.num_documents, row.num_tokens) for row in inputs.rows] == [(len(lengths), sum(lengths))]
    assert inputs.rows[0].bytes_per_token == pytest.approx(sum(sizes) / sum(lengths))
    assert (by_lang.key, by_lang.is_language) == ("lang", True)
    assert (by_source.key, by_source.is_language, by_source.num_values) == ("source", False, 25)
    expected: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for lang, length, size in zip(sources_of(odd_store)["key.lang"].to_pylist(), lengths, sizes, strict=True):
        for place, value in enumerate((1, length, size)):
            expected[lang or "not given"][place] += value
    for row in by_lang.rows:
        documents, tokens, size = expected.pop(row.name)
        assert (row.num_documents, row.num_tokens) == (documents, tokens)
        assert row.bytes_per_token == pytest.approx(size / tokens)
    assert not expected


def test_only_the_largest_groups_have_a_row_and_the_others_are_added_up(
    odd_store: TokenStore, odd_figures: Figures
) -> None:
    by_source = odd_figures.groupings[2]
    assert len(by_source.rows) == 20
    assert by_source.others is not None
    assert by_source.others.name == "5 others"
    rows = [*by_source.rows, by_source.others]
    assert sum(row.num_tokens for row in rows) == odd_store.num_tokens
    assert sum(row.num_documents for row in rows) == odd_store.num_documents
    assert [row.num_tokens for row in by_source.rows] == sorted(
        (row.num_tokens for row in by_source.rows), reverse=True
    )


def test_a_field_with_a_value_for_each_document_gets_no_table(
    odd_figures: Figures, odd_store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert odd_figures.ungrouped == ["id"]
    monkeypatch.setattr(grouping, "MOST_VALUES", 10)
    assert collect_figures(odd_store).ungrouped == ["source", "id"]


def test_lengths_are_counted_once_each(odd_store: TokenStore, odd_figures: Figures) -> None:
    lengths = np.array([len(ids) for ids in ids_of(odd_store)])
    (split,) = odd_figures.splits
    assert sum(some.num_documents for some in split.bins) == len(lengths)
    for some in split.bins:
        inside = lengths[(lengths >= some.start) & (lengths < some.stop)]
        assert (some.num_documents, some.num_tokens) == (len(inside), inside.sum())
    assert split.median_tokens == np.median(lengths)
    assert odd_figures.long_document_share == pytest.approx((lengths > 64).mean())
    assert odd_figures.long_token_share == pytest.approx(lengths[lengths > 64].sum() / lengths.sum())


def test_suspicious_documents_are_found_and_no_others(odd_store: TokenStore, odd_figures: Figures) -> None:
    near_empty, repeating, replaced, duplicates = odd_figures.suspicions
    documents = ids_of(odd_store)
    texts = [bytes(token for token in ids if token < 256).decode() for ids in documents]
    short = [number for number, ids in enumerate(documents) if len(ids) <= 4]
    assert near_empty.num_documents == len(short) >= 2
    assert near_empty.examples[0].detail == "0 tokens beside BOS and EOS"
    assert {example.document for example in near_empty.examples} <= set(short)
    half = [
        number
        for number, ids in enumerate(documents)
        if len(ids) >= 32 and Counter(ids).most_common(1)[0][1] >= len(ids) / 2
    ]
    assert repeating.num_documents == len(half) == 2
    assert [example.detail for example in repeating.examples] == ["x (120) makes up 100%", "- (45) makes up 56%"]
    broken = {number: text.count("\ufffd") for number, text in enumerate(texts) if "\ufffd" in text}
    assert replaced.num_documents == len(broken) == 1
    assert [(example.document, example.detail) for example in replaced.examples] == [
        (number, f"{count} replacement characters") for number, count in broken.items()
    ]
    assert duplicates.num_documents == len(texts) - len(set(texts)) - (texts.count("") - 1)
    assert duplicates.num_looked_at == len(texts)


@given(st.text(alphabet="\ufffda，ﾽé\U0010ffff¿", max_size=40), st.data())
def test_replacement_characters_are_counted_however_they_are_tokenized(text: str, data: st.DataObject) -> None:
    # Ids of a made-up vocabulary: every substring of up to three bytes that the text has.
    spelled = text.encode()
    pieces = sorted({spelled[start : start + size] for start in range(len(spelled)) for size in (1, 2, 3)})
    vocabulary = _Spelled(pieces)
    ids, start = [], 0
    while start < len(spelled):
        size = data.draw(st.integers(1, min(3, len(spelled) - start)))
        ids.append(pieces.index(spelled[start : start + size]))
        start += size
    if ids:
        assert vocabulary.count_replacements(np.array(ids)).sum() == text.count("\ufffd")


class _Spelled(Vocabulary):
    """A vocabulary of given spellings."""

    def __init__(self, spellings: list[bytes]) -> None:
        self._spellings = spellings
        super().__init__(load_tokenizer("bytes"), len(spellings))

    def spell(self, token: int) -> bytes:
        return self._spellings[token]


def test_both_splits_and_supervised_tokens_are_reported(tmp_path: Path) -> None:
    records = [{"prompt": f"question {number} ?", "response": "answer " * (number % 5 + 1)} for number in range(60)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    flags: dict[str, Any] = {"prompt_key": "prompt", "response_key": "response", "val_fraction": 0.3}
    store = tokenize_here(path, tmp_path / "store", tokenizer="bytes", **flags)
    figures = collect_figures(store)
    assert figures.is_supervised
    for split in figures.splits:
        documents = store.splits[split.totals.name]
        assert documents.mask is not None
        mask = documents.mask.read(0, documents.num_tokens)
        assert split.totals.trained_share == pytest.approx(mask.mean())
        assert split.totals.num_tokens == documents.num_tokens
    page = Page(page_of(store, tmp_path))
    assert {document["split"] for document in page.documents} == {"train", "val"}
    for document in page.documents:
        mask = store.splits[document["split"]].mask.document(document["number"])  # type: ignore[union-attr]
        marked = np.zeros(len(mask), int)
        for start, stop in document["trained"]:
            marked[start:stop] = 1
        assert marked.tolist() == mask.tolist()
    assert "an underline marks tokens that are trained on" in page.text


# Pieces.


@pytest.mark.parametrize("piece_tokens", [1, 3, 16, 1000])
def test_pieces_tile_the_store_and_know_their_documents(
    tmp_path: Path, piece_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "PIECE_TOKENS", piece_tokens)
    documents = [[], *make_documents(60, seed=2), [], [1, 2], []]
    split = TokenStore(make_store(tmp_path / "store", documents, num_shards=4)).split()
    chosen = choose_pieces(split.table.num_tokens, split.num_tokens)
    seen: list[int] = []
    token_of: list[tuple[int, int]] = []
    first_document, first_token = 0, 0
    for shard, lengths in enumerate(split.lengths()):
        edges = np.concatenate([[0], np.cumsum(lengths)]) + first_token
        for piece in cut_pieces(split, edges, chosen[shard], first_document=first_document):
            assert 0 < len(piece.ids) <= 2 * piece_tokens
            assert piece.first_token == len(seen)
            seen += piece.ids.tolist()
            assert (piece.lengths > 0).all()
            token_of += zip(np.repeat(piece.documents, piece.lengths).tolist(), piece.ids.tolist(), strict=True)
        first_document, first_token = first_document + len(lengths), int(edges[-1])
    assert seen == [token for document in documents for token in document]
    assert token_of == [(number, token) for number, document in enumerate(documents) for token in document]


@given(st.lists(st.integers(0, 400), min_size=1, max_size=8), st.integers(1, 500))
def test_chosen_pieces_are_spread_evenly(num_tokens: list[int], most_tokens: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "PIECE_TOKENS", 10)
        counts = [-(-some // 10) for some in num_tokens]
        chosen = choose_pieces(np.array(num_tokens), most_tokens)
        for some, count in zip(chosen, counts, strict=True):
            assert len(some) == 0 or 0 <= some.min() <= some.max() < count
        firsts = np.cumsum([0, *counts[:-1]])
        places = np.concatenate([some + first for some, first in zip(chosen, firsts, strict=True)])
        total = sum(counts)
        expected = total if sum(num_tokens) <= most_tokens else max(1, min(total, most_tokens // 10))
        assert len(places) == len(set(places.tolist())) == expected
        gaps = np.diff(places)
        assert not len(gaps) or gaps.max() - gaps.min() <= 1


def test_a_sample_is_said_to_be_one(odd_store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "PIECE_TOKENS", 64)
    figures = collect_figures(odd_store, sample_tokens=640)
    assert not figures.tokens.is_everything
    assert 300 <= figures.tokens.num_seen <= 1280
    assert figures.splits[0].totals.num_tokens == odd_store.num_tokens
    text = Page(page_of(odd_store, tmp_path, sample_tokens=640)).text
    assert f"From a sample of {figures.tokens.num_seen:,} tokens" in text
    assert "some of these may be in the rest of the store" in text
    assert "documents in the sample" in text
    whole = Page(page_of(odd_store, tmp_path)).text
    assert "sample of" not in whole
    assert "documents in the sample" not in whole


# Rows.


@pytest.mark.parametrize("seq_len", [5, 16, 40])
def test_rows_are_what_the_packings_make(tmp_path: Path, seq_len: int) -> None:
    documents = make_documents(120, seed=5)
    split = TokenStore(make_store(tmp_path / "store", documents)).split()
    fillings = {(some.method, some.long_documents): some for some in filling.fill_rows(split, seq_len)}
    concat = fillings["concat", "split"]
    rows = pack(split, seq_len=seq_len)
    where = [set(rows.rows_of(document)) for document in range(len(documents))]
    # The rest at the end of the stream is not in a row: a document that ends there is cut all the same.
    ends = np.cumsum([len(document) for document in documents])
    crosses = [
        len(some) > 1 or (len(some) == 1 and end > rows.num_tokens) for some, end in zip(where, ends, strict=True)
    ]
    assert concat.num_cut_documents == sum(crosses)
    assert concat.num_lost_tokens == int(ends[-1]) - rows.num_tokens
    num_long = sum(len(document) > seq_len for document in documents)
    for key in (("best-fit", "split"), ("pad", "split"), ("pad", "truncate")):
        assert fillings[key].num_cut_documents == num_long
    lost = sum(max(0, len(document) - seq_len) for document in documents)
    assert fillings["pad", "truncate"].num_lost_tokens == lost
    padded = fillings["pad", "truncate"]
    assert padded.padding == pytest.approx(1 - padded.num_tokens / (len(documents) * seq_len))


def test_drawn_rows_hold_the_documents_of_these_rows(tmp_path: Path) -> None:
    documents = make_documents(200, seed=6)
    split = TokenStore(make_store(tmp_path / "store", documents)).split()
    for some in filling.fill_rows(split, 16):
        rows = pack(split, seq_len=16, method=some.method, long_documents=some.long_documents)  # type: ignore[arg-type]
        assert len(some.rows) == 12
        for drawn in some.rows:
            tokens = rows[drawn.number].tolist()
            assert sum(segment.num_tokens for segment in drawn.segments) == len(tokens)
            for segment in drawn.segments:
                part = tokens[segment.start : segment.start + segment.num_tokens]
                document = documents[segment.document]
                assert (part[0] != document[0]) == segment.is_cut_before
                assert (part[-1] != document[-1]) == segment.is_cut_behind


def test_a_row_of_very_many_documents_is_drawn_in_part(tmp_path: Path) -> None:
    split = TokenStore(make_store(tmp_path / "store", [[number] for number in range(1, 1001)])).split()
    for some in filling.fill_rows(split, 500):
        for row in some.rows:
            assert len(row.segments) <= 200
            drawn = sum(segment.num_tokens for segment in row.segments)
            assert drawn + row.num_more_tokens == (1 if some.method == "pad" else 500)


# The page.


def test_the_page_loads_nothing_and_runs_one_known_script(odd_store: TokenStore, tmp_path: Path) -> None:
    text = page_of(odd_store, tmp_path)
    page = Page(text)
    kinds = [attributes.get("type") for attributes in page.named("script")]
    assert kinds == [None, "application/json"]
    (policy,) = [some["content"] for some in page.named("meta") if some.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'; ")
    for kind, source in (("script", page.scripts[0]), ("style", "".join(page.styles))):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    for _, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), attributes
            assert name not in {"src", "srcset", "style", "action"}
            if name == "href":
                assert value is not None and value.startswith(("#", "data:,"))
    assert not re.search(r"https?://|url\(|@import", text.replace(page.scripts[-1], ""))


def test_no_text_of_a_document_becomes_markup(odd_store: TokenStore, tmp_path: Path) -> None:
    page = Page(page_of(odd_store, tmp_path))
    assert not page.named("img")
    assert not {"b", "i", "s"} & {tag for tag, _ in page.elements}
    assert not re.search("[<>&\u2028\u2029]", page.scripts[-1])
    data = json.loads(page.scripts[-1])
    shown = [
        "".join(data["pieces"][str(token)] for token in document["ids"] if token < 256 and str(token) in data["pieces"])
        for document in data["documents"]
    ]
    for text in EVIL[:4]:
        assert text in shown
    assert not any(character in text for text in shown for character in "\x1b\x07\u202e\u2066\u2028")
    assert "odd <s>tore" in page.text
    assert "in <i>put.jsonl" in page.text
    assert "<b>s0</b>" in page.text


def test_tables_plots_and_links_are_accessible(odd_store: TokenStore, tmp_path: Path) -> None:
    page = Page(page_of(odd_store, tmp_path))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in page.named("th"):
        assert attributes.get("scope") in {"col", "row"}
    for attributes in page.named("svg"):
        assert attributes.get("aria-label") or attributes.get("aria-hidden") == "true"
    for attributes in page.named("section"):
        assert attributes["aria-labelledby"] in ids
    embedded = {f"{document['split']}-{document['number']}" for document in page.documents}
    targets = [str(attributes["href"])[1:] for attributes in page.named("a")]
    assert len(targets) > 20
    for target in targets:
        assert target in ids or target in embedded
    assert {attributes["for"] for attributes in page.named("label")} == {"find"}
    (html,) = page.named("html")
    assert html["lang"] == "en"


def test_embedded_documents_read_as_their_text(open_tiny_store: Callable[[], TokenStore], tmp_path: Path) -> None:
    store = open_tiny_store()
    page = Page(page_of(store, tmp_path))
    data = json.loads(page.scripts[-1])
    texts = {text.replace("\u200b", "<200B>") for text in make_texts(300, seed=1)}
    assert len(data["documents"]) > 150
    for document in data["documents"]:
        assert document["ids"] == store.splits[document["split"]].document(document["number"]).tolist()
        text, place = "", 0
        shared = {start: (count, text) for start, count, text in document.get("shared", [])}
        while place < len(document["ids"]) - 1:
            count, piece = shared.get(place) or (1, data["pieces"][str(document["ids"][place])])
            text, place = text + piece, place + count
        assert text in texts
        assert document["keys"]["id"][0] in "ab"
        assert document["ids"][-1] in data["specials"]


def test_a_page_is_small_however_much_there_is_to_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["漢字😀 and more " * 300, *["word " * 2000] * 30]
    path = write_jsonl(tmp_path / "in.jsonl", texts, note="n" * 100_000)
    store = tokenize_here(path, tmp_path / "store", tokenizer="bytes", keep_keys=["note"])
    monkeypatch.setattr(browsing, "MOST_BYTES", 40_000)
    text = page_of(store, tmp_path)
    page = Page(text)
    assert len(page.scripts[-1]) < 45_000
    assert len(text) < 150_000
    assert len(page.documents) == 31
    for document in page.documents:
        ids = store.document(document["number"]).tolist()
        head = document["head"]
        assert document["ids"] == [*ids[:head], *ids[len(ids) - (len(document["ids"]) - head) :]]
        assert document["hidden"] == len(ids) - len(document["ids"])
        assert not any("\ufffd" in text for _, _, text in document.get("shared", []))
        assert len(document["keys"]["note"]) <= 201


def test_the_same_store_gives_the_same_bytes(odd_store: TokenStore, tmp_path: Path) -> None:
    report(odd_store, tmp_path / "a.html", json=tmp_path / "a.json")
    report(TokenStore(odd_store.path), tmp_path / "b.html", json=tmp_path / "b.json")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_the_json_has_the_figures_of_the_page(odd_store: TokenStore, tmp_path: Path) -> None:
    figures = report(odd_store, tmp_path / "a.html", json=tmp_path / "a.json", seq_len=64)
    data = (tmp_path / "a.json").read_bytes()
    assert msgspec.json.decode(data, type=Figures) == figures
    assert str(tmp_path) not in data.decode()
    assert str(tmp_path) not in (tmp_path / "a.html").read_text("utf-8")


def test_a_store_of_one_document_has_a_page(tmp_path: Path) -> None:
    store = tokenize_here(write_jsonl(tmp_path / "in.jsonl", ["one"]), tmp_path / "store", tokenizer="bytes")
    (store.path / "run.json").unlink()
    text = Page(page_of(store, tmp_path)).text
    assert "a row of 2,048 needs 2,049" in text
    assert "no readable run.json" in text
    assert "No token comes up four times in a row." in text


def test_a_store_without_documents_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("")
    store = tokenize_here(tmp_path / "in.jsonl", tmp_path / "store", tokenizer="bytes")
    text = Page(page_of(store, tmp_path)).text
    assert "This split has no documents." in text
    assert "The store has no tokens." in text
    assert "0 in = 0 out + 0 rejects" in text


# The run, and checks.


def with_attempts(
    store: TokenStore, attempts: list[list[Moment]], *, apart: float = 3600.0, world_size: int = 1, **fields: Any
) -> TokenStore:
    """The store with a run.json of its own, whose attempts began so many seconds after each other."""
    path = store.path / "run.json"
    info = decode_sealed(path.read_bytes(), RunInfo, path)
    last: Snapshot = info.attempts[-1].last
    made = [
        AttemptInfo(
            pid=1,
            started=1e9 + number * apart,
            completed=number == len(attempts) - 1,
            reason=None if number == len(attempts) - 1 else "a.jsonl line 7: not <JSON>",
            rank=number if world_size > 1 else 0,
            world_size=world_size,
            peak_memory_bytes=max((moment.memory_bytes for moment in history), default=0),
            num_recycled=0,
            num_retried=0,
            last=msgspec.structs.replace(
                last, **fields, startup_seconds=0.0, seconds=history[-1].seconds if history else 0.0
            ),
            history=history,
        )
        for number, history in enumerate(attempts)
    ]
    path.write_bytes(encode_sealed(RunInfo(machine=info.machine, attempts=made)))
    return store


def test_a_run_is_drawn_attempt_by_attempt(tiny_store: Path, tmp_path: Path) -> None:
    first = [Moment(float(second), second * 40_000_000, second, 500_000_000) for second in range(20)]
    second = [Moment(float(second), second * 80_000_000, second, 700_000_000) for second in range(200)]
    store = with_attempts(TokenStore(tiny_store), [first, second], memory_limit=1_000_000_000)
    text = page_of(store, tmp_path)
    assert text.count("<polyline") == 4
    assert "40 MB/s at " in text
    assert "80 MB/s at " in text
    assert "0.7 GB at 00:19" in text
    assert 'class="limit"' in text
    page = Page(text)
    assert "a.jsonl line 7: not <JSON>" in page.text
    assert "complete" in page.text
    assert "2001-09-09 01:46 UTC" in page.text


def test_ranks_are_drawn_at_the_same_time(tiny_store: Path, tmp_path: Path) -> None:
    moments = [Moment(float(second), second * 40_000_000, second, 500_000_000) for second in range(20)]
    store = with_attempts(TokenStore(tiny_store), [moments, moments], apart=3.0, world_size=2)
    text = page_of(store, tmp_path)
    assert "0.5 GB at 00:22" in text
    assert "0.5 GB at 00:23" not in text
    assert "rank 1 of 2" in Page(text).text


def test_a_short_run_has_a_point_in_each_plot(tiny_store: Path, tmp_path: Path) -> None:
    text = page_of(with_attempts(TokenStore(tiny_store), [[Moment(2.0, 80_000_000, 1, 300_000_000)]]), tmp_path)
    assert "40 MB/s at 00:01" in text
    for points in re.findall(r'<polyline [^>]*points="([^"]*)"', text):
        first, second = points.split()
        assert first == second


def test_a_limit_that_memory_never_came_near_is_not_drawn(tiny_store: Path, tmp_path: Path) -> None:
    moments = [Moment(float(second), second * 1_000_000, second, 100_000_000) for second in range(3)]
    store = with_attempts(TokenStore(tiny_store), [moments], memory_limit=10_000_000_000)
    assert 'class="limit"' not in page_of(store, tmp_path)


def test_a_run_without_history_has_its_table(tiny_store: Path, tmp_path: Path) -> None:
    text = page_of(with_attempts(TokenStore(tiny_store), [[]]), tmp_path)
    assert "No history of speed and memory was kept" in text
    assert "<polyline" not in text


def test_shards_that_were_looked_at_take_no_memory(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", make_texts(2000, seed=5))
    store = tokenize_here(path, tmp_path / "store", tokenizer="bytes", task_bytes="100KB")
    assert len(store.split().table.stems) > 3
    figures = collect_figures(store)
    assert figures.tokens.is_everything and not figures.suspicions[1].num_documents
    assert resident_bytes(tmp_path / "store") == 0
    assert len(store.split().read(0, 499)) == 499
    assert resident_bytes(tmp_path / "store") > 0


def resident_bytes(folder: Path) -> int:
    """How many bytes of the shards' tokens are in the memory of this process."""
    total, is_here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_here = str(folder) in line and line.endswith(".bin")
        elif is_here and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def test_a_damaged_run_file_is_left_out(tiny_store: Path, tmp_path: Path) -> None:
    (tiny_store / "run.json").write_bytes(b"\xff{")
    assert collect_figures(TokenStore(tiny_store)).run is None


def test_files_of_another_size_are_listed(tiny_store: Path, tmp_path: Path) -> None:
    with (tiny_store / "rejects.jsonl").open("ab") as file:
        file.write(b"\n")
    done = tokenmill_here("report", tiny_store, "-o", tmp_path / "page.html")
    assert done.returncode == 1
    assert "has 1 problem; " in sentence(done)
    text = Page((tmp_path / "page.html").read_text("utf-8")).text
    assert "store/rejects.jsonl has" in text
    assert "sizes agree" not in text


def test_with_verify_every_byte_is_read(tiny_store: Path, tmp_path: Path) -> None:
    text = Page(page_of(TokenStore(tiny_store), tmp_path, verify=True)).text
    assert "tokenmill verify read every byte" in text
    shard = next((tiny_store / "train").glob("*.bin"))
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    assert "sizes agree" in Page(page_of(TokenStore(tiny_store), tmp_path)).text
    text = Page(page_of(TokenStore(tiny_store), tmp_path, verify=True)).text
    assert f"store/train/{shard.name}" in text
    assert "sound" not in text


def test_a_damaged_table_of_documents_is_an_error(tiny_store: Path) -> None:
    next((tiny_store / "train").glob("*.docs.parquet")).write_bytes(b"PAR1")
    with pytest.raises(StoreError, match=r"docs\.parquet cannot be read .*run tokenmill verify"):
        collect_figures(TokenStore(tiny_store))


def test_an_id_that_no_tokenizer_made_is_an_error(tiny_store: Path) -> None:
    shard = next((tiny_store / "train").glob("*.bin"))
    data = bytearray(shard.read_bytes())
    data[:2] = b"\xff\xff"
    shard.write_bytes(data)
    with pytest.raises(StoreError, match="holds the id 65535 and its tokenizer has 600; run tokenmill verify"):
        collect_figures(TokenStore(tiny_store))


# The command.


def test_the_command_writes_the_page_and_prints_its_path(tiny_store: Path, tmp_path: Path) -> None:
    done = tokenmill_here(
        "report", tiny_store, "-o", tmp_path / "r.html", "--seq-len", "128", "--json", tmp_path / "r.json"
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout == f"{tmp_path / 'r.html'}: 300 documents, {TokenStore(tiny_store).manifest.num_tokens:,} tokens\n"
    )
    assert "Rows of 128 tokens" in Page((tmp_path / "r.html").read_text("utf-8")).text
    assert json.loads((tmp_path / "r.json").read_bytes())["seq_len"] == 128


def test_a_path_that_cannot_be_written_is_refused_before_anything_is_read(tiny_store: Path, tmp_path: Path) -> None:
    store = TokenStore(tiny_store)
    (tmp_path / "there.html").write_text("precious")
    for out, options, message in (
        ("there.html", {}, "there.html exists; choose another name, or pass --overwrite"),
        ("new.html", {"json": tmp_path / "there.html"}, "there.html exists"),
        (".", {}, "is a directory; name a file"),
        ("nowhere/page.html", {}, "nowhere is not a directory; make it first"),
        ("new.html", {"seq_len": 0}, "--seq-len 0 must be a whole number, at least 1"),
        ("new.html", {"sample_tokens": 0}, "--sample-tokens 0 must be a whole number, at least 1"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            report(store, tmp_path / out, **options)  # type: ignore[arg-type]
    assert (tmp_path / "there.html").read_text() == "precious"
    assert not (tmp_path / "new.html").exists()
    report(store, tmp_path / "there.html", overwrite=True)
    assert (tmp_path / "there.html").read_text("utf-8").startswith("<!doctype html>")


def test_an_unfinished_run_has_no_report(tiny_store: Path, tmp_path: Path) -> None:
    (tiny_store / "manifest.json").unlink()
    (tiny_store / ".tasks").mkdir()
    done = tokenmill_here("report", tiny_store, "-o", tmp_path / "page.html")
    assert done.returncode == 1
    assert "is an unfinished run; run the same tokenize command again" in sentence(done)


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0, "0%"), (1, "100%"), (0.00001, "<0.01%"), (0.0012, "0.12%"), (0.031, "3.1%"), (0.9999, ">99.9%")],
)
def test_shares_never_round_to_what_they_are_not(share: float, shown: str) -> None:
    assert format_share(share) == shown


def test_exact_duplicates_are_counted_and_the_most_copied_come_first(tmp_path: Path) -> None:
    long = "long " * 30_000  # more than two pieces
    texts = ["one", "two", "one", long, "", "", "owt", "one", long, "two", *make_texts(50, seed=9)]
    store = tokenize_here(
        write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out", tokenizer="bytes", task_bytes=9000
    )
    assert len(store.manifest.splits["train"].shards) > 1
    found = next(some for some in collect_figures(store).suspicions if some.name == "exact duplicates")
    filled = [text for text in texts if text]
    assert (found.num_looked_at, found.num_documents) == (len(texts), len(filled) - len(set(filled)))
    named = [(example.document, example.detail.split()[0]) for example in found.examples]
    assert named[:3] == [(0, "3"), (1, "2"), (3, "2")]
    assert [example.num_tokens for example in found.examples[:3]] == [4, 4, len(long) + 1]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=30), st.integers(1, 40))
def test_duplicates_are_those_of_a_set_however_the_tokens_are_cut(documents: list[list[int]], size: int) -> None:
    edges = np.cumsum([0, *map(len, documents)])
    ids = np.concatenate([np.array(one, np.int32) for one in documents])
    hashes, tally = ShardHashes(edges, 100), DuplicateTally(1)
    for first in range(0, len(ids), size):
        stop = min(first + size, len(ids))
        some = np.flatnonzero((edges[1:] > first) & (edges[:-1] < stop))
        starts = np.maximum(edges[some], first) - first
        hashes.add(counting.Piece(ids[first:stop], starts, some + 100, first, None))
    tally.add(0, hashes)
    num_copies, copies = tally.count()
    counts = Counter(map(tuple, documents))
    assert (tally.num_looked_at, num_copies) == (len(documents), len(documents) - len(counts))
    for one in copies:
        assert counts[tuple(documents[one.document - 100])] == one.num_equal > 1
        assert documents.index(documents[one.document - 100]) == one.document - 100


def test_splits_are_drawn_on_the_same_axes(tmp_path: Path) -> None:
    texts = ["x" * size for size in (*range(1, 400, 7), *[900] * 40)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    store = tokenize_here(path, tmp_path / "out", tokenizer="bytes", val_fraction=0.3)
    page = page_of(store, tmp_path)
    plots = re.findall(r'<svg class="plot"[^>]*aria-label="Histogram.*?</svg>', page)
    assert len(plots) == 2
    axes = [
        re.findall(r'<text x="[^"]*" y="[^"]*" text-anchor="(?:end|middle)">([^<]*)</text>', plot) for plot in plots
    ]
    assert axes[0] == axes[1]
    assert [plot.count('class="hover"') for plot in plots] == [plots[0].count('class="hover"')] * 2
