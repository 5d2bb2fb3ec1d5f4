"""The documents of a benchmark: a part of the user's input, the same for everybody.

They are written to a folder as plain JSON lines, so that a contender needs no reader of its own and
formats and compression do not enter. Of each file its share is taken, from the start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from tokenmill.bench.measuring import Contender, ask
from tokenmill.engines import REFERENCES, EngineName, Tokenizer, load_tokenizer
from tokenmill.errors import UsageError
from tokenmill.inputs import expand_inputs, text_key_of
from tokenmill.pipeline.plan import InputFile, Span, inspect_inputs
from tokenmill.pipeline.reading import read_span
from tokenmill.progress import choose_display
from tokenmill.readers.base import ReadOptions

__all__ = ["MOST_BYTES", "Corpus", "Source", "Workplace", "batches", "read_documents", "workplace"]

PROBE_BYTES = 1_000_000
"""How much the reference is tried on, to find out how much it manages in the time there is."""
LEAST_BYTES, MOST_BYTES = 500_000, 64_000_000


class Corpus(msgspec.Struct, frozen=True):
    """Documents in a file of JSON lines."""

    path: str
    num_documents: int
    num_bytes: int
    """Of text, as UTF-8."""
    num_rejects: int = 0
    is_whole: bool = True
    """Whether this is all that the inputs have."""

    def head(self, fraction: float, path: Path) -> Corpus:
        """The first part of the documents, as a file of its own."""
        return write_documents(read_documents(self.path), path, int(self.num_bytes * fraction))


class Source(msgspec.Struct, frozen=True):
    """Where documents come from, and the tokenizer they are for."""

    inputs: list[str]
    tokenizer: str
    text_key: str | None = None


class Workplace:
    """A folder for a benchmark with the tokenizer in it, and the inputs that documents come from."""

    def __init__(self, folder: Path, source: Source) -> None:
        self.folder = folder
        display = choose_display()
        found = expand_inputs(source.inputs, display)
        self._options = ReadOptions(text_key=text_key_of(found, source.text_key, display))
        self.files = inspect_inputs(found, "auto", self._options)
        self.tokenizer: Tokenizer = load_tokenizer(source.tokenizer)
        self.reference: EngineName = REFERENCES[self.tokenizer.kind]
        self.tokenizer.save(self.tokenizer_folder)

    @property
    def tokenizer_folder(self) -> Path:
        """Where contenders find the tokenizer; a name or a download is resolved once."""
        return self.folder / "tokenizer"

    def collect(self, max_bytes: int | None, seconds: float) -> Corpus:
        """The first so many bytes of the inputs, or as many as the reference encodes in some seconds on one core.

        The reference is tried in any case: a tokenizer that it cannot load is refused here.
        """
        path = self.folder / "documents.jsonl"
        speed = self.speed(self.reference, self._write(path, PROBE_BYTES))
        return self._write(path, max_bytes or int(min(MOST_BYTES, max(LEAST_BYTES, speed * seconds))))

    def speed(self, engine: str, corpus: Corpus) -> float:
        """About how many bytes of text an engine encodes per second and core."""
        target = "tokenmill.bench.encoding:try_engine"
        settings = {"engine": engine, "tokenizer": str(self.tokenizer_folder), "documents": corpus.path}
        return float(ask(Contender(engine, target, settings))["bytes_per_second"])

    def _write(self, path: Path, max_bytes: int) -> Corpus:
        sample = _Sample(self.files, self._options, max_bytes)
        corpus = write_documents(sample.texts(), path, max_bytes)
        if not corpus.num_documents:
            raise UsageError(f"{self.files[0].path}: no document was found; say which field holds it with --text-key")
        is_whole = corpus.is_whole and not sample.is_cut
        return msgspec.structs.replace(corpus, num_rejects=sample.num_rejects, is_whole=is_whole)


@contextmanager
def workplace(source: Source) -> Iterator[Workplace]:
    """A temporary folder; TMPDIR says on which disk."""
    with TemporaryDirectory(prefix="tokenmill-bench-") as folder:
        yield Workplace(Path(folder), source)


def write_documents(texts: Iterator[str], path: Path, max_bytes: int) -> Corpus:
    """Write documents up to a number of bytes; the last one may go beyond."""
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
    """The documents one by one, as everybody's own script reads them."""
    with Path(path).open("rb") as file:
        for line in file:
            yield json.loads(line)["text"]


def batches(texts: Iterator[str], size: int, max_bytes: float = math.inf) -> Iterator[list[str]]:
    """Lists of so many documents, or fewer where they are long."""
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


class _Sample:
    """Texts of all inputs, of each its share of the bytes."""

    def __init__(self, files: Sequence[InputFile], options: ReadOptions, max_bytes: int) -> None:
        self._files = files
        self._options = options
        total = sum(file.text_bytes for file in files)
        self._share = max_bytes / total if total > max_bytes else math.inf
        self.num_rejects = 0
        self.is_cut = False

    def texts(self) -> Iterator[str]:
        for number, file in enumerate(self._files):
            yield from self._read(file, Span(number), self._share * file.text_bytes)

    def _read(self, file: InputFile, span: Span, share: float) -> Iterator[str]:
        taken = 0
        for batch in read_span(file, span, self._options):
            self.num_rejects += sum(reject.num_documents for reject in batch.rejects)
            for text in batch.texts:
                if taken >= share:
                    self.is_cut = True
                    return
                taken += len(text.encode())
                yield text
