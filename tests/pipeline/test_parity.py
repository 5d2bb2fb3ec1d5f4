"""The parity gate: a wrong engine is found and reported, and nothing is published before the gate has passed."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import make_texts, write_jsonl
from tests.support.running import Contradicting, ThreadExecutor, write_parquet
from tokenmill.engines import create, load_tokenizer
from tokenmill.errors import TokenmillError
from tokenmill.executors.base import Answer, Call, CallEvent, Place, Started
from tokenmill.executors.local import LocalExecutor
from tokenmill.inputs import Input
from tokenmill.pipeline.input_file import inspect_inputs
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.run import run
from tokenmill.pipeline.task.parity import GateResult, Sample, _differing_documents, mismatches, take_sample
from tokenmill.pipeline.workers.messages import Finished, decode_answer
from tokenmill.readers import ReadOptions
from tokenmill.store.store import TokenStore
from tokenmill.text_batch import TokenBatch


class Slip:
    """An engine that gets one id of one text wrong."""

    name = "slip"
    num_rerouted = 0

    def __init__(self, engine: Any, text: str) -> None:
        self._engine = engine
        self._text = text

    def encode(self, texts: list[str]) -> TokenBatch:
        batch = self._engine.encode(texts)
        if self._text in texts:
            ids = np.array(batch.ids)
            ids[batch.offsets[texts.index(self._text)]] += 1
            batch = TokenBatch(ids, batch.offsets)
        return batch

    takes_packed = False

    memory_per_character = 1

    def split(self, text: str, size: int) -> list[str]:
        return [text]

    def recycle(self) -> None:
        pass


def test_one_wrong_id_in_a_thousand_documents_is_found(tiny_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_tokenizer))
    reference = create("huggingface", tokenizer)
    texts = [f"{number} {text}" for number, text in enumerate(make_texts(1000, seed=11))]
    assert mismatches(create("gigatoken", tokenizer), reference, texts) == []
    assert mismatches(Slip(reference, texts[777]), reference, texts) == [texts[777]]


def sample_of(paths: list[Path], engine: Any = None, **options: Any) -> Sample:
    settings = ReadOptions(**options)
    split = engine.split if engine is not None else lambda text, size: [text]
    inputs = [Input(str(path)) for path in paths]
    return take_sample(inspect_inputs(inputs, "auto", settings), settings, split)


def test_ten_thousand_tiny_inputs_give_a_thousand_documents_and_2_mb(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"{number:04d}.txt").write_text(f"{number} " + "word " * 180)
    paths = sorted(tmp_path.iterdir())
    sample = sample_of(paths)
    numbers = sorted(int(document.texts[0].split()[0]) for document in sample.documents)
    assert len(numbers) == len(set(numbers)) >= 1000
    assert sample.num_characters >= 2e6
    # The sample is spread over the inputs even if reading stops early.
    assert max(b - a for a, b in pairwise([0, *numbers, 3000])) < 10
    assert len(sample_of(paths[:700]).documents) == 700


def test_documents_come_from_all_row_groups_of_parquet_and_all_parts_of_large_files(tmp_path: Path) -> None:
    texts = [f"{number} " + "word " * 60 for number in range(20_000)]
    for path in (
        write_parquet(tmp_path / "a.parquet", texts, rows_per_group=500),
        write_jsonl(tmp_path / "a.jsonl", texts),
    ):
        numbers = sorted(int(document.texts[0].split()[0]) for document in sample_of([path]).documents)
        assert max(b - a for a, b in pairwise([0, *numbers, 20_000])) < 1500


def test_long_documents_are_compared_whole_while_the_sample_is_bounded(tmp_path: Path, tiny_tokenizer: Path) -> None:
    engine = create("gigatoken", load_tokenizer(str(tiny_tokenizer)))
    texts = [f"{number} " + "some words " * 80_000 for number in range(20)]
    path = write_jsonl(tmp_path / "a.jsonl", [*texts, "short"])
    sample = sample_of([path], engine)
    assert len(sample.documents) == 21
    assert sample.num_in_parts == 0
    assert sorted("".join(document.texts) for document in sample.documents) == sorted([*texts, "short"])
    assert max(len(text) for document in sample.documents for text in document.texts) < 60_000
    # Where an engine cannot cut a text, and of texts beyond all bounds, parts are compared and counted as such.
    (document,) = sample_of([write_jsonl(tmp_path / "b.jsonl", texts[:1])]).documents
    assert not document.is_whole
    assert (document.texts[0], document.texts[-1]) == (texts[0][:1000], texts[0][-1000:])
    write_jsonl(tmp_path / "c.jsonl", texts * 3)
    sample = sample_of([tmp_path / "c.jsonl"], engine)
    assert len(sample.documents) == 60
    assert 20 < sample.num_in_parts < 45


def test_a_wrong_id_anywhere_in_a_long_document_is_found(tmp_path: Path, tiny_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_tokenizer))
    reference = create("huggingface", tokenizer)
    text = " ".join(make_texts(1500, seed=3)) + " the end of it"
    (document,) = sample_of([write_jsonl(tmp_path / "a.jsonl", [text])], reference).documents
    assert len(document.texts) > 2
    assert _differing_documents(create("gigatoken", tokenizer), reference, [document]) == []
    last = document.texts[-1]
    assert _differing_documents(Slip(reference, last), reference, [document]) == [last]
    assert _differing_documents(Slip(reference, text), reference, [document]) == [document.texts[0]]


def test_the_first_screen_and_the_manifest_count_documents_compared_in_parts(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    write_jsonl(tmp_path / "corpus.jsonl", ["x" * 1_200_000, "short"])
    request = Request.from_flags(
        {"inputs": [str(tmp_path / "corpus.jsonl")], "out": str(tmp_path / "s"), "tokenizer": str(tiny_tokenizer)}
    )
    display = Heard()
    parity = run(request, display, ThreadExecutor()).manifest.engine.parity
    assert parity is not None
    assert (parity.num_documents, parity.num_in_parts, parity.num_bytes) == (2, 1, 4005)
    assert any("documents, 1 of them in parts (0.0 MB)" in line for line in display.lines)


class Listening(LocalExecutor):
    """Real processes; holds the gate's answer back until both workers have an unpublished task."""

    def __init__(self) -> None:
        super().__init__()
        self.delayed: list[CallEvent] = []
        self.num_held = 0
        self.kill_at: int | None = None
        self.answers: list[type] = []
        self.published_too_early = False
        self.store: Path | None = None
        self._places: dict[Call, Place] = {}

    def wait(self, timeout: float) -> list[CallEvent]:
        events = []
        for event in super().wait(timeout):
            if isinstance(event, Started):
                self._places[event.call] = event.place
            message = decode_answer(event.data) if isinstance(event, Answer) else None
            if message is not None:
                self.answers.append(type(message))
            if isinstance(message, GateResult):
                self.delayed.append(event)
                continue
            if isinstance(message, Finished) and message.mark is not None:
                self.num_held += 1
                if self.num_held == self.kill_at:
                    os.kill(self._places[event.call].pid, signal.SIGKILL)
            events.append(event)
        if self.delayed and self.num_held >= 2:
            assert self.store is not None
            self.published_too_early |= any(self.store.glob("train/*.bin"))
            events += self.delayed
            self.delayed = []
        return events


