"""Speed and time left: those of the last seconds of work, without start-up and earlier attempts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tokenmill.display import Silence
from tokenmill.pipeline.counts import Counts, Pace, Rates, Stages
from tokenmill.pipeline.journal.attempts import Observer
from tokenmill.pipeline.journal.journal import Journal
from tokenmill.pipeline.plan.budget import Budget
from tokenmill.tools.status import _add_up


def make_counts(*, done: int, text: int, started: float = 0.0, resumed: int = 0) -> Counts:
    work = Stages(num_bytes=text, num_tokens=text // 4)
    return Counts(10_000, done_bytes=done, resumed_bytes=resumed, work_started=started, work=work)


def test_rates_are_those_of_the_last_seconds() -> None:
    pace = Pace()
    assert pace.measure(Counts(10_000), 90.0) == Rates()
    for second in range(21):
        # A slow first half, then ten times as fast.
        text = second * 10 if second <= 10 else 100 + (second - 10) * 100
        rates = pace.measure(make_counts(done=text // 2, text=text, started=100.0), 100.0 + second)
    assert rates.text == pytest.approx(100, rel=0.01)
    assert rates.input == pytest.approx(50, rel=0.01)
    assert rates.tokens == pytest.approx(25, rel=0.05)


def test_a_long_silence_slows_the_rate_but_does_not_end_it() -> None:
    pace = Pace()
    for second in range(11):
        pace.measure(make_counts(done=second * 10, text=second * 10, started=0.0), float(second))
    silent = pace.measure(make_counts(done=100, text=100), 30.0)
    assert 0 < silent.text < 10
    assert pace.measure(make_counts(done=100, text=100), 60.0).text < silent.text


def test_work_begins_before_its_first_report() -> None:
    counts = Counts(100)
    counts.add_work(Stages(encode=5.0))
    assert counts.work_started is None
    counts.add_work(Stages(num_bytes=10, read=1.0, encode=1.0))
    assert counts.work_started == pytest.approx(time.monotonic() - 2.0, abs=0.5)


def observe(tmp_path: Path, counts: Counts, seconds_before: float) -> Observer:
    (tmp_path / ".tasks").mkdir()
    observer = Observer(Journal(tmp_path), Silence(), Budget(2, 10**9, 10**8, False), seconds_before)
    observer.observe(counts)
    observer.close(completed=False)
    return observer


def test_neither_start_up_nor_resumed_work_is_in_the_time_left(tmp_path: Path) -> None:
    started = time.monotonic() - 5.0
    counts = make_counts(done=9_500, text=1_000, started=started, resumed=9_000)
    snapshot = observe(tmp_path, counts, seconds_before=65.0).snapshot
    assert snapshot is not None
    assert snapshot.seconds == pytest.approx(65.0, abs=1.0)
    assert snapshot.startup_seconds == pytest.approx(60.0, abs=1.0)
    # 500 bytes of inputs in 5 seconds, and 500 are left.
    assert snapshot.eta_seconds == pytest.approx(5.0, rel=0.1)
    assert snapshot.text_rate == snapshot.text_per_second == pytest.approx(200.0, rel=0.1)
    together = _add_up([snapshot, snapshot], 0, 2)
    assert together.startup_seconds == snapshot.startup_seconds
    assert together.text_per_second == pytest.approx(400.0, rel=0.1)


def test_before_the_first_text_all_time_is_start_up(tmp_path: Path) -> None:
    snapshot = observe(tmp_path, Counts(10_000), seconds_before=3.0).snapshot
    assert snapshot is not None
    assert snapshot.startup_seconds == snapshot.seconds
    assert snapshot.eta_seconds is None
