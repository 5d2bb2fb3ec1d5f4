"""Small inputs that expand: each is tokenized in time and within `--memory`, or refused in one sentence.

The memory is that of all processes of a run together, shared pages counted once, looked at every 20 ms. A finding is a
run that takes more than `--memory` and a tenth, takes too long, prints a traceback, or loses a document.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tests.faults._tally import Tally
from tests.support.tiny_tokenizers import byte_level_config

MEMORY, MEMORY_BYTES = "1GB", 1_000_000_000
GIGABYTE = 1 << 30
SECONDS = 240
ADDRESS_BYTES = 12 << 30
"""A limit on each process, so that a bomb does not take the machine with it."""
TALK = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
LOOP = "{% for i in range(100000) %}"


class Bomb(NamedTuple):
    """An input, flags, and how many documents the store has; None if the run must end with a sentence."""

    name: str
    make: Callable[[Path], Path]
    documents: int | None
    flags: tuple[str, ...] = ("--tokenizer", "bytes")


def stream(name: str, total: int, line: bytes, start: bytes = b"", end: bytes = b"") -> Callable[[Path], Path]:
    """A compressed file with the same bytes over and over, up to `total` bytes."""

    def make(folder: Path) -> Path:
        piece = line * ((1 << 20) // len(line))
        with (folder / name).open("wb") as file:
            if name.endswith(".gz"):
                file.write(gzip.compress(start) if start else b"")
                member = gzip.compress(piece * 64, 9)
                file.writelines(member for _ in range(total // (64 << 20)))
                file.write(gzip.compress(end))
            else:
                with zstandard.ZstdCompressor(write_checksum=True).stream_writer(file) as out:
                    out.write(start)
                    for _ in range(total >> 20):
                        out.write(piece)
                    out.write(end)
        return folder / name

    return make


def table(name: str, make: Callable[[], pa.Table], **options: object) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        settings = {"compression": "zstd", "write_statistics": False, "store_schema": False, **options}
        pq.write_table(make(), folder / name, **settings)
        return folder / name

    return write


def shared(text: str, count: int) -> pa.Table:
    """A table whose rows all refer to one text."""
    return pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), [text])})


def talk(count: int) -> pa.Table:
    """A table of one conversation whose messages all refer to one text."""
    content = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), [LONG])
    messages = pa.StructArray.from_arrays([pa.array(["user"] * count), content], ["role", "content"])
    return pa.table({"messages": pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), messages)})


def declared(folder: Path) -> Path:
    """A page that says that it has 2 GB, and has 4 KB."""
    size = 140 << 20
    path = table("declared.parquet", lambda: pa.table({"text": pa.array(["a" * size])}), use_dictionary=False)(folder)
    data = path.read_bytes()
    at = data.index(_varint(size + 4)) if _varint(size + 4) in data else data.index(_varint(size + 10))
    path.write_bytes(data[:at] + _varint((1 << 31) - 1) + data[at + 5 :])
    return path


def _varint(number: int) -> bytes:
    """A number as Thrift's compact protocol writes it."""
    number, found = number << 1, b""
    while number > 127:
        found, number = found + bytes([number & 127 | 128]), number >> 7
    return found + bytes([number])


def talks(template: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "bomb.jinja").write_text(template)
        (folder / "talks.jsonl").write_text(f"{TALK}\n" * 2000)
        return folder / "talks.jsonl"

    return make


