"""What `--monitor` and `status --watch` show of a machine, on a terminal of 80 columns."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from tokenmill.display import Machine, PlainLines, Preparation, Snapshot, WorkerMoment
from tokenmill.display.monitor import draw_monitor

LONG = "a/long/way/down/to/a/file/whose/name/is/part-00000.jsonl.zst"


def make_moment(cores: list[float], num_workers: int = 2, bytes_per_second: float = 9e7) -> Snapshot:
    workers = [
        WorkerMoment(
            name=f"worker {number}",
            pid=number,
            task=f"00000-{number:04d}",
            input=LONG,
            task_seconds=4000.0,
            bytes_per_second=bytes_per_second + number * 1e6,
        )
        for number in range(num_workers)
    ]
    machine = Machine(
        cores=cores,
        disk_free=10**12,
        stages={"read": 0.1, "decompress": 0.2, "parse": 0.2, "encode": 0.4, "write": 0.1},
        workers=workers,
        slowest_task="00000-0001",
        slowest_input=LONG,
        slowest_seconds=4000.0,
    )
    return Snapshot(
        seconds=100.0,
        total_bytes=10**12,
        done_bytes=10**11,
        resumed_bytes=0,
        num_text_bytes=10**11,
        num_documents=10**9,
        num_tokens=10**11,
        num_rejects=12_345,
        num_workers=num_workers,
        num_tasks_done=7,
        memory_bytes=10**11,
        memory_limit=2 * 10**11,
        bottleneck="encode",
        text_rate=1e9,
        token_rate=1e9,
        machine=machine,
    )


def draw(moment: Snapshot) -> list[str]:
    console = Console(file=io.StringIO(), width=80, color_system=None, highlight=False)
    console.print(draw_monitor(moment, 80))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_the_documents_of_a_resumed_run_are_those_of_the_attempt() -> None:
    """The share that is done includes earlier attempts, and the counts beside it do not."""
    moment = make_moment([1.0], num_workers=1)
    assert " docs in this attempt" not in moment.line()
    assert " docs in this attempt" in msgspec.structs.replace(moment, resumed_bytes=10**10).line()


@pytest.mark.parametrize("num_cores", [1, 12, 13, 16, 64, 65, 192])
def test_every_core_is_shown_and_every_label_is_whole(num_cores: int) -> None:
    lines = draw(make_moment([1.0] * num_cores, num_workers=num_cores))
    assert max(map(len, lines)) <= 80
    for label in ("cores ", "memory ", "disk ", "stages ", "slowest task "):
        assert sum(line.startswith(label) for line in lines) == 1
    first = next(number for number, line in enumerate(lines) if line.startswith("cores "))
    last = next(number for number, line in enumerate(lines) if line.startswith("memory "))
    shown = "".join(lines[first:last])
    assert shown.count("100%" if num_cores <= 12 else "█") == num_cores


def test_a_block_is_as_high_as_its_core_is_busy() -> None:
    lines = draw(make_moment([number / 16 for number in range(17)]))
    assert "▁▁▂▂▃▃▄▄▅▅▆▆▇▇███" in "".join(lines)
    assert any("50% of 17 cores, 2 idle" in line for line in lines)


def test_of_many_workers_the_slowest_are_shown() -> None:
    lines = draw(make_moment([0.5], num_workers=13))
    assert "and 1 faster worker" in lines
    shown = "\n".join(lines)
    assert "worker 11 " in shown and "worker 12 " not in shown


def test_the_last_line_of_a_run_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainLines()
    fetched = Preparation(action="fetching", what="1 file", unit="rows", seconds=2.0, total=1, done=1)
    display.update(fetched)
    display.close()
    ended = msgspec.structs.replace(make_moment([1.0]), done_bytes=10**12)
    display._last = 0.0
    for moment in (ended, msgspec.structs.replace(ended, seconds=101.0), msgspec.structs.replace(ended, seconds=102.0)):
        display.update(moment)
    display.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("%")[0].strip() for line in lines] == ["fetching  100.0", "100.0"]


def test_small_runs_have_a_speed_and_one_of_anything_is_singular() -> None:
    one = {"num_documents": 1, "num_rejects": 1, "text_rate": 20_000.0}
    assert "20 kB/s  1.0G tok/s  1 doc  1 reject" in msgspec.structs.replace(make_moment([1.0]), **one).line()
    assert "1.00 GB/s  1.0G tok/s" in make_moment([1.0]).line()
    row = Preparation(action="writing", what="", unit="rows", seconds=1.0, total=1, done=1)
    assert row.line() == "writing  100.0%  ETA 00:00  1 row of 1 row  1 row/s"
