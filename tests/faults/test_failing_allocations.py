"""The modules in C give back what they take, also where any one allocation fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("_testcapi", reason="this Python has no allocations that fail")
pytest.importorskip("tokenmill.engines.words", reason="the modules were not compiled")

PROGRAM = """
import sys
import tracemalloc
import _testcapi
import numpy as np
from tokenmill.engines.unigram import Unigram
from tokenmill.engines.words import Words
from tokenmill.readers import _line_scanner

LINES = b'{"text": "one \\\\u00e9", "id": [1]}\\noops\\n' * 400
FIELDS = ((b"text",), (b"id",))
PACKED = b'"\\xff"'.join(b"text %d of a few words " % number + b"long" * 30 for number in range(300))
KEPT = np.zeros(1 << 16, np.uint16)
KEPT[ord("a") : ord("z")] = range(ord("a"), ord("z"))
PIECES = ["\\u2581".encode(), *(bytes([code]) for code in range(ord("a"), ord("z")))]
EDGES, SCORES = np.cumsum([0, *map(len, PIECES)]), np.full(len(PIECES), -1.0)
CODES = bytes(range(128)).ljust(1 << 16, b"\\x80")
CUTS = np.zeros((256, 256), np.uint8)
CUTS[:, 32] = 1


def spell(words):
    encoded = [word.encode() for word in words]
    ids = np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32)
    return ids, np.cumsum([0, *map(len, encoded)])


def objects():
    return _line_scanner.scan_json(LINES, len(LINES), FIELDS, 100, 100)


def texts():
    return _line_scanner.scan_text(LINES, len(LINES), 100)


def long_texts():
    return [_line_scanner.scan_text(LINES, len(LINES), 3)]


def words():
    table = Words(CODES, CUTS)
    first = table.encode(PACKED, spell, 2)
    again = table.encode(PACKED, spell, 4)
    return first, again


def no_texts():
    table = Words(CODES, CUTS)
    table.encode(PACKED, spell, 2)
    try:
        table.encode(PACKED + b"\\xff", spell, 2)
    except ValueError:
        return table.num_bytes


def unigram():
    return Unigram(b"".join(PIECES), EDGES, SCORES, KEPT, 99, True, True).encode(["abc" * 40] * 50 + ["A", "", "x" * 300])


def call_without(number):
    # Return None if this allocation was needed.
    _testcapi.set_nomemory(number, number + 1)
    try:
        return call()
    except MemoryError:
        return None
    finally:
        _testcapi.remove_mem_hooks()


call = globals()[sys.argv[1]]
expected, most = call(), 16
while call_without(most) is None:
    most *= 2
numbers = [most * i // 200 for i in range(200)] if most > 200 else range(most)
tracemalloc.start()
failures = 0
for is_warm in (False, True):
    for number in numbers:
        found = call_without(number)
        assert found is None or found == expected, number
        failures += found is None
    found = None
    before, now = (now if is_warm else 0), tracemalloc.get_traced_memory()[0]
print(failures, now - before)
"""


@pytest.mark.parametrize("name", ["objects", "texts", "long_texts", "words", "no_texts", "unigram"])
def test_a_failed_allocation_is_an_error_and_nothing_is_lost(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    failures, left = map(int, done.stdout.split())
    # One table of words alone takes more than 100 KB.
    assert failures >= 2
    assert left < 10_000
