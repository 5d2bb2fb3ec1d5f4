"""`bench engines`: every engine that can load the tokenizer, one process each, and whether its ids are the reference's.

Documents are encoded from memory, over and over for a second: the first pass has empty caches, the
later ones are what a long run sees. Speed without equal ids is no speed, so all documents and the
awkward strings of the parity gate are compared as well.
"""

from __future__ import annotations

import time
from itertools import cycle, islice
from pathlib import Path

from tokenmill.bench.documents import Corpus, Workplace, batches, read_documents, workplace
from tokenmill.bench.figures import Figure, judge
from tokenmill.bench.measuring import Answer, Contender, Failure, Tell, ask, stopwatch, take_turns, watch
from tokenmill.bench.reporting import Report, Row, describe_input
from tokenmill.engines import ENGINES, REFERENCES, Engine, EngineName, choose, create, open_tokenizer
from tokenmill.errors import TokenmillError

__all__ = ["bench_engines"]

SECONDS = 2.5
"""How long the reference shall take for all documents on one core."""
LEAST_SECONDS = 1.0
TRY_SECONDS, TRY_BYTES, TRY_BATCHES = 0.3, 100_000, 10
BATCH, BATCH_BYTES = 1000, 1_000_000
THREADS = ", all cores"


def bench_engines(
    inputs: list[str], tokenizer: str, *, text_key: str, max_bytes: int | None, repeat: int, tell: Tell
) -> Report:
    """Measure every engine on a part of the inputs, and compare its ids with the reference's."""
    with workplace(inputs, tokenizer, text_key) as place:
        tell("reading documents")
        corpus = place.collect(max_bytes, SECONDS)
        report = Report("engines", describe_input(place, corpus))
        contenders = _contenders(place, corpus, report)
        memory = {}
        for contender in contenders:
            tell(f"warm-up and memory: {contender.name}")
            try:
                memory[contender.name] = watch(contender.with_settings(seconds=0.0))[1]
            except Failure as failure:
                report.leave_out({contender.name: str(failure)})
        turns = take_turns([one for one in contenders if one.name in memory], repeat, tell)
        report.leave_out(turns.failures)
        for name, answers in turns.answers.items():
            report.rows.append(_make_row(name, answers, corpus, memory[name]))
        report.verdicts += judge({row.name: row.figures["mb_per_second"] for row in report.rows})
        _compare(place, corpus, report, tell)
    return report


def run_engine(engine: EngineName, tokenizer: str, documents: str, threads: bool, seconds: float) -> Answer:
    """Encode all documents once, and then again until some seconds have passed."""
    texts = list(batches(read_documents(documents), BATCH, BATCH_BYTES))
    with stopwatch() as loading:
        loaded = _load(engine, tokenizer, threads=threads)
    with stopwatch() as first:
        num_tokens = _encode_all(loaded, texts)
    passes = 0
    with stopwatch() as later:
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            _encode_all(loaded, texts)
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


def try_engine(engine: EngineName, tokenizer: str, documents: str) -> Answer:
    """About how fast an engine is on one core, once it has seen some of the words."""
    loaded = _load(engine, tokenizer)
    texts = list(islice(batches(read_documents(documents), BATCH, TRY_BYTES), TRY_BATCHES))
    _encode_all(loaded, texts)
    done = 0
    started = time.perf_counter()
    for some in cycle(texts):
        loaded.encode(some)
        done += sum(len(text.encode()) for text in some)
        elapsed = time.perf_counter() - started
        if elapsed > TRY_SECONDS:
            break
    return {"bytes_per_second": max(1.0, done / elapsed)}


def compare_engine(engine: EngineName, tokenizer: str, documents: str) -> Answer:
    """How many texts get other ids than from the reference."""
    from tokenmill.engines.awkward import awkward_strings
    from tokenmill.pipeline.gate import mismatches

    opened = open_tokenizer(Path(tokenizer), name="tokenizer")
    loaded = _load(engine, tokenizer)
    reference = create(REFERENCES[opened.kind], opened, threads=True)
    awkward = awkward_strings(list(opened.special_tokens))
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


def _load(engine: EngineName, tokenizer: str, *, threads: bool = False) -> Engine:
    if engine == "gigatoken":
        from tokenmill.engines.gigatoken import return_plain_arrays

        return_plain_arrays()
    return create(engine, open_tokenizer(Path(tokenizer), name="tokenizer"), threads=threads)


def _encode_all(engine: Engine, texts: list[list[str]]) -> int:
    return sum(len(engine.encode(some).ids) for some in texts)


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


def _make_row(name: str, answers: list[Answer], corpus: Corpus, memory: int) -> Row:
    def per_second(amount: float, key: str = "seconds") -> Figure:
        return Figure.of([amount / answer[key] for answer in answers])

    figures = {
        "mb_per_second": per_second(corpus.num_bytes / 1e6),
        "first_mb_per_second": per_second(corpus.num_bytes / 1e6, "first_seconds"),
        "tokens_per_second": per_second(answers[0]["num_tokens"]),
        "documents_per_second": per_second(corpus.num_documents),
        "load_seconds": Figure.of([answer["load_seconds"] for answer in answers]),
        "cpu_seconds": Figure.of([answer["cpu_seconds"] for answer in answers]),
    }
    return Row(name, figures, {"peak_memory_bytes": memory, "num_tokens": answers[0]["num_tokens"]})


def _compare(place: Workplace, corpus: Corpus, report: Report, tell: Tell) -> None:
    for row in report.rows:
        engine = row.name.removesuffix(THREADS)
        if engine == place.reference:
            row.facts["parity"] = "reference"
            continue
        tell(f"comparing ids: {engine}")
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
