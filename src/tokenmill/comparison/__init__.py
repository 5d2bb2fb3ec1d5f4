"""Comparing a store with the inputs it was made from: the same documents, the reference's ids.

Documents are found again by the input and position that the store keeps for each one (`finding.py`), and
encoded by the library that defines the ids, whatever engine made the store (`judging.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenmill.comparison.finding import Source, choose_documents, tasks_of
from tokenmill.comparison.judging import Comparison, Judge
from tokenmill.engines import REFERENCES, open_tokenizer
from tokenmill.inputs import expand_inputs
from tokenmill.pipeline.plan import InputFile, inspect_inputs
from tokenmill.pipeline.settings import supervision_of
from tokenmill.progress import choose_display
from tokenmill.readers.base import ReadOptions
from tokenmill.store.manifest import Manifest
from tokenmill.supervision.rendering import Renderer

__all__ = ["Comparison", "compare_with_inputs"]


def compare_with_inputs(
    store: Path, manifest: Manifest, against: Sequence[str], *, every: bool, advance: Callable[[int, int], None]
) -> Comparison:
    """Read documents of a sound store from its inputs again and compare the ids with the reference's."""
    report = Comparison(REFERENCES[manifest.tokenizer.kind])
    options = _read_options(manifest)
    renderer = _make_renderer(store, manifest)
    files = _match_inputs(manifest, against, options, report)
    chosen = choose_documents(manifest, every)
    total = sum(map(len, chosen.values()))
    judge = Judge(store, manifest, report, lambda done: advance(done, total))
    render = renderer.render if renderer is not None else None
    source = Source(files, options, render, task_bytes=manifest.settings["task-bytes"], sequential=every)
    for task in tasks_of(store, manifest, chosen) if files else ():
        for row, document in source.find(task):
            if document is None:
                report.note(
                    f"{manifest.inputs[task.input[row]].path} has no document at position {task.position[row]}, from "
                    f"where {task.name(row)} came; tokenize again with --overwrite"
                )
            else:
                judge.add(task, row, document)
        judge.close()
    if every and manifest.settings["limit"] is None and len(files) == len(manifest.inputs):
        # Plain texts are refused for their special tokens after reading, records before.
        refused_later = manifest.rejects.get("special-token", 0) if renderer is None else 0
        missing = source.count_unwanted() - refused_later
        if missing:
            report.note(f"the inputs have {missing:,} documents that are neither in the store nor among its rejects")
    report.close()
    return report


def _read_options(manifest: Manifest) -> ReadOptions:
    """The reading flags of the run that made the store."""
    settings = manifest.settings
    supervision = supervision_of(settings)
    return ReadOptions(
        record_keys=supervision.keys if supervision is not None else (),
        text_key=settings["text-key"],
        keep_keys=tuple(settings["keep-keys"]),
        separator=settings["separator"],
        whole_files=settings["whole-files"],
        max_document_bytes=settings["max-document-bytes"],
    )


def _make_renderer(store: Path, manifest: Manifest) -> Renderer | None:
    supervision = supervision_of(manifest.settings)
    if supervision is None:
        return None
    return Renderer(
        supervision,
        open_tokenizer(store / "tokenizer", "tokenizer"),
        check_specials=manifest.special_tokens.in_text == "error",
        max_bytes=manifest.settings["max-document-bytes"],
    )


def _match_inputs(
    manifest: Manifest, against: Sequence[str], options: ReadOptions, report: Comparison
) -> dict[int, InputFile]:
    """The given files by their number in the store; those that differ are named and left aside."""
    inputs = expand_inputs(against, choose_display(), manifest.settings["limit"])
    found = {file.name: file for file in inspect_inputs(inputs, manifest.settings["format"], options)}
    matched = {}
    for number, known in enumerate(manifest.inputs):
        file = found.pop(known.path, None)
        if file is None:
            report.note(f"input {known.path} of the store is not among --against; pass the inputs of the run")
        elif file.bytes != known.bytes:
            report.note(f"input {known.path} has {file.bytes:,} bytes and had {known.bytes:,} when it was tokenized")
        elif file.fingerprint != known.fingerprint:
            report.note(f"input {known.path} has other content than when it was tokenized, at the same size")
        else:
            matched[number] = file
    for name in found:
        report.note(f"{name} is not an input of the store; pass the inputs of the run with --against")
    return matched
