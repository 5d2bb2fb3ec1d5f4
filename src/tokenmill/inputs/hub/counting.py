"""How many documents a file has at least, for those who want only the first few of a large data set."""

from __future__ import annotations

import msgspec

from tokenmill.inputs.peeking import is_json, read_blocks

__all__ = ["count_documents"]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def count_documents(path: str, most: int) -> int:
    """Rows of Parquet, and lines of JSON that begin like a record; of other files, whether there is anything in them.

    It is never more than a reader finds, so whoever stops at some number has at least as many.
    """
    if path.endswith(".parquet"):
        return _count_rows(path)
    if is_json(path):
        return _count_records(path, most)
    return int(any(data.strip() for data in read_blocks(path)))


def _count_rows(path: str) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except (OSError, pa.ArrowException):
        return 0


def _count_records(path: str, most: int) -> int:
    """Lines that begin with an object; only whether there is one where the first line is no whole one."""
    count, last = 0, b"\n"
    for number, data in enumerate(read_blocks(path)):
        if number == 0:
            data = data.removeprefix(BYTE_ORDER_MARK)
            if not _begins_with_record(data):
                return int(data.lstrip(b"[ \t\r\n").startswith(b"{"))
        count += (last + data).count(b"\n{")
        last = data[-1:]
        if count >= most:
            break
    return count


def _begins_with_record(data: bytes) -> bool:
    """Whether the first line is a whole object."""
    line = data.lstrip().partition(b"\n")[0]
    try:
        msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True
