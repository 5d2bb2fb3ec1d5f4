"""`bench strategies`: the ways people tokenize, side by side on the same documents.

All of them use the tokenizer's own library and go the whole way, from a file of JSON lines to ids in
a file; importing and loading the tokenizer come before the clock starts. They differ in what they hold in memory and in
what the library gets to see at once, which is what decides speed, and what breaks on a larger input.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tokenmill.bench.documents import Corpus, Source, Workplace, batches, read_documents, workplace
from tokenmill.bench.encoding import load_engine
from tokenmill.bench.figures import Figure
from tokenmill.bench.measuring import Answer, Contender, Effort, Failure, ask, stopwatch, watch
from tokenmill.bench.milling import copies_for, make_mill, weigh_mill
from tokenmill.bench.racing import Finisher, judge_speed, make_speeds, race
from tokenmill.bench.reporting import Report, Row, describe_input
from tokenmill.engines import Engine, Tokenizer, open_tokenizer
from tokenmill.machine import usable_cores

__all__ = ["bench_strategies", "count_differing"]

SEPARATOR = "\n"
"""What stands between documents in the huge string."""
SECONDS = 1.0
"""How long the reference would take on one core: with eight strategies a benchmark of about a minute."""
MILL_SECONDS = 1.2
PART = 1 / 8
"""Memory is looked at for this part of the input and for all of it."""
GROWTH = 4.0
"""Megabytes of memory for each of text: more than that grows with the input, less cannot be told from none."""
CHUNK = 16
"""Documents that a pool sends to a worker at once, as most scripts have it."""
OWN = "tokenmill"
HUGE = "one huge string"

Peaks = tuple[int, int]
"""Of memory, for a part of the input and for all of it."""


def one_by_one(engine: Engine, texts: Iterator[str], out: IO[bytes]) -> int:
    """All documents in a list, one call for each, and all ids in another list."""
    ids: list[int] = []
    for text in list(texts):
        ids.extend(engine.encode([text]).ids.tolist())
    return _write(np.array(ids), out)


def streaming(engine: Engine, texts: Iterator[str], out: IO[bytes]) -> int:
    """One call for each document while reading; nothing is kept."""
    return sum(_write(engine.encode([text]).ids, out) for text in texts)


def in_batches(engine: Engine, texts: Iterator[str], out: IO[bytes], *, size: int) -> int:
    """So many documents a call."""
    return sum(_write(engine.encode(some).ids, out) for some in batches(texts, size))


def huge_string(engine: Engine, texts: Iterator[str], out: IO[bytes]) -> int:
    """All documents joined by line ends, in one call."""
    return _write(engine.encode([SEPARATOR.join(texts)]).ids, out)


def all_at_once(engine: Engine, texts: Iterator[str], out: IO[bytes]) -> int:
    """All documents as a list, in one call."""
    return _write(engine.encode(list(texts)).ids, out)


BATCHES = {"batches of 200": 200, "batches of 1,000": 1000}
STRATEGIES: dict[str, Callable[[Engine, Iterator[str], IO[bytes]], int]] = {
    "one by one": one_by_one,
    "streaming": streaming,
    **{name: partial(in_batches, size=size) for name, size in BATCHES.items()},
    HUGE: huge_string,
    "all at once": all_at_once,
}
POOL = "process pool"


def bench_strategies(source: Source, effort: Effort) -> Report:
    """Measure every strategy on a part of the inputs."""
    with workplace(source) as place:
        effort.tell("reading documents")
        corpus = place.collect(effort.max_bytes, SECONDS)
        part = corpus.head(PART, place.folder / "part.jsonl")
        report = Report("strategies", describe_input(place, corpus))
        finishers = race(_contenders(place, corpus), partial(_weigh, part=part, corpus=corpus), report, effort)
        report.rows += [_make_row(finisher, corpus, part) for finisher in finishers]
        judge_speed(report)
        effort.tell("comparing the huge string with its documents")
        _check_huge_string(place, corpus, report)
        _explain(report, corpus, part)
    return report


def run_strategy(strategy: str, tokenizer: str, documents: str, out: str) -> Answer:
    """One strategy from the file of documents to a file of ids, in this process."""
    engine = load_engine(tokenizer, threads=True)
    engine.encode(["The first call of a library is dearer than the others."] * 8)
    with Path(out).open("wb") as file, stopwatch() as taken:
        num_tokens = STRATEGIES[strategy](engine, read_documents(documents), file)
    return {"seconds": taken.seconds, "cpu_seconds": taken.cpu_seconds, "num_tokens": num_tokens}


def run_pool(tokenizer: str, documents: str, out: str, workers: int) -> Answer:
    """A pool of processes that sends ids back as lists, through pickle."""
    with multiprocessing.Pool(workers, _load_engine, (tokenizer,)) as pool:
        pool.map(_encode, ["Every worker has loaded its tokenizer before the clock starts."] * workers * 8)
        with Path(out).open("wb") as file, stopwatch() as taken:
            found = pool.imap(_encode, read_documents(documents), chunksize=CHUNK)
            num_tokens = sum(_write(np.array(ids), file) for ids in found)
    return {"seconds": taken.seconds, "cpu_seconds": taken.cpu_seconds, "num_tokens": num_tokens}


_engine: Engine | None = None
"""Of a worker of the pool."""


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
    """How many documents have other ids inside the huge string than alone."""
    opened = open_tokenizer(Path(tokenizer), name="tokenizer")
    texts = list(read_documents(documents))
    num_differing = count_differing(opened, load_engine(tokenizer, threads=True), texts)
    return {"num_differing": num_differing, "num_documents": len(texts)}


def count_differing(tokenizer: Tokenizer, engine: Engine, texts: list[str]) -> int:
    """Documents that a joined text gives other ids; tokens that reach across an edge belong to both sides."""
    from tokenmill.batch import TokenBatch
    from tokenmill.engines.alignment import Aligner

    joined = SEPARATOR.join(texts)
    whole = engine.encode([joined])
    starts, stops = Aligner(tokenizer, "as-text").align([joined], whole)
    alone = TokenBatch.join([engine.encode(some) for some in batches(iter(texts), 1000)])
    sizes = np.array([len(text.encode()) for text in texts], np.int64)
    firsts = np.concatenate([[0], np.cumsum(sizes + len(SEPARATOR.encode()))])[:-1]
    begins = np.searchsorted(stops, firsts, side="right")
    # What a tokenizer puts in front of a text has no bytes in it.
    begins[0] = 0
    ends = np.searchsorted(starts, firsts + sizes, side="left")
    spans = zip(begins.tolist(), ends.tolist(), alone.offsets[:-1].tolist(), alone.offsets[1:].tolist(), strict=True)
    return sum(not np.array_equal(whole.ids[a:b], alone.ids[c:d]) for a, b, c, d in spans)


def _contenders(place: Workplace, corpus: Corpus) -> list[Contender]:
    shared = {
        "tokenizer": str(place.tokenizer_folder),
        "documents": corpus.path,
        "out": str(place.folder / "ids.bin"),
    }
    target = "tokenmill.bench.strategies"
    found = [Contender(name, f"{target}:run_strategy", {"strategy": name, **shared}) for name in STRATEGIES]
    workers = usable_cores()
    found.append(Contender(POOL, f"{target}:run_pool", {**shared, "workers": workers}))
    copies = copies_for(place, corpus, MILL_SECONDS * workers)
    return [*found, make_mill(OWN, place, corpus, copies=copies, workers=workers)]


def _weigh(contender: Contender, part: Corpus, corpus: Corpus) -> Peaks:
    copies = contender.settings.get("copies")
    try:
        if not copies:
            return watch(contender.with_settings(documents=part.path))[1], watch(contender)[1]
        # tokenmill is given the same documents several times: an eighth of the input is an eighth of the copies.
        return weigh_mill(contender.with_settings(copies=max(1, round(copies * PART)))), weigh_mill(contender)
    except Failure as failure:
        given = f"it was given {part.num_bytes / 1e6:.1f} and then {corpus.num_bytes / 1e6:.1f} MB of text"
        raise Failure(f"{failure}; {given}") from None


def _make_row(finisher: Finisher[Peaks], corpus: Corpus, part: Corpus) -> Row:
    answers = finisher.answers
    copies = answers[0].get("copies", 1)
    num_bytes = corpus.num_bytes * copies
    figures = {
        **make_speeds(answers, corpus),
        "cpu_seconds_per_gb": Figure.of([answer["cpu_seconds"] / num_bytes * 1e9 for answer in answers]),
    }
    facts = {
        "copies": copies,
        "num_tokens": answers[0]["num_tokens"] // copies,
        "peak_memory_bytes": finisher.memory[1],
        "peak_memory_bytes_of_part": finisher.memory[0],
        "memory_growth": _growth(finisher, part, corpus, copies),
        "start_seconds": answers[0].get("start_seconds"),
    }
    return Row(finisher.name, figures, facts)


def _growth(finisher: Finisher[Peaks], part: Corpus, corpus: Corpus, copies: int) -> float | None:
    """Bytes of memory for each further byte of text; None where there was hardly more than is held at once."""
    held = usable_cores() * CHUNK if finisher.name == POOL else BATCHES.get(finisher.name, 0)
    if part.num_documents < 2 * held:
        return None
    less, more = finisher.memory
    return (more - less) / ((corpus.num_bytes - part.num_bytes) * copies or 1)


def _check_huge_string(place: Workplace, corpus: Corpus, report: Report) -> None:
    if not any(row.name == HUGE for row in report.rows):
        return
    settings = {"tokenizer": str(place.tokenizer_folder), "documents": corpus.path}
    try:
        found = ask(Contender(HUGE, "tokenmill.bench.strategies:compare_huge_string", settings))
    except Failure as failure:
        report.notes.append(f"{HUGE}: its ids could not be compared: it {failure}")
        return
    row = next(row for row in report.rows if row.name == HUGE)
    row.facts["num_differing_documents"] = found["num_differing"]
    if found["num_differing"]:
        share = 100 * found["num_differing"] / found["num_documents"]
        report.notes.append(
            f"{HUGE}: WRONG IDS in {found['num_differing']:,} of {found['num_documents']:,} documents ({share:.1f}%), "
            "because tokens reach across their edges or depend on them; and nothing says where one ends"
        )
    else:
        report.notes.append(f"{HUGE}: the same ids for all documents here; but nothing says where one ends")


def _explain(report: Report, corpus: Corpus, part: Corpus) -> None:
    """Who grows with the input, and what else the figures do not say."""
    growth = {row.name: row.facts["memory_growth"] for row in report.rows}
    growing = [f"{name} {grown:.0f}" for name, grown in growth.items() if grown is not None and grown > GROWTH]
    flat = [name for name, grown in growth.items() if grown is not None and grown <= GROWTH]
    sizes = f"{part.num_bytes / 1e6:.2g} and {corpus.num_bytes / 1e6:.2g} MB of text"
    if growing:
        report.notes.append(
            f"BREAKS on a large input, because memory grows with it, by so many MB for every MB of text (measured at "
            f"{sizes}): {', '.join(growing)}"
        )
    if flat:
        report.notes.append(f"memory does not grow, as far as can be told at {sizes}: {', '.join(flat)}")
    if unknown := [name for name, grown in growth.items() if grown is None]:
        report.notes.append(
            f"{', '.join(unknown)}: whether memory grows cannot be told, because {part.num_documents:,} documents are "
            "hardly more than they hold at once; pass a larger --max-mb"
        )
    own = next((row for row in report.rows if row.name == OWN), None)
    if own is not None:
        report.notes.append(
            f"{OWN}: a finished store with checksums, synced to disk, {usable_cores()} workers; the documents "
            f"{own.facts['copies']} times over, after {own.facts['start_seconds']:.1f} s of start-up and parity gate"
        )
    counts = {row.facts["num_tokens"] for row in report.rows if row.name != HUGE}
    if len(counts) > 1:
        report.notes.append(f"the strategies do not give the same number of tokens: {sorted(counts)}")
