"""Look at the inputs before a run: size, content fingerprint, compression and format of each.

A file that was named, or that a glob matches, is read whatever it is. A directory was named for its data, and may hold
a README.md or a LICENSE beside it. So of a directory only the kind is read that has most of its text; the display says
what is left out. Markdown counts as documentation where there is anything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tokenmill.compression import lacks_checksum
from tokenmill.display import Display, Silence
from tokenmill.errors import DataError
from tokenmill.files import detect_compression, fingerprint, open_input
from tokenmill.formatting import format_bytes, plural
from tokenmill.inputs import Input, name_inputs
from tokenmill.pipeline.input_file import COMPRESSION_RATIO, InputFile
from tokenmill.readers import MARKDOWN, detect_format, format_by_name
from tokenmill.readers.base import ReadOptions
from tokenmill.remote.paths import input_path

__all__ = ["describe_inputs", "explain_checksums", "explain_formats", "inspect_inputs"]

HEAD_BYTES = 1 << 16
NUM_THREADS = 8
MOST_NAMES = 3
KINDS = {"jsonl": "JSON", "json": "JSON", "parquet": "Parquet", "text": "text", MARKDOWN: "text"}
"""The kinds of which a directory has one: JSON lines and JSON hold records both, and prose comes as either text."""
NAMES = {"jsonl": "JSON lines", "json": "JSON", "parquet": "Parquet", "text": "plain text", MARKDOWN: "Markdown"}


class _Look(msgspec.Struct, frozen=True):
    """What the first bytes of an input say."""

    item: Input
    bytes: int
    mtime_ns: int
    compression: str = "none"
    format: str | None = None
    """None if it has no format that is read."""
    lacks_checksum: bool = False
    error: DataError | None = None
    lacks_separator: bool = False
    """Whether --separator is in its head only if its line ends are CR LF."""
    is_lost: bool = False
    """Whether the system cannot read it; any other error is one of its format."""

    @property
    def weight(self) -> tuple[int, int]:
        """How much it counts for the kind of its directory."""
        text = self.bytes if self.compression == "none" else self.bytes * COMPRESSION_RATIO
        return (0, 0) if self.format == MARKDOWN else (text, 1)


def inspect_inputs(
    inputs: Sequence[Input], format: str, options: ReadOptions, display: Display | None = None
) -> list[InputFile]:
    """Find size, fingerprint, compression and format of the inputs; leave out what a directory has beside its data."""
    pool = ThreadPoolExecutor(NUM_THREADS)
    try:
        looks = list(pool.map(lambda item: _look(item, format, options), inputs))
        is_plain = options.whole_files or options.separator is not None
        if format == "auto" and not is_plain and any(item.folder for item in inputs):
            looks = _leave_out(looks, display)
        for look in looks:
            if look.error is not None:
                raise look.error
        if options.separator is not None:
            _say_separators(looks, options.separator, display or Silence())
        names = name_inputs([look.item for look in looks])
        return list(pool.map(_describe, looks, names))
    finally:
        # Ctrl-C must not wait for a thread that reads from a disk which does not answer.
        pool.shutdown(wait=False, cancel_futures=True)


def _look(item: Input, format: str, options: ReadOptions) -> _Look:
    path = input_path(item.path)
    num_bytes = mtime_ns = 0
    try:
        status = path.stat()
        num_bytes, mtime_ns = status.st_size, status.st_mtime_ns
        with open_input(path) as file:
            head = file.read(HEAD_BYTES) or b""
        compression = detect_compression(head, str(path))
        format = detect_format(path, head, options) if format == "auto" else format
        if format == "parquet" and compression != "none":
            raise DataError(str(path), "is compressed Parquet; decompress it: Parquet compresses its own pages")
        lacks_separator = options.separator is not None and compression == "none"
        lacks_separator = lacks_separator and _lacks_separator(head, options.separator or "")
        return _Look(
            item, num_bytes, mtime_ns, compression, format, lacks_checksum(head), lacks_separator=lacks_separator
        )
    except OSError as error:
        lost = DataError(str(path), f"cannot be read: {error.strerror}")
        return _Look(item, num_bytes, mtime_ns, error=lost, is_lost=True)
    except DataError as error:
        return _Look(item, num_bytes, mtime_ns, format=_format_of_name(item.path), error=error)


def _lacks_separator(head: bytes, separator: str) -> bool:
    if "\n" not in separator or "\r" in separator:
        return False
    given = separator.encode()
    return given not in head and given.replace(b"\n", b"\r\n") in head


def _say_separators(looks: list[_Look], separator: str, display: Display) -> None:
    """Say that text with the line ends of Windows will not be cut."""
    found = [look for look in looks if look.lacks_separator]
    if found:
        more = f" and {len(found) - 1:,} more" if len(found) > 1 else ""
        written = separator.replace("\n", "\\r\\n")
        display.say(
            f"{found[0].item.path}{more}: lines end with CR LF, so --separator is not in the text; pass --separator "
            f"'{written}'",
            style="yellow",
        )


def _format_of_name(path: str) -> str | None:
    """The format of `train.jsonl`, also of `train.jsonl.xz`, which cannot be read but is data."""
    stem = path.rpartition("/")[2].rpartition(".")[0]
    return format_by_name(input_path(path)) or (format_by_name(Path(stem)) if "." in stem else None)


def _leave_out(looks: list[_Look], display: Display | None) -> list[_Look]:
    """Of each directory, keep the kind that has most of its text."""
    weights: dict[str, dict[str, list[int]]] = {}
    for look in looks:
        if look.item.folder is not None and look.format is not None:
            weight = weights.setdefault(look.item.folder, {}).setdefault(KINDS[look.format], [0, 0])
            weight[:] = [weight[0] + look.weight[0], weight[1] + look.weight[1]]
    kinds = {folder: max(found, key=found.__getitem__) for folder, found in weights.items()}
    left_out: dict[str, list[_Look]] = {}
    for look in looks:
        if not _belongs(look, kinds):
            left_out.setdefault(look.item.folder or "", []).append(look)
    for folder, others in left_out.items():
        (display or Silence()).say(_explain_left_out(folder, kinds[folder], others), style="yellow")
    return [look for look in looks if _belongs(look, kinds)] if left_out else looks


def _belongs(look: _Look, kinds: dict[str, str]) -> bool:
    """Whether an input is of the kind of its directory, or has to be reported because the system cannot read it."""
    kind = kinds.get(look.item.folder or "")
    return (
        kind is None or look.item.is_chosen or look.is_lost or (look.format is not None and KINDS[look.format] == kind)
    )


def _explain_left_out(folder: str, kind: str, others: list[_Look]) -> str:
    names = [
        f"{look.item.path.removeprefix(folder).lstrip('/')} ({NAMES[look.format] if look.format else 'unknown format'})"
        for look in others[:MOST_NAMES]
    ]
    more = f" and {len(others) - MOST_NAMES:,} more" if len(others) > MOST_NAMES else ""
    they = "it" if len(others) == 1 else "them"
    return f"left out of {folder}, which has mostly {kind}: {', '.join(names)}{more}; to read {they}, name {they}"


def _describe(look: _Look, name: str) -> InputFile:
    path = input_path(look.item.path)
    assert look.format is not None
    try:
        return InputFile(
            path=str(path.absolute()),
            name=name,
            bytes=look.bytes,
            fingerprint=fingerprint(path),
            mtime_ns=look.mtime_ns,
            format=look.format,
            compression=look.compression,
            origin=look.item.origin,
            lacks_checksum=look.lacks_checksum,
        )
    except OSError as error:
        raise DataError(str(path), f"cannot be read: {error.strerror}") from None


def describe_inputs(files: Sequence[InputFile], options: ReadOptions) -> str:
    """`2 files of plain text, 3 kB; each line is a document`, or `3 files, 9 kB: 2 of JSON lines (gzip), 1 of JSON`."""
    kinds = Counter((NAMES[file.format], file.compression) for file in files)
    shown = [
        (f"{name} ({compression})" if compression != "none" else name, count)
        for (name, compression), count in kinds.most_common()
    ]
    size = format_bytes(sum(file.bytes for file in files))
    by_line = ""
    if any(file.format == "text" for file in files) and options.separator is None and not options.whole_files:
        by_line = "; each line is a document" if len(shown) == 1 else "; each line of plain text is a document"
    if len(shown) == 1:
        return f"{plural(len(files), 'file')} of {shown[0][0]}, {size}{by_line}"
    each = ", ".join(f"{count:,} of {name}" for name, count in shown)
    return f"{plural(len(files), 'file')}, {size}: {each}{by_line}"


def explain_formats(files: Iterable[InputFile]) -> str | None:
    """Return a note on inputs that are named like text but hold JSON lines; None if there are none."""
    renamed = [
        file for file in files if file.format == "jsonl" and format_by_name(input_path(file.path)) in ("text", MARKDOWN)
    ]
    if not renamed:
        return None
    names = renamed[0].shown + (f" and {len(renamed) - 1:,} more" if len(renamed) > 1 else "")
    return f"{names}: JSON lines by content, and read as such; pass --format text to tokenize the lines as they are"


def explain_checksums(files: Iterable[InputFile]) -> str | None:
    """Return a note on compressed inputs in which damage may go unnoticed; None if there are none."""
    unchecked = [file for file in files if file.lacks_checksum]
    if not unchecked:
        return None
    names = unchecked[0].shown + (f" and {len(unchecked) - 1:,} more" if len(unchecked) > 1 else "")
    return f"{names}: zstd without a checksum, so damage may go unnoticed; compress with zstd --check"
