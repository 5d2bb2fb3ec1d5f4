"""The documents that finished tasks send to be compared with the reference.

A run compares them as its tasks finish. Those of earlier attempts and of other ranks are in the journal. The process
that writes the manifest first compares what it has not compared itself, because a kill may have prevented it elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from contextlib import closing

from tokenmill.engines import Tokenizer, make_reference
from tokenmill.engines.base import SpecialTokens
from tokenmill.errors import TokenmillError
from tokenmill.machine import usable_cores
from tokenmill.pipeline.input_file import InputFile
from tokenmill.pipeline.journal.journal import Journal, TaskRecord
from tokenmill.pipeline.parity import Compared, ParityCheck
from tokenmill.text_batch import shorten

__all__ = ["compare_rest", "refuse", "start_parity_check"]

WAIT_SECONDS = 0.01
MOST_OPEN = 64


def start_parity_check(tokenizer: Tokenizer, special_tokens: SpecialTokens) -> ParityCheck:
    """Begin to load the reference of a tokenizer for comparisons."""
    return ParityCheck(lambda: make_reference(tokenizer, special_tokens), usable_cores())


def compare_rest(
    journal: Journal,
    records: Iterable[TaskRecord],
    inputs: list[InputFile],
    start: Callable[[], ParityCheck],
    compared: Collection[str] = (),
) -> None:
    """Compare the documents of finished tasks, except those with the names `compared`; raise if one differs."""
    names = [record.name for record in records if record.num_compared and record.name not in compared]
    if not names:
        return
    with closing(start()) as parity_check:
        for name in names:
            parity_check.submit(name, journal.sample(name))
            _take(journal, inputs, parity_check, MOST_OPEN)
        _take(journal, inputs, parity_check, 0)


def _take(journal: Journal, inputs: list[InputFile], parity_check: ParityCheck, most_open: int) -> None:
    """Take results until at most `most_open` tasks are still being compared; raise if one differs."""
    while True:
        for compared in parity_check.take():
            if compared.differing:
                raise refuse(journal, inputs, compared)
        if parity_check.num_open <= most_open:
            return
        time.sleep(WAIT_SECONDS)


def refuse(journal: Journal, inputs: list[InputFile], compared: Compared) -> TokenmillError:
    """Take back a task whose documents differ, so that no other process finishes the store; return the error."""
    record, gate, first = journal.record(compared.name), journal.gate(), compared.differing[0]
    if record is not None:
        journal.forget(record)
    engine, reference = "the engine", "its reference"
    if gate is not None and gate.parity is not None:
        engine, reference = gate.engine, gate.parity.reference
    where = f"{inputs[first.input].shown}, at {'row' if inputs[first.input].format == 'parquet' else 'byte'} "
    return TokenmillError(
        f"{engine} differs from {reference} on a document of {where}{first.position:,}: {shorten(first.text, 80)!r}; "
        f"make the store again with --engine {reference} --overwrite, and report the document"
    )
