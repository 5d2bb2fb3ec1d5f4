"""Every input that the fuzzer kept, and those that it begins with, given to its target once, without the fuzzer."""

from __future__ import annotations

import pytest

from tests.faults import fuzz_targets


@pytest.mark.parametrize("name", fuzz_targets.TARGETS)
def test_inputs_of_the_fuzzer_get_a_right_answer_or_a_sentence(name: str) -> None:
    for data in [*fuzz_targets.seeds(name), *fuzz_targets.kept(name)]:
        fuzz_targets.TARGETS[name](data)