def request_for(folder: Path, tokenizer: Path, **flags: Any) -> Request:
    corpus = write_jsonl(folder / "corpus.jsonl", make_texts(600, seed=3))
    flags = {"workers": 2, "task_bytes": "20KB", **flags}
    return Request.from_flags(
        {"inputs": [str(corpus)], "out": str(folder / "store"), "tokenizer": str(tokenizer), **flags}
    )


class Heard:
    """A display that records its messages."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str, style: str = "") -> None:
        self.lines.append(text)

    def update(self, snapshot: Any) -> None:
        pass

    def close(self) -> None:
        pass


def test_workers_begin_beside_the_gate_and_publish_nothing_before_it(tmp_path: Path, tiny_tokenizer: Path) -> None:
    executor = Listening()
    executor.store = tmp_path / "store"
    outcome = run(request_for(tmp_path, tiny_tokenizer), Heard(), executor)
    assert executor.num_held == 2
    assert not executor.published_too_early
    assert outcome.manifest.num_documents == 600


def test_a_worker_that_dies_before_its_task_is_published_loses_nothing(tmp_path: Path, tiny_tokenizer: Path) -> None:
    executor = Listening()
    executor.store = tmp_path / "store"
    executor.kill_at = 1
    outcome = run(request_for(tmp_path, tiny_tokenizer), Heard(), executor)
    assert outcome.manifest.num_documents == 600
    assert not list((tmp_path / "store").rglob("*.tmp"))


def test_with_little_memory_the_gate_comes_first(tmp_path: Path, tiny_tokenizer: Path) -> None:
    executor = Listening()
    executor.store = tmp_path / "store"
    executor.num_held = 2
    assert run(request_for(tmp_path, tiny_tokenizer, memory="560MB"), Heard(), executor).manifest.num_documents == 600
    assert executor.answers[0] is GateResult


class ContradictingProcesses(Contradicting, LocalExecutor):
    """Real processes, whose gate reports a difference the first time."""


def test_a_difference_falls_back_to_the_reference_and_says_so(tmp_path: Path, tiny_tokenizer: Path) -> None:
    display = Heard()
    outcome = run(request_for(tmp_path, tiny_tokenizer), display, ContradictingProcesses())
    assert any("gigatoken differs from huggingface on 1 of" in line and "slower" in line for line in display.lines)
    assert outcome.manifest.engine.name == "huggingface"
    assert outcome.manifest.engine.parity is not None
    assert outcome.manifest.engine.parity.num_mismatches == 1
    exact = run(request_for(tmp_path / "again", tiny_tokenizer), Heard(), LocalExecutor())
    ours, theirs = TokenStore(tmp_path / "store"), TokenStore(tmp_path / "again" / "store")
    assert exact.manifest.engine.name == "gigatoken"
    assert [shard.files[".bin"] for shard in ours.manifest.splits["train"].shards] == [
        shard.files[".bin"] for shard in theirs.manifest.splits["train"].shards
    ]
    assert not list((tmp_path / "store").rglob("*.tmp"))


def test_a_difference_of_an_engine_that_was_named_ends_the_run(tmp_path: Path, tiny_tokenizer: Path) -> None:
    request = request_for(tmp_path, tiny_tokenizer, engine="gigatoken")
    with pytest.raises(TokenmillError, match=r"gigatoken differs from huggingface .* use --engine auto"):
        run(request, Heard(), ContradictingProcesses())
    assert not list((tmp_path / "store").rglob("*.bin"))
    assert not list((tmp_path / "store").rglob("*.tmp"))
