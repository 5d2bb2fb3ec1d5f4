"""Engines inside a contender's process, loaded from the folder of the workplace."""

from __future__ import annotations

import time
from itertools import cycle, islice
from pathlib import Path

from tokenmill.bench.documents import batches, read_documents
from tokenmill.bench.measuring import Answer
from tokenmill.engines import REFERENCES, Engine, EngineName, create, open_tokenizer

__all__ = ["BATCH", "BATCH_BYTES", "encode_all", "load_engine", "try_engine"]

BATCH, BATCH_BYTES = 1000, 1_000_000
TRY_SECONDS, TRY_BYTES, TRY_BATCHES = 0.3, 100_000, 10


def load_engine(tokenizer: str, engine: EngineName | None = None, *, threads: bool = False) -> Engine:
    """An engine for the tokenizer in a folder: its reference, unless another one is named."""
    if engine == "gigatoken":
        from tokenmill.engines.gigatoken import return_plain_arrays

        return_plain_arrays()
    opened = open_tokenizer(Path(tokenizer), name="tokenizer")
    return create(engine or REFERENCES[opened.kind], opened, threads=threads)


def encode_all(engine: Engine, texts: list[list[str]]) -> int:
    """Encode batch by batch; how many tokens that gave."""
    return sum(len(engine.encode(some).ids) for some in texts)


def try_engine(engine: EngineName, tokenizer: str, documents: str) -> Answer:
    """About how fast an engine is on one core, once it has seen some of the words."""
    loaded = load_engine(tokenizer, engine)
    texts = list(islice(batches(read_documents(documents), BATCH, TRY_BYTES), TRY_BATCHES))
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
