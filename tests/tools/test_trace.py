"""Tracing: a step's documents are those of the loader's batch, and every document is found at exactly its steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tokenmill as tm
from tests.conftest import make_texts, write_jsonl
from tests.support.in_process import tokenmill_here
from tests.support.running import tokenize_here
from tests.support.stores import collect, make_documents, make_store
from tokenmill.errors import UsageError
from tokenmill.tools.trace import trace_document, trace_step

CASES = ["concat", "best-fit", "pad"]


def rows_of(store: Any, packing: Any) -> tm.Rows:
    return tm.shuffle(tm.pack(store, seq_len=16, method=packing), seed=2)


@pytest.mark.parametrize("packing", CASES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_step_has_the_documents_of_its_batches(tmp_path: Path, packing: str, world_size: int) -> None:
    store = tm.open(make_store(tmp_path, make_documents(400, longest=50)))
    rows = rows_of(store, packing)
    for step in (0, 7, 2 * len(rows) // (4 * world_size)):
        trace = trace_step(rows, step, batch_size=4, world_size=world_size)
        assert [row.row for row in trace.rows] == list(range(step * 4 * world_size, (step + 1) * 4 * world_size))
        for rank in range(world_size):
            loader = tm.Loader(rows, batch_size=4, rank=rank, world_size=world_size)
            loader.seek(step * 4 * world_size)
            (batch,) = collect(loader, 1)
            mine = [row.documents for row in trace.rows if row.rank == rank]
            assert [[(d.document, d.start, d.num_tokens) for d in row] for row in mine] == batch.documents


@pytest.mark.parametrize("packing", CASES)
@pytest.mark.parametrize("denied", [(), (3, 4, 9)], ids=["all", "some"])
def test_the_place_in_a_document_is_that_of_the_tokens(tmp_path: Path, packing: str, denied: tuple[int, ...]) -> None:
    store = tm.open(make_store(tmp_path, make_documents(200, longest=90)))
    documents = tm.deny(store, denied)
    rows = tm.shuffle(tm.pack(documents, seq_len=16, method=packing), seed=2)
    sightings: dict[int, list[tuple[int, int, int]]] = {}
    for step in range(-(-len(rows) // 4)):
        for row in trace_step(rows, step, batch_size=4).rows:
            ids = rows[row.row].tolist()
            for part in row.documents:
                tokens = documents.document(part.document)[part.offset : part.offset + part.num_tokens]
                assert ids[part.start : part.start + part.num_tokens] == tokens.tolist()
                if row.row < len(rows):
                    sightings.setdefault(part.document, []).append((step, part.start, part.offset))
    assert any(offset for places in sightings.values() for _, _, offset in places)
    found = trace_document(rows, 5, batch_size=4)
    assert [(one.step, one.start, one.offset) for one in found] == sightings[5]


@pytest.mark.parametrize("packing", CASES)
def test_a_document_is_found_at_exactly_its_steps(tmp_path: Path, packing: str) -> None:
    store = tm.open(make_store(tmp_path, make_documents(120, longest=50)))
    rows = rows_of(store, packing)
    expected: dict[int, list[tuple[int, int, int, int, int]]] = {number: [] for number in range(120)}
    for step in range(-(-2 * len(rows) // 6)):
        for place, row in enumerate(trace_step(rows, step, batch_size=3, world_size=2).rows):
            for document in row.documents:
                if row.row < 2 * len(rows):
                    entry = (step, place // 3, place % 3, document.start, document.num_tokens)
                    expected[document.document].append(entry)
    for number in range(120):
        found = trace_document(rows, number, batch_size=3, world_size=2, epochs=2)
        assert [(s.step, s.rank, s.place, s.start, s.num_tokens) for s in found] == expected[number]


def test_mixtures_are_traced_through(tmp_path: Path) -> None:
    stores = [tm.open(make_store(tmp_path / str(n), make_documents(90, seed=n))) for n in range(2)]
    rows = tm.mix([(rows_of(stores[0], "concat"), 0.7), (rows_of(stores[1], "best-fit"), 0.3)], seed=1)
    for leaf, name in ((0, "0/train"), (1, "1/train")):
        for number in (0, 30, 89):
            for sighting in trace_document(rows, number, batch_size=2, leaf=leaf, epochs=3):
                row = trace_step(rows, sighting.step, batch_size=2).rows[sighting.place]
                found = [(d.source, d.document, d.start, d.num_tokens) for d in row.documents]
                assert (name, number, sighting.start, sighting.num_tokens) in found


def test_steps_and_documents_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    rows = rows_of(tm.open(make_store(tmp_path, make_documents(90))), "concat")
    with pytest.raises(UsageError, match="step -1 does not exist"):
        trace_step(rows, -1, batch_size=2)
    with pytest.raises(UsageError, match="document 90 is not in .*, which has 90"):
        trace_document(rows, 90, batch_size=2)


def test_the_command_line_names_inputs_and_kept_fields(tmp_path: Path, tiny_tokenizer: Path) -> None:
    texts = [text for text in make_texts(200, seed=2) if text]
    corpus = write_jsonl(tmp_path / "web.jsonl", texts, id=[f"doc-{n}" for n in range(len(texts))])
    store = tmp_path / "store"
    tokenize_here(corpus, store, tokenizer=str(tiny_tokenizer), keep_keys=["id"])
    flags = ["--seq-len", "64", "--batch-size", "4", "--world-size", "2"]
    shown = tokenmill_here("trace", store, "--step", "3", *flags)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("step 3: 8 rows, ")
    trace = json.loads(tokenmill_here("trace", store, "--step", "3", *flags, "--json").stdout)
    for row in trace["rows"]:
        for document in row["documents"]:
            assert document["input"] == "web.jsonl"
            assert document["keys"] == {"id": f"doc-{document['document']}"}
    first = trace["rows"][5]["documents"][0]
    sightings = json.loads(
        tokenmill_here("trace", store, "--document", str(first["document"]), *flags, "--json").stdout
    )
    own = {name: first[name] for name in ("start", "offset", "num_tokens")}
    assert {"step": 3, "rank": 1, "place": 1, "epoch": 0, **own} in sightings
    whole = tokenmill_here("trace", store, "--document", "0", "--packing", "best-fit", "--seq-len", "4096")
    assert whole.stdout.startswith("document 0: in 1 step of 1 epoch")
    wrong = tokenmill_here("trace", store, *flags)
    assert wrong.returncode == 2
    assert "either --step N" in wrong.stderr


def test_the_documents_of_a_step_fit_the_lines_of_a_terminal(tmp_path: Path, tiny_tokenizer: Path) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_texts(3000, seed=2))
    tokenize_here(corpus, tmp_path / "store", tokenizer=str(tiny_tokenizer))
    flags = ["--seq-len", "2048", "--batch-size", "4"]
    shown = tokenmill_here("trace", tmp_path / "store", "--step", "3", *flags, env={"COLUMNS": "80"}).stdout
    lines = [line for line in shown.splitlines() if "corpus.jsonl, position " in line]
    assert lines and all(line.rstrip()[-1].isdigit() for line in lines)
