"""The parity gate: a wrong engine is found and reported, and nothing is published before the gate has passed."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.conftest import make_texts, write_jsonl
from tests.support.running import Contradicting, ThreadExecutor, write_parquet
from tokenmill.engines import create, load_tokenizer
from tokenmill.errors import TokenmillError
from tokenmill.executors.base import Answer, Call, CallEvent, Place, Started
from tokenmill.executors.local import LocalExecutor
from tokenmill.inputs import Input
from tokenmill.pipeline.inspection import inspect_inputs
from tokenmill.pipeline.journal.journal import TaskEntry
from tokenmill.pipeline.parity import Compared, ParityCheck, mismatches, pair_up
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.run import run
from tokenmill.pipeline.task.gate_sample import GateSample, Sample, take_sample
from tokenmill.pipeline.task.task_sample import cut_window
from tokenmill.pipeline.workers.messages import Finished, RunGate, decode_answer, decode_order, encode
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


def sample_of(paths: list[Path], **options: Any) -> Sample:
    settings = ReadOptions(**options)
    return take_sample(inspect_inputs([Input(str(path)) for path in paths], "auto", settings), settings)


def numbers_of(sample: Sample) -> list[int]:
    return sorted(int(text.split()[0]) for text in sample.texts)


def test_thousands_of_tiny_inputs_give_a_thousand_documents_spread_over_them(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"{number:04d}.txt").write_text(f"{number} " + "word " * 90)
    paths = sorted(tmp_path.iterdir())
    numbers = numbers_of(sample_of(paths))
    assert len(numbers) == len(set(numbers)) == 1000
    assert max(b - a for a, b in pairwise([0, *numbers, 3000])) < 10
    assert sample_of(paths[:700]).num_documents == 700


def test_documents_come_from_all_row_groups_of_parquet_and_all_parts_of_large_files(tmp_path: Path) -> None:
    texts = [f"{number} " + "word " * 60 for number in range(20_000)]
    for path in (
        write_parquet(tmp_path / "a.parquet", texts, rows_per_group=500),
        write_jsonl(tmp_path / "a.jsonl", texts),
    ):
        numbers = numbers_of(sample_of([path]))
        assert max(b - a for a, b in pairwise([0, *numbers, 20_000])) < 1500


def test_the_sample_is_a_share_of_a_small_corpus_and_at_most_3_mb(tmp_path: Path) -> None:
    sizes = []
    for count in (60, 60_000):
        text = " ".join(f"word{number}" for number in range(2000))
        path = write_jsonl(tmp_path / f"{count}.jsonl", [f"{number} {text}" for number in range(count // 12)])
        sample = sample_of([path])
        assert sample.num_in_parts == sample.num_documents
        sizes.append(sum(map(len, sample.texts)))
    assert 1_000 < sizes[0] < 510_000
    assert 1_000_000 < sizes[1] < 3_010_000


def test_windows_of_one_long_document_cover_it_from_start_to_end(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(50_000)]
    sample = sample_of([write_jsonl(tmp_path / "a.jsonl", [" ".join(words), "short"])])
    assert (sample.num_documents, sample.num_in_parts) == (2, 1)
    windows = [text for text in sample.texts if text != "short"]
    firsts = sorted(int(window.split()[1].removeprefix("w")) for window in windows)
    assert len(windows) == 16
    assert max(b - a for a, b in pairwise([0, *firsts, 50_000])) < 4_500
    assert all(window.startswith(" ") for window in windows if "w0 " not in window)
    assert words[-1] in " ".join(windows)
    assert cut_window("a" * 50, 7, 9) == "a" * 9


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
    assert (parity.num_documents, parity.num_in_parts, parity.num_bytes) == (2, 1, 16 * 1000 + 5)
    assert any("documents, 1 of them in parts (16 kB)" in line for line in display.lines)


def collect_all(parity_check: ParityCheck) -> list[Compared]:
    found = []
    while parity_check.num_open:
        found += parity_check.take()
    return found


def test_a_comparison_says_which_texts_differ_and_passes_on_errors(tiny_tokenizer: Path) -> None:
    reference = create("huggingface", load_tokenizer(str(tiny_tokenizer)))
    texts = make_texts(900, seed=1)
    pairs = pair_up(texts, Slip(reference, texts[777]).encode(texts))
    parity_check = ParityCheck(lambda: reference, 3)
    parity_check.submit("good", pairs[:700])
    parity_check.submit("bad", pairs)
    parity_check.submit("empty", [])
    results = {one.name: [text.text for text in one.differing] for one in collect_all(parity_check)}
    assert results == {"good": [], "bad": [texts[777]], "empty": []}
    assert parity_check.names == {"good", "bad", "empty"}
    parity_check.close()

    def fail() -> Any:
        raise TokenmillError("no reference")

    parity_check = ParityCheck(fail, 1)
    parity_check.submit("any", pairs)
    with pytest.raises(TokenmillError, match="no reference"):
        collect_all(parity_check)


class Listening(LocalExecutor):
    """Real processes; holds the gate's sample back until several tasks wait to be published."""

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
            if isinstance(message, GateSample):
                self.delayed.append(event)
                continue
            if isinstance(message, Finished) and message.mark is not None:
                self.num_held += 1
                if self.num_held == self.kill_at:
                    os.kill(self._places[event.call].pid, signal.SIGKILL)
            events.append(event)
        if self.delayed and self.num_held >= 5:
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
    assert executor.num_held >= 5
    assert not executor.published_too_early
    assert outcome.manifest.num_documents == 600


