"""The documents of a benchmark: a part of the user's input, the same for all contenders.

They are written to a folder as plain JSON lines, together with the tokenizer. So no contender needs a reader of its
own, and file formats and compression do not influence the result.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from tokenmill.display import choose_display
from tokenmill.engines import REFERENCES, Engine, EngineName, Tokenizer, create, load_tokenizer, open_tokenizer
from tokenmill.errors import UsageError
from tokenmill.tools._input_sample import InputSample, open_inputs
from tokenmill.tools.bench.contenders import Answer, Contender, Effort, run_once
from tokenmill.tools.bench.measurement import Measurement, measure

__all__ = [
    "BATCH_BYTES",
    "BenchInput",
    "Corpus",
    "Workplace",
    "encode_all",
    "load_engine",
    "make_batches",
    "read_documents",
    "workplace",
]

PROBE_BYTES = 1_000_000
"""The reference encodes this much text first, to estimate how much it encodes in the available time."""
LEAST_BYTES, MOST_BYTES = 500_000, 64_000_000
TRY_SECONDS, TRY_BYTES, TRY_BATCHES = 0.3, 100_000, 10
BATCH, BATCH_BYTES = 1000, 1_000_000


class BenchInput(msgspec.Struct, frozen=True):
    """The inputs that documents come from, and the tokenizer that encodes them."""

    inputs: list[str]
    tokenizer: str
    text_key: str | None = None


class Corpus(msgspec.Struct, frozen=True):
    """Documents in a file of JSON lines."""

    path: str
    num_documents: int
    num_bytes: int
    """Of text, as UTF-8."""
    num_rejects: int = 0
    is_whole: bool = True
    """Whether these are all documents of the inputs."""

    def head(self, fraction: float, path: Path) -> Corpus:
        """Write the first part of the documents to a file of its own."""
        return write_documents(read_documents(self.path), path, int(self.num_bytes * fraction))

    def speeds(self, answers: Sequence[Answer]) -> dict[str, Measurement]:
        """Compute how fast the documents were encoded; some contenders encode several copies of them."""
        copies = answers[0].get("copies", 1)
        amounts = {
            "mb_per_second": self.num_bytes * copies / 1e6,
            "documents_per_second": self.num_documents * copies,
            "tokens_per_second": answers[0]["num_tokens"],
        }
        speeds = {
            key: Measurement.of([amount / answer["seconds"] for answer in answers]) for key, amount in amounts.items()
        }
        return {**speeds, **measure(answers, "seconds", "cpu_seconds")}


class Workplace:
    """A folder for a benchmark, with the tokenizer and the documents in it.

    The documents are the effort's `max_bytes` of the inputs, or as much as the reference encodes in some seconds on
    one core. The reference is tried in any case, so that a tokenizer that it cannot load is refused here.
    """

    def __init__(self, folder: Path, source: BenchInput, effort: Effort, seconds: float) -> None:
        self.folder = folder
        self._files, self._options = open_inputs(source.inputs, choose_display(), source.text_key)
        # Contenders find the tokenizer in the folder, so that names and downloads are resolved only once.
        self.tokenizer: Tokenizer = load_tokenizer(source.tokenizer)
        self.tokenizer.save(folder / "tokenizer")
        self.reference: EngineName = REFERENCES[self.tokenizer.kind]
        self.settings = {"tokenizer": str(folder / "tokenizer"), "documents": str(folder / "documents.jsonl")}
        """The settings that all contenders need."""
        effort.on_stage("reading documents")
        self.corpus = self._write(PROBE_BYTES)
        speed = self.speed(self.reference)
        self.corpus = self._write(effort.max_bytes or int(min(MOST_BYTES, max(LEAST_BYTES, speed * seconds))))

    def speed(self, engine: str) -> float:
        """Measure roughly how many bytes of text an engine encodes per second and core."""
        settings = {"engine": engine, **self.settings}
        return float(run_once(Contender(engine, f"{__name__}:try_engine", settings))["bytes_per_second"])

    def describe(self) -> dict[str, Any]:
        """Describe the documents for a report."""
        return {
            "files": len(self._files),
            "is_whole": self.corpus.is_whole,
            "num_documents": self.corpus.num_documents,
            "num_bytes": self.corpus.num_bytes,
            "num_rejects": self.corpus.num_rejects,
            "tokenizer": self.tokenizer.name,
            "vocab_size": self.tokenizer.vocab_size,
        }

    def _write(self, max_bytes: int) -> Corpus:
        sample = InputSample(self._files, self._options, max_bytes, spread=False)
        corpus = write_documents(sample.texts(), self.folder / "documents.jsonl", max_bytes)
        if not corpus.num_documents:
            raise UsageError(f"{self._files[0].path}: no document was found; name the field with --text-key")
        is_whole = corpus.is_whole and sample.is_whole
        return msgspec.structs.replace(corpus, num_rejects=sample.num_rejects, is_whole=is_whole)


@contextmanager
def workplace(source: BenchInput, effort: Effort, seconds: float) -> Iterator[Workplace]:
    """Make a temporary folder; TMPDIR says on which disk."""
    with TemporaryDirectory(prefix="tokenmill-bench-") as folder:
        yield Workplace(Path(folder), source, effort, seconds)


def write_documents(texts: Iterator[str], path: Path, max_bytes: int) -> Corpus:
    """Write documents up to a number of bytes; the last one may exceed it."""
    num_documents = num_bytes = 0
    is_whole = True
    with path.open("wb") as file:
        for text in texts:
            if num_documents and num_bytes >= max_bytes:
                is_whole = False
                break
            file.write(msgspec.json.encode({"text": text}) + b"\n")
            num_documents += 1
            num_bytes += len(text.encode())
    return Corpus(str(path), num_documents, num_bytes, is_whole=is_whole)


def read_documents(path: str) -> Iterator[str]:
    """Read the documents one by one, as a typical script does."""
    with Path(path).open("rb") as file:
        for line in file:
            yield json.loads(line)["text"]


def make_batches(texts: Iterator[str], size: int = BATCH, max_bytes: float = math.inf) -> Iterator[list[str]]:
    """Lists of `size` documents, or of fewer long ones."""
    some: list[str] = []
    num_bytes = 0
    for text in texts:
        some.append(text)
        num_bytes += len(text)
        if len(some) == size or num_bytes >= max_bytes:
            yield some
            some, num_bytes = [], 0
    if some:
        yield some


def load_engine(tokenizer: str, engine: EngineName | None = None, *, threads: bool = False) -> Engine:
    """Load an engine for the tokenizer in a folder: its reference, unless another one is named."""
    if engine == "gigatoken":
        from tokenmill.engines.gigatoken import return_plain_arrays

        return_plain_arrays()
    opened = open_tokenizer(Path(tokenizer), name="tokenizer")
    return create(engine or REFERENCES[opened.kind], opened, threads=threads)


def encode_all(engine: Engine, texts: list[list[str]]) -> int:
    """Encode batch by batch and count the tokens."""
    return sum(len(engine.encode(some).ids) for some in texts)


def try_engine(engine: EngineName, tokenizer: str, documents: str) -> Answer:
    """Measure roughly how fast an engine is on one core, once its caches hold some of the words."""
    loaded = load_engine(tokenizer, engine)
    texts = list(islice(make_batches(read_documents(documents), BATCH, TRY_BYTES), TRY_BATCHES))
    encode_all(loaded, texts)
    done = 0
    started = time.perf_counter()
    for some in cycle(texts):
        loaded.encode(some)
        done += sum(len(text.encode()) for text in some)
        elapsed = time.perf_counter() - started
        if elapsed > TRY_SECONDS:
            break
    return {"bytes_per_second": max(1.0, done / elapsed)}
