"""For any lines, cut into any tasks, compressed in any way: every document once, every reject with its place."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.running import compress, rejects_of, sources_of, texts_of, tokenize_here
from tokenmill.errors import TokenmillError

texts = st.text(st.sampled_from('ab é日😀\\"\n'), max_size=60)
good_lines = st.builds(
    lambda text, ascii: json.dumps({"text": text}, ensure_ascii=ascii).encode(), texts, st.booleans()
)
odd_lines = st.sampled_from(
    [b"", b" ", b"\r", b"{", b'{"text":1}', b"\xff", b'{"text":"\xff"}', b"[]", b'{"text":"\\ud800"}', b'{"text":null}']
)
lines = st.one_of(good_lines, good_lines, odd_lines).flatmap(lambda line: st.sampled_from([line, line, line + b"\r"]))
files = st.tuples(
    st.lists(lines, max_size=25).map(b"\n".join),
    st.sampled_from([b"", b"\n"]),
    st.sampled_from([b"", b"", b"\xef\xbb\xbf"]),
).map(lambda parts: parts[2] + parts[0] + parts[1])

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where syncing costs nothing."""
Found = tuple[int, int, int, "str | None"]


def read_simply(data: bytes, input: int) -> list[Found]:
    """Input, line, byte and text of every record of JSON lines; None for a text that cannot be had."""
    found: list[Found] = []
    start = 0
    for number, line in enumerate(data.split(b"\n")):
        record = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
        if record.strip():
            try:
                text = json.loads(record.decode())["text"]
                text.encode()
            except (ValueError, KeyError, TypeError, AttributeError):
                text = None
            found.append((input, number + 1, start, text))
        start += len(line) + 1
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(files, st.sampled_from(["none", "gz", "zst"])), min_size=1, max_size=4),
    st.sampled_from([1, 10, 60, 400, 1 << 20]),
    st.one_of(st.none(), st.integers(1, 40)),
    st.sampled_from([0.0, 0.0, 0.4]),
    st.integers(1, 3),
)
def test_a_run_finds_what_a_simple_reader_finds(
    contents: list[tuple[bytes, str]], task_bytes: int, limit: int | None, val_fraction: float, workers: int
) -> None:
    expected: list[Found] = []
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        paths = [Path(folder) / f"{number}.jsonl" for number in range(len(contents))]
        for number, (data, kind) in enumerate(contents):
            paths[number].write_bytes(compress(data, kind))
            expected += read_simply(data, number)
        expected = expected[:limit]
        run = partial(
            tokenize_here,
            [str(path) for path in paths],
            Path(folder) / "out",
            tokenizer="bytes",
            on_error="skip",
            task_bytes=task_bytes,
            limit=limit,
            val_fraction=val_fraction,
            workers=workers,
        )
        if expected and all(text is None for *_, text in expected):
            with pytest.raises(TokenmillError, match=r"documents were rejected|no record that was read has the text"):
                run()
            return
        store = run()
        found: list[tuple[int, int, str]] = []
        for split, info in store.manifest.splits.items():
            if info.shards:
                table = sources_of(store, split)
                columns = (table[name].to_pylist() for name in ("input", "position"))
                documents = list(zip(*columns, texts_of(store, split), strict=True))
                assert documents == sorted(documents, key=lambda document: document[:2])
                found += documents
        rejects = [(row["file"], row["line"], row["byte"]) for row in rejects_of(store.path)]
    assert store.manifest.num_documents_in == len(expected)
    assert sorted(found) == [(input, byte, text) for input, _, byte, text in expected if text is not None]
    assert rejects == [(f"{input}.jsonl", line, byte) for input, line, byte, text in expected if text is None]