def test_a_worker_that_dies_before_its_task_is_published_loses_nothing(tmp_path: Path, tiny_tokenizer: Path) -> None:
    executor = Listening()
    executor.store = tmp_path / "store"
    executor.kill_at = 1
    outcome = run(request_for(tmp_path, tiny_tokenizer), Heard(), executor)
    assert outcome.manifest.num_documents == 600
    assert not list((tmp_path / "store").rglob("*.tmp"))


class ContradictingProcesses(Contradicting, LocalExecutor):
    """Real processes, whose gate finds a difference."""


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


class WrongInTasks(ThreadExecutor):
    """Tasks send their documents with another id."""

    def wait(self, timeout: float) -> list[CallEvent]:
        return [self._alter(event) for event in super().wait(timeout)]

    def _alter(self, event: CallEvent) -> CallEvent:
        message = decode_answer(event.data) if isinstance(event, Answer) else None
        if not isinstance(event, Answer) or not isinstance(message, Finished):
            return event
        return Answer(event.call, encode(msgspec.structs.replace(message, records=list(map(alter, message.records)))))


def alter(record: TaskEntry) -> TaskEntry:
    if not record.sample:
        return record
    first, *rest = record.sample
    return msgspec.structs.replace(
        record, sample=[msgspec.structs.replace(first, ids=first.ids[:-4] + b"\xff" * 4), *rest]
    )


class LateWrongInTasks(WrongInTasks):
    """The same, after the gate has passed."""

    def wait(self, timeout: float) -> list[CallEvent]:
        events = super(WrongInTasks, self).wait(timeout)
        return list(map(self._alter, events)) if any(self.store.glob("train/*.bin")) else events

    store: Path


def test_every_task_has_some_of_its_documents_compared_whatever_the_number_of_workers(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    counts = set()
    for workers in (1, 3):
        request = request_for(tmp_path / str(workers), tiny_tokenizer, workers=workers)
        manifest = run(request, Heard(), ThreadExecutor()).manifest
        assert manifest.engine.parity is not None
        assert manifest.engine.parity.num_later_documents >= len(manifest.splits["train"].shards)
        counts.add((manifest.engine.parity.num_later_documents, manifest.engine.parity.num_later_bytes))
    assert len(counts) == 1


def test_a_difference_in_a_task_beside_the_gate_falls_back_to_the_reference(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    class Slow(WrongInTasks):
        """The gate's sample comes when tasks have been compared."""

        def wait(self, timeout: float) -> list[CallEvent]:
            events = super().wait(timeout)
            held.extend(event for event in events if _is_gate(event))
            finished.extend(event for event in events if isinstance(event, Answer) and not _is_gate(event))
            late = held[:] if len(finished) > 3 else []
            del held[: len(late)]
            return [event for event in events if not _is_gate(event)] + late

    held: list[CallEvent] = []
    finished: list[CallEvent] = []
    display = Heard()
    outcome = run(request_for(tmp_path, tiny_tokenizer), display, Slow())
    assert any("gigatoken differs from huggingface on" in line for line in display.lines)
    assert outcome.manifest.engine.name == "huggingface"


def _is_gate(event: CallEvent) -> bool:
    return isinstance(event, Answer) and isinstance(decode_answer(event.data), GateSample)


def test_a_difference_in_a_later_task_ends_the_run_and_that_task_is_done_again(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    executor = LateWrongInTasks()
    executor.store = tmp_path / "store"
    request = request_for(tmp_path, tiny_tokenizer, workers=1)
    with pytest.raises(
        TokenmillError, match=r"gigatoken differs from huggingface on a document of .*corpus\.jsonl, at"
    ):
        run(request, Heard(), executor)
    assert not (tmp_path / "store" / "manifest.json").exists()
    display = Heard()
    assert run(request, display, ThreadExecutor()).manifest.num_documents == 600
    assert any("continuing: " in line for line in display.lines)


def test_documents_of_earlier_attempts_are_compared_before_the_manifest_is_written(
    tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for(tmp_path, tiny_tokenizer)
    with monkeypatch.context() as patch:
        # Killed after the last task and before the manifest.
        patch.setattr("tokenmill.pipeline.run.finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(request, Heard(), ThreadExecutor())
    entry = min((tmp_path / "store/.tasks").glob("0*.json"))
    entry.write_bytes(msgspec.json.encode(alter(msgspec.json.decode(entry.read_bytes(), type=TaskEntry))))
    with pytest.raises(TokenmillError, match="differs from huggingface on a document"):
        run(request, Heard(), ThreadExecutor())
    assert not entry.exists()
    manifest = run(request, Heard(), ThreadExecutor()).manifest
    assert manifest.engine.parity is not None
    assert manifest.engine.parity.num_later_documents >= len(manifest.splits["train"].shards)


def test_the_awkward_strings_are_compared_once_for_the_same_tokenizer_and_engine(
    tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    asked = []

    class Looking(ThreadExecutor):
        def submit(self, call: Call, *rest: Any) -> None:
            order = decode_order(call.payload)
            asked.extend([order.with_awkward] if isinstance(order, RunGate) else [])
            super().submit(call, *rest)

    manifests = []
    for number, flags in enumerate([{}, {}, {"special_tokens": "parse"}]):
        request = request_for(tmp_path / str(number), tiny_tokenizer, **flags)
        manifests.append(run(request, Heard(), Looking()).manifest)
    assert asked == [True, False, True]
    assert len({manifest.engine.parity.num_awkward for manifest in manifests[:2]}) == 1
    assert manifests[0].engine.parity.num_awkward > 1000
    # Without a cache that can be written, everything is proven anew.
    monkeypatch.setenv("TOKENMILL_CACHE", "/dev/null/none")
    run(request_for(tmp_path / "none", tiny_tokenizer), Heard(), Looking())
    assert asked[-1] is True
