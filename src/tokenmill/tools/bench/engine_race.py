"""`bench engines`: every engine that can load the tokenizer, and whether its ids equal the reference's.

Each engine encodes documents from memory for a second. The first pass starts with empty caches; the later ones show
what a long run sees. Speed without equal ids is worth nothing, so all documents and the awkward strings of the parity
gate are compared as well.
"""

from __future__ import annotations

import time
from pathlib import Path

from tokenmill.engines import ENGINES, EngineName, choose, open_tokenizer
from tokenmill.errors import TokenmillError
from tokenmill.tools.bench.bench_report import BenchReport, BenchResult
from tokenmill.tools.bench.contenders import Answer, Contender, Effort, Failure, Finisher, run_once, stopwatch
from tokenmill.tools.bench.corpus import (
    BATCH_BYTES,
    BenchInput,
    Corpus,
    Workplace,
    encode_all,
    load_engine,
    make_batches,
    read_documents,
    workplace,
)
from tokenmill.tools.bench.measurement import Measurement, measure

__all__ = ["bench_engines"]

SECONDS = 2.5
"""How long the reference should take for all documents on one core."""
LEAST_SECONDS = 1.0
THREADS = ", all cores"


def bench_engines(source: BenchInput, effort: Effort) -> BenchReport:
    """Measure every engine on a part of the inputs, and compare its ids with the reference's."""
    with workplace(source, effort, SECONDS) as place:
        report = BenchReport("engines", place.describe())
        report.race(_contenders(place, report), effort, lambda finisher: _make_result(finisher, place.corpus))
        _compare(place, report, effort)
    return report


def run_engine(engine: EngineName, tokenizer: str, documents: str, threads: bool, seconds: float) -> Answer:
    """Encode all documents once, and then again until some seconds have passed."""
    texts = list(make_batches(read_documents(documents), max_bytes=BATCH_BYTES))
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
    per_pass = {key: value / max(1, passes) for key, value in steady.items()}
    return {**per_pass, "load_seconds": loading["seconds"], "first_seconds": first["seconds"], "num_tokens": num_tokens}


def compare_engine(engine: EngineName, tokenizer: str, documents: str) -> Answer:
    """Count the texts that get other ids from an engine than from the reference."""
    from tokenmill.engines.probe_strings import make_probe_strings
    from tokenmill.pipeline.parity import mismatches

    loaded, reference = load_engine(tokenizer, engine), load_engine(tokenizer, threads=True)
    awkward = make_probe_strings(list(open_tokenizer(Path(tokenizer), name="tokenizer").special_tokens))
    num_documents = num_differing = 0
    for some in make_batches(read_documents(documents), max_bytes=BATCH_BYTES):
        num_documents += len(some)
        num_differing += len(mismatches(loaded, reference, some))
    return {
        "num_documents": num_documents,
        "num_differing": num_differing,
        "num_rerouted": loaded.num_rerouted,
        "num_awkward": len(awkward),
        "num_differing_awkward": len(mismatches(loaded, reference, awkward)),
    }


def _contenders(place: Workplace, report: BenchReport) -> list[Contender]:
    """Engines that load the tokenizer; one whose library has threads of its own runs without and with them."""
    found = []
    for engine in ENGINES:
        try:
            choose(place.tokenizer, engine)
        except TokenmillError as error:
            # The reason of the error, without the flag and the remedy, which do not matter here.
            reason = str(error).partition("; use ")[0].partition(": ")[2]
            report.left_out[engine] = reason or "does not load this kind of tokenizer"
            continue
        for threads in (False, True) if engine == "huggingface" else (False,):
            settings = {**place.settings, "engine": engine, "threads": threads, "seconds": LEAST_SECONDS}
            one_pass = [{"seconds": 0.0}]
            found.append(Contender(engine + THREADS * threads, f"{__name__}:run_engine", settings, one_pass))
    return found


def _make_result(finisher: Finisher, corpus: Corpus) -> BenchResult:
    answers = finisher.answers
    first = Measurement.of([corpus.num_bytes / 1e6 / answer["first_seconds"] for answer in answers])
    figures = {**corpus.speeds(answers), "first_mb_per_second": first, **measure(answers, "load_seconds")}
    facts = {"peak_memory_bytes": finisher.peaks[-1], "num_tokens": answers[0]["num_tokens"]}
    return BenchResult(finisher.contender.name, figures, facts)


def _compare(place: Workplace, report: BenchReport, effort: Effort) -> None:
    for row in report.rows:
        engine = row.name.removesuffix(THREADS)
        if engine == place.reference:
            row.facts["parity"] = "reference"
            continue
        effort.on_stage(f"comparing ids: {engine}")
        settings = {"engine": engine, **place.settings}
        try:
            found = run_once(Contender(engine, f"{__name__}:compare_engine", settings))
        except Failure as failure:
            row.facts["parity"] = "unknown"
            report.notes.append(f"{engine}: its ids could not be compared: {failure}")
            continue
        row.facts |= found
        texts = f"{found['num_documents']:,} documents and {found['num_awkward']:,} awkward strings"
        differing = found["num_differing"] + found["num_differing_awkward"]
        row.facts["parity"] = f"{differing:,} differ" if differing else "equal"
        if differing:
            report.notes.append(f"{engine}: OTHER IDS than {place.reference} for {differing:,} of {texts}")
        else:
            report.notes.append(f"{engine}: the same ids as {place.reference} for {texts}")
        if found["num_rerouted"]:
            report.notes.append(
                f"{engine}: {found['num_rerouted']:,} of these documents have code points that the libraries treat "
                f"differently; {place.reference} encoded them"
            )
