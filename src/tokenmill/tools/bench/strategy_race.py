"""`bench strategies`: the usual ways to tokenize, side by side on the same documents.

All of them use the tokenizer's own library and go from a file of JSON lines to ids in a file. The clock starts after
importing and loading the tokenizer. The strategies differ in what they keep in memory and in how much the library gets
at once: this decides their speed, and which of them break on a larger input.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tokenmill.engines import Engine, Tokenizer, open_tokenizer
from tokenmill.machine import usable_cores
from tokenmill.tools.bench.bench_report import BenchReport, BenchResult
from tokenmill.tools.bench.contenders import Answer, Contender, Effort, Failure, Finisher, run_once, stopwatch
from tokenmill.tools.bench.corpus import (
    BenchInput,
    Corpus,
    Workplace,
    load_engine,
    make_batches,
    read_documents,
    workplace,
)
from tokenmill.tools.bench.measurement import Measurement
from tokenmill.tools.bench.whole_run import count_copies, make_run

__all__ = ["bench_strategies", "count_differing"]

SEPARATOR = "\n"
"""Stands between the documents of the huge string."""
SECONDS = 1.0
"""How long the reference would take on one core; with eight strategies the benchmark takes about a minute."""
OWN_SECONDS = 1.2
PART = 1 / 8
"""Memory is measured for this part of the input and for all of it."""
GROWTH = 4.0
"""Megabytes of memory per megabyte of text. More than this grows with the input; less cannot be told from nothing."""
CHUNK = 16
"""Documents that a pool sends to a worker at once, as in most scripts."""
OWN, HUGE, POOL = "tokenmill", "one huge string", "process pool"


def one_by_one(engine: Engine, texts: Iterator[str], out: IO[bytes]) -> int:
    """Keep all documents in a list, encode each with one call, and keep all ids in another list."""
    ids: list[int] = []
    for text in list(texts):
        ids.extend(engine.encode([text]).ids.tolist())
    return _write(np.array(ids), out)


def streaming(engine: Engine, texts: Iterator[str], out: IO[bytes]) -> int:
    """Encode each document with one call while reading, and keep nothing."""
    return sum(_write(engine.encode([text]).ids, out) for text in texts)


def in_batches(engine: Engine, texts: Iterator[str], out: IO[bytes], *, size: int) -> int:
    """Encode `size` documents per call."""
    return sum(_write(engine.encode(some).ids, out) for some in make_batches(texts, size))


def huge_string(engine: Engine, texts: Iterator[str], out: IO[bytes]) -> int:
    """Join all documents by line ends, and encode them with one call."""
    return _write(engine.encode([SEPARATOR.join(texts)]).ids, out)


def all_at_once(engine: Engine, texts: Iterator[str], out: IO[bytes]) -> int:
    """Encode the list of all documents with one call."""
    return _write(engine.encode(list(texts)).ids, out)


BATCHES = {"batches of 200": 200, "batches of 1,000": 1000}
STRATEGIES: dict[str, Callable[[Engine, Iterator[str], IO[bytes]], int]] = {
    "one by one": one_by_one,
    "streaming": streaming,
    **{name: partial(in_batches, size=size) for name, size in BATCHES.items()},
    HUGE: huge_string,
    "all at once": all_at_once,
}


def bench_strategies(source: BenchInput, effort: Effort) -> BenchReport:
    """Measure every strategy on a part of the inputs."""
    with workplace(source, effort, SECONDS) as place:
        corpus = place.corpus
        part = corpus.head(PART, place.folder / "part.jsonl")
        report = BenchReport("strategies", place.describe())
        report.race(_contenders(place, part), effort, lambda finisher: _make_result(finisher, corpus, part))
        given = f"it got {part.num_bytes / 1e6:.1f} and then {corpus.num_bytes / 1e6:.1f} MB of text"
        report.left_out = {name: f"{failure}; {given}" for name, failure in report.left_out.items()}
        effort.on_stage("comparing the huge string with its documents")
        _check_huge_string(place, report)
    _explain(report, corpus, part)
    return report


def run_strategy(strategy: str, tokenizer: str, documents: str, out: str) -> Answer:
    """Run one strategy in this process, from the file of documents to a file of ids."""
    engine = load_engine(tokenizer, threads=True)
    engine.encode(["The first call of a library takes longer than the others."] * 8)
    with Path(out).open("wb") as file, stopwatch() as taken:
        num_tokens = STRATEGIES[strategy](engine, read_documents(documents), file)
    return {**taken, "num_tokens": num_tokens}


def run_pool(tokenizer: str, documents: str, out: str, workers: int) -> Answer:
    """Run a pool of processes that send ids back as pickled lists."""
    with multiprocessing.Pool(workers, _load_engine, (tokenizer,)) as pool:
        pool.map(_encode, ["Every worker loads its tokenizer before the clock starts."] * workers * 8)
        with Path(out).open("wb") as file, stopwatch() as taken:
            found = pool.imap(_encode, read_documents(documents), chunksize=CHUNK)
            num_tokens = sum(_write(np.array(ids), file) for ids in found)
    return {**taken, "num_tokens": num_tokens}


_engine: Engine | None = None
"""The engine of a worker of the pool."""


def _load_engine(tokenizer: str) -> None:
    global _engine
    _engine = load_engine(tokenizer)


def _encode(text: str) -> list[int]:
    assert _engine is not None
    ids: list[int] = _engine.encode([text]).ids.tolist()
    return ids


def _write(ids: npt.NDArray[Any], out: IO[bytes]) -> int:
    out.write(ids.astype(np.uint32).data)
    return len(ids)


def compare_huge_string(tokenizer: str, documents: str) -> Answer:
    """Count the documents that have other ids inside the huge string than alone."""
    opened = open_tokenizer(Path(tokenizer), name="tokenizer")
    texts = list(read_documents(documents))
    num_differing = count_differing(opened, load_engine(tokenizer, threads=True), texts)
    return {"num_differing": num_differing, "num_documents": len(texts)}


def count_differing(tokenizer: Tokenizer, engine: Engine, texts: list[str]) -> int:
    """Count documents whose ids change when the texts are joined; a token across an edge belongs to both sides."""
    from tokenmill.engines.alignment import Aligner
    from tokenmill.text_batch import TokenBatch

    joined = SEPARATOR.join(texts)
    whole = engine.encode([joined])
    starts, stops = Aligner(tokenizer, "as-text").align([joined], whole)
    alone = TokenBatch.join([engine.encode(some) for some in make_batches(iter(texts))])
    sizes = np.array([len(text.encode()) for text in texts], np.int64)
    firsts = np.concatenate([[0], np.cumsum(sizes + len(SEPARATOR.encode()))])[:-1]
    begins = np.searchsorted(stops, firsts, side="right")
    # Tokens that a tokenizer adds before a text have no bytes in it.
    begins[0] = 0
    ends = np.searchsorted(starts, firsts + sizes, side="left")
    spans = zip(begins.tolist(), ends.tolist(), alone.offsets[:-1].tolist(), alone.offsets[1:].tolist(), strict=True)
    return sum(not np.array_equal(whole.ids[a:b], alone.ids[c:d]) for a, b, c, d in spans)


def _contenders(place: Workplace, part: Corpus) -> list[Contender]:
    shared = {**place.settings, "out": str(place.folder / "ids.bin")}
    workers, sizes = usable_cores(), [{"documents": part.path}, {}]
    found = [Contender(name, f"{__name__}:run_strategy", {"strategy": name, **shared}, sizes) for name in STRATEGIES]
    found.append(Contender(POOL, f"{__name__}:run_pool", {**shared, "workers": workers}, sizes))
    # tokenmill gets several copies of the documents: an eighth of the input is an eighth of the copies.
    copies = count_copies(place, OWN_SECONDS * workers)
    return [*found, make_run(OWN, place, copies=copies, workers=workers, parts=(PART, 1.0))]


def _make_result(finisher: Finisher, corpus: Corpus, part: Corpus) -> BenchResult:
    answers = finisher.answers
    copies = answers[0].get("copies", 1)
    num_bytes = corpus.num_bytes * copies
    per_gb = Measurement.of([answer["cpu_seconds"] / num_bytes * 1e9 for answer in answers])
    facts = {
        "copies": copies,
        "num_tokens": answers[0]["num_tokens"] // copies,
        "peak_memory_bytes": finisher.peaks[1],
        "peak_memory_bytes_of_part": finisher.peaks[0],
        "memory_growth": _growth(finisher, part, corpus, copies),
        "start_seconds": answers[0].get("start_seconds"),
    }
    return BenchResult(finisher.contender.name, {**corpus.speeds(answers), "cpu_seconds_per_gb": per_gb}, facts)


def _growth(finisher: Finisher, part: Corpus, corpus: Corpus, copies: int) -> float | None:
    """Bytes of memory per further byte of text; None if there was hardly more text than is in memory at once."""
    name = finisher.contender.name
    held = usable_cores() * CHUNK if name == POOL else BATCHES.get(name, 0)
    if part.num_documents < 2 * held:
        return None
    less, more = finisher.peaks
    return (more - less) / ((corpus.num_bytes - part.num_bytes) * copies or 1)


def _check_huge_string(place: Workplace, report: BenchReport) -> None:
    row = next((row for row in report.rows if row.name == HUGE), None)
    if row is None:
        return
    try:
        found = run_once(Contender(HUGE, f"{__name__}:compare_huge_string", place.settings))
    except Failure as failure:
        report.notes.append(f"{HUGE}: its ids could not be compared: it {failure}")
        return
    differing, documents = found["num_differing"], found["num_documents"]
    row.facts["num_differing_documents"] = differing
    if differing:
        report.notes.append(
            f"{HUGE}: WRONG IDS in {differing:,} of {documents:,} documents ({100 * differing / documents:.1f}%), "
            "because tokens cross their edges or depend on them; and it does not record where a document ends"
        )
    else:
        report.notes.append(f"{HUGE}: the same ids for all documents here; but it does not record where one ends")


def _explain(report: BenchReport, corpus: Corpus, part: Corpus) -> None:
    """Note whose memory grows with the input, and what else the figures do not show."""
    growth = {row.name: row.facts["memory_growth"] for row in report.rows}
    growing = [f"{name} {grown:.0f}" for name, grown in growth.items() if grown is not None and grown > GROWTH]
    flat = [name for name, grown in growth.items() if grown is not None and grown <= GROWTH]
    sizes = f"{part.num_bytes / 1e6:.2g} and {corpus.num_bytes / 1e6:.2g} MB of text"
    if growing:
        report.notes.append(
            f"BREAKS on a large input, because memory grows with it, by this many MB per MB of text (measured at "
            f"{sizes}): {', '.join(growing)}"
        )
    if flat:
        report.notes.append(f"memory does not grow measurably between {sizes}: {', '.join(flat)}")
    if unknown := [name for name, grown in growth.items() if grown is None]:
        report.notes.append(
            f"{', '.join(unknown)}: whether memory grows is unknown, because {part.num_documents:,} documents are "
            "hardly more than they keep at once; pass a larger --max-mb"
        )
    own = next((row for row in report.rows if row.name == OWN), None)
    if own is not None:
        report.notes.append(
            f"{OWN}: a finished store with checksums, synced to disk, {usable_cores()} workers; the documents "
            f"{own.facts['copies']} times over, after {own.facts['start_seconds']:.1f} s of start-up and parity gate"
        )
    counts = {row.facts["num_tokens"] for row in report.rows if row.name != HUGE}
    if len(counts) > 1:
        report.notes.append(f"the strategies give different numbers of tokens: {sorted(counts)}")
