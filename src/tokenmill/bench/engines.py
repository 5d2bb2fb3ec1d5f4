"""`bench engines`: every engine that can load the tokenizer, one process each, and whether its ids are the reference's.

Documents are encoded from memory, over and over for a second: the first pass has empty caches, the
later ones are what a long run sees. Speed without equal ids is no speed, so all documents and the
awkward strings of the parity gate are compared as well.
"""

from __future__ import annotations

import time
from pathlib import Path

from tokenmill.bench.documents import Corpus, Source, Workplace, batches, read_documents, workplace
from tokenmill.bench.encoding import BATCH, BATCH_BYTES, encode_all, load_engine
from tokenmill.bench.figures import Figure
from tokenmill.bench.measuring import Answer, Contender, Effort, Failure, ask, stopwatch, watch
from tokenmill.bench.racing import Finisher, judge_speed, make_speeds, race
from tokenmill.bench.reporting import Report, Row, describe_input
from tokenmill.engines import ENGINES, EngineName, choose, open_tokenizer
from tokenmill.errors import TokenmillError

__all__ = ["bench_engines"]

SECONDS = 2.5
"""How long the reference shall take for all documents on one core."""
LEAST_SECONDS = 1.0
THREADS = ", all cores"


def bench_engines(source: Source, effort: Effort) -> Report:
    """Measure every engine on a part of the inputs, and compare its ids with the reference's."""
    with workplace(source) as place:
        effort.tell("reading documents")
        corpus = place.collect(effort.max_bytes, SECONDS)
        report = Report("engines", describe_input(place, corpus))
        finishers = race(_contenders(place, corpus, report), _weigh, report, effort)
        report.rows += [_make_row(finisher, corpus) for finisher in finishers]
        judge_speed(report)
        _compare(place, corpus, report, effort)
    return report


def run_engine(engine: EngineName, tokenizer: str, documents: str, threads: bool, seconds: float) -> Answer:
    """Encode all documents once, and then again until some seconds have passed."""
    texts = list(batches(read_documents(documents), BATCH, BATCH_BYTES))
    with stopwatch() as loading:
        loaded = load_engine(tokenizer, engine, threads=threads)
    with stopwatch() as first:
        num_tokens = encode_all(loaded, texts)
    passes = 0
    with stopwatch() as later:
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            encode_all(loaded, texts)
            passes += 1
    steady = later if passes else first
    return {
        "load_seconds": loading.seconds,
        "first_seconds": first.seconds,
        "seconds": steady.seconds / max(1, passes),
        "cpu_seconds": steady.cpu_seconds / max(1, passes),
        "num_tokens": num_tokens,
        "num_passes": passes,
    }


def compare_engine(engine: EngineName, tokenizer: str, documents: str) -> Answer:
    """How many texts get other ids than from the reference."""
    from tokenmill.engines.awkward import awkward_strings
    from tokenmill.pipeline.gate import mismatches

    loaded, reference = load_engine(tokenizer, engine), load_engine(tokenizer, threads=True)
    awkward = awkward_strings(list(open_tokenizer(Path(tokenizer), name="tokenizer").special_tokens))
    num_documents = num_differing = 0
    for some in batches(read_documents(documents), BATCH, BATCH_BYTES):
        num_documents += len(some)
        num_differing += len(mismatches(loaded, reference, some))
    return {
        "num_documents": num_documents,
        "num_differing": num_differing,
        "num_rerouted": loaded.num_rerouted,
        "num_awkward": len(awkward),
        "num_differing_awkward": len(mismatches(loaded, reference, awkward)),
    }


def _weigh(contender: Contender) -> int:
    """Peak memory of one pass."""
    return watch(contender.with_settings(seconds=0.0))[1]


def _contenders(place: Workplace, corpus: Corpus, report: Report) -> list[Contender]:
    """Engines that load the tokenizer; one whose library has threads of its own runs without and with them."""
    found = []
    for engine in ENGINES:
        try:
            choose(place.tokenizer, engine)
        except TokenmillError as error:
            report.leave_out({engine: _short(str(error))})
            continue
        for threads in (False, True) if engine == "huggingface" else (False,):
            settings = {
                "engine": engine,
                "tokenizer": str(place.tokenizer_folder),
                "documents": corpus.path,
                "threads": threads,
                "seconds": LEAST_SECONDS,
            }
            name = engine + THREADS * threads
            found.append(Contender(name, "tokenmill.bench.engines:run_engine", settings))
    return found


def _short(error: str) -> str:
    """The reason alone: which flag and what to use instead do not matter here."""
    return error.partition("; use ")[0].partition(": ")[2] or "does not load this kind of tokenizer"


def _make_row(finisher: Finisher[int], corpus: Corpus) -> Row:
    answers = finisher.answers
    figures = {
        **make_speeds(answers, corpus),
        "first_mb_per_second": Figure.of([corpus.num_bytes / 1e6 / answer["first_seconds"] for answer in answers]),
        "load_seconds": Figure.of([answer["load_seconds"] for answer in answers]),
    }
    facts = {"peak_memory_bytes": finisher.memory, "num_tokens": answers[0]["num_tokens"]}
    return Row(finisher.name, figures, facts)


def _compare(place: Workplace, corpus: Corpus, report: Report, effort: Effort) -> None:
    for row in report.rows:
        engine = row.name.removesuffix(THREADS)
        if engine == place.reference:
            row.facts["parity"] = "reference"
            continue
        effort.tell(f"comparing ids: {engine}")
        settings = {"engine": engine, "tokenizer": str(place.tokenizer_folder), "documents": corpus.path}
        try:
            found = ask(Contender(engine, "tokenmill.bench.engines:compare_engine", settings))
        except Failure as failure:
            row.facts["parity"] = "unknown"
            report.notes.append(f"{engine}: its ids could not be compared: {failure}")
            continue
        row.facts |= found
        num_texts = f"{found['num_documents']:,} documents and {found['num_awkward']:,} awkward strings"
        differing = found["num_differing"] + found["num_differing_awkward"]
        row.facts["parity"] = f"{differing:,} differ" if differing else "equal"
        if differing:
            report.notes.append(f"{engine}: OTHER IDS than {place.reference} for {differing:,} of {num_texts}")
        else:
            report.notes.append(f"{engine}: the same ids as {place.reference} for {num_texts}")
        if found["num_rerouted"]:
            report.notes.append(
                f"{engine}: {found['num_rerouted']:,} of these documents have code points that the libraries see "
                f"differently, and went through {place.reference}"
            )
