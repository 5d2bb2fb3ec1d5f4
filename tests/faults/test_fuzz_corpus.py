"""Every input that the fuzzer kept, and those that it begins with, given to its target once, without the fuzzer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import fuzz_targets

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("name", fuzz_targets.TARGETS)
def test_inputs_of_the_fuzzer_get_a_right_answer_or_a_sentence(name: str) -> None:
    kept = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    for data in [*fuzz_targets.seeds(name), *kept]:
        fuzz_targets.TARGETS[name](data)
