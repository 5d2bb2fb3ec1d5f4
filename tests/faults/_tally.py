"""What every fault test prints: each finding as it is found, and a last line that `run.py` reads.

NAME: N cases, F findings, T s
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from typing import NoReturn


class Tally:
    """Counts cases and findings; threads may share it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self.num_cases = 0
        self.num_findings = 0
        self.notes: Counter[str] = Counter()

    def case(self, what: str, finding: str = "") -> None:
        """Count one case; a finding describes what went wrong in it."""
        with self._lock:
            self.num_cases += 1
            if finding:
                self.num_findings += 1
                print(f"FINDING {what}: {finding}", flush=True)

    def note(self, what: str, count: int = 1) -> None:
        """Count an event that has a line of its own."""
        with self._lock:
            self.notes[what] += count

    def end(self) -> NoReturn:
        """Print the tally; exit with 1 if there are findings."""
        for what, count in sorted(self.notes.items()):
            print(f"{what:<40} {count:7,d}")
        seconds = time.monotonic() - self._started
        print(f"{self._name}: {self.num_cases} cases, {self.num_findings} findings, {seconds:.0f} s")
        sys.exit(1 if self.num_findings or not self.num_cases else 0)