def normalizing(content: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        step = {"type": "Replace", "pattern": {"String": "a"}, "content": content}
        (folder / "tokenizer.json").write_text(json.dumps({**byte_level_config(), "normalizer": step}))
        (folder / "in.jsonl").write_text(json.dumps({"text": "a banana " * 1000}) + "\n")
        return folder / "in.jsonl"

    return make


CHAT = ("--tokenizer", "bytes", "--messages-key", "messages", "--chat-template", "{folder}/bomb.jinja")
OWN = ("--tokenizer", "{folder}/tokenizer.json", "--no-eos")
ONE = b'{"text": "one"}\n'
LONG = "many words of one text " * 50_000
BOMBS = (
    Bomb("5 GB of line ends, .txt.gz", stream("in.txt.gz", 5 * GIGABYTE, b"\n", b"one\n", b"two\n"), 2),
    Bomb("5 GB of line ends, .jsonl.gz", stream("in.jsonl.gz", 5 * GIGABYTE, b"\n", ONE, ONE), 2),
    Bomb("5 GB of blank lines, .jsonl.zst", stream("in.jsonl.zst", 5 * GIGABYTE, b" \r\n", ONE, ONE), 2),
    Bomb("a line of 5 GB, .jsonl.zst", stream("in.jsonl.zst", 5 * GIGABYTE, b"a", b'{"text": "', b'"}\n'), None),
    Bomb("a line of 5 GB, .txt.zst", stream("in.txt.zst", 5 * GIGABYTE, b"ab "), None),
    Bomb("a line of 5 GB of zeros, .txt.gz", stream("in.txt.gz", 5 * GIGABYTE, b"\0"), None),
    Bomb("a line of 5 GB, skipped", stream("in.txt.zst", 5 * GIGABYTE, b"a", b"one\n", b"\ntwo\n"), 2,
         ("--tokenizer", "bytes", "--on-error", "skip")),
    Bomb("20,000 rows of one text", table("in.parquet", lambda: shared(LONG, 20_000)), 100,
         ("--tokenizer", "bytes", "--limit", "100")),
    Bomb("a dictionary that Arrow keeps", table("in.parquet", lambda: shared(LONG, 20_000), store_schema=True), 100,
         ("--tokenizer", "bytes", "--limit", "100")),
    Bomb("rows that repeat the row before", table("in.parquet", lambda: pa.table({"text": [LONG] * 9000}),
         use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"}), 100,
         ("--tokenizer", "bytes", "--limit", "100")),
    Bomb("a conversation of one text", table("in.parquet", lambda: talk(3000), store_schema=True), None,
         ("--tokenizer", "bytes", "--messages-key", "messages", "--prompts-only", "--on-error", "skip")),
    Bomb("a value of 1.5 GB", table("in.parquet", lambda: pa.table({"text": pa.array(["a" * 1_500_000_000])}),
         use_dictionary=False), None),
    Bomb("a page of 1.5 GB", table("in.parquet", lambda: pa.table({"text": ["a" * 400] * 4_000_000}),
         use_dictionary=False, data_page_size=1 << 31, max_rows_per_page=1 << 31), None),
    Bomb("a page that says 2 GB", declared, None),
    Bomb("a width in a chat template", talks('{{ "%1000000000d" % 1 }}'), None, CHAT),
    Bomb("loops in a chat template", talks(f"{LOOP}{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}{{% endfor %}}"), None, CHAT),
    Bomb("a normalizer that inserts a megabyte", normalizing("b" * 1_000_000), None, OWN),
    Bomb("a normalizer that inserts a line", normalizing("b" * 60), 1, OWN),
)  # fmt: skip


def family(process: int) -> list[int]:
    """A process and all its descendants."""
    found = [process]
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            children = Path(f"/proc/{process}/task/{thread}/children").read_text().split()
            found += [one for child in children for one in family(int(child))]
    except OSError:
        pass
    return found


def memory_of(process: int) -> int:
    """The memory of a process; pages that several share are divided among them."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))


def judge(bomb: Bomb, folder: Path) -> tuple[str, str]:
    """What is wrong with a run over a bomb, empty if nothing is; and a line of figures."""
    made, store = bomb.make(folder), folder / "store"
    flags = [flag.format(folder=folder) for flag in bomb.flags]
    command = [sys.executable, "-m", "tokenmill", "tokenize", str(made), "-o", str(store), *flags, "--memory", MEMORY]
    started, peak = time.monotonic(), 0
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen([*command, "-q"], stdout=said, stderr=said, preexec_fn=limit, start_new_session=True)
        while process.poll() is None and time.monotonic() - started < SECONDS:
            peak = max(peak, sum(map(memory_of, family(process.pid))))
            time.sleep(0.02)
        if process.returncode is None:
            os.killpg(process.pid, 9)
            process.wait()
    seconds, text = time.monotonic() - started, (folder / "said").read_text(errors="replace")
    line = f"{bomb.name:<38} {made.stat().st_size:>12,} bytes {seconds:>6.1f} s {peak / 1e6:>6.0f} MB"
    return wrong(bomb, store, process.returncode, peak, seconds, text), line


def wrong(bomb: Bomb, store: Path, code: int, peak: int, seconds: float, said: str) -> str:
    if peak > MEMORY_BYTES * 1.1:
        return f"took {peak / 1e6:.0f} MB"
    if seconds >= SECONDS:
        return "does not end"
    if "Traceback" in said or "terminate called" in said:
        return said[-600:]
    if bomb.documents is None:
        is_sentence = code in (1, 2) and said.strip().rpartition("\n")[2].startswith("error: ")
        return "" if is_sentence and "was lost with worker" not in said else f"exit {code}: {said[-600:]}"
    if code:
        return f"exit {code}: {said[-600:]}"
    found = sum(
        split["num_documents"] for split in json.loads((store / "manifest.json").read_bytes())["splits"].values()
    )
    return "" if found == bomb.documents else f"{found} documents, not {bomb.documents}"


def main() -> None:
    tally, wanted = Tally("bombs"), sys.argv[1:]
    for bomb in BOMBS:
        if wanted and bomb.name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            finding, line = judge(bomb, Path(folder))
        print(line, flush=True)
        tally.case(bomb.name, finding)
    tally.end()


if __name__ == "__main__":
    main()
