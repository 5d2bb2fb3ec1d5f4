"""A type checker finds misspelt flags and values, and knows the arrays of a batch: mypy reads a program of a user."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

import tokenmill as tm
from tokenmill.errors import UsageError
from tokenmill.filling.layouts import LAYOUTS
from tokenmill.loaders import FRAMEWORKS
from tokenmill.loaders.load_settings import AnySettings, FrameworkName, LayoutName
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.run_flags import RunFlags, SharedRunFlags
from tokenmill.streaming.tokenized_text import RowSettings

ROOT = Path(__file__).resolve().parents[1]

PROGRAM = """
import tokenmill as tm

store = tm.tokenize("a", "b", tokenizer="t", val_fraction=0.1, workers=2, on_error="skip")
reveal_type(store)  # TokenStore
tm.tokenize("a", "b", tokenizer="t", val_fractoin=0.1)  # did you mean "val_fraction"
tm.tokenize("a", "b", tokenizer="t", on_error="skipp")  # No overload variant
tm.tokenize("a", "b", tokenizer=7)  # No overload variant
tm.estimate("a", tokenizer="t", limti=3)  # Unexpected keyword argument "limti"
tm.load("a", 8, 8, packing="bestfit")  # No overload variant
tm.load("a", 8, 8, framework="pytorch")  # No overload variant
tm.load("a", 8, 8, device="cuda")
tm.load("a", 8, 8, framework="torch", device="cuda", tokenizer="t", cache="c", text_key="content")
tm.load("a", 8, 8, sede=1)  # Unexpected keyword argument "sede"
tm.stream("a", 8, 8, tokenizer="t", cache="c", windows="1GB")  # did you mean "window"
tm.inspect("a", row=3, packing="bestfit")  # incompatible type "Literal['bestfit']"
tm.export("a", "b", to="megatorn")  # incompatible type "Literal['megatorn']"
tm.export("a", "b", to="hf", seqlen=5)  # did you mean "seq_len"

for x, y in tm.load("a", 8, 8, framework="torch"):
    reveal_type(x)  # torch._tensor.Tensor
for batch in tm.load("a", 8, 8):
    reveal_type(batch.positions)  # numpy.ndarray
for jax_batch in tm.load("a", 8, 8, framework="jax"):
    reveal_type(jax_batch.inputs)  # Array
for streamed in tm.stream("a", 8, 8, tokenizer="t", cache="c", framework="torch"):
    reveal_type(streamed)  # Batch[torch._tensor.Tensor]
for pair in tm.load("a", 8, 8, packing="pairs"):
    reveal_type(pair)  # "Any"
for laid_out in tm.load("a", 8, 8, framework="torch", layout="hf"):
    reveal_type(laid_out)  # "Any"
"""


def test_mypy_finds_misspelt_flags_and_knows_the_type_of_a_batch(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    said: dict[int, str] = {}
    for number, text in re.findall(r"^.*program\.py:(\d+): (.*)$", done.stdout, re.MULTILINE):
        said[int(number)] = said.get(int(number), "") + text
    lines = dict(enumerate(PROGRAM.splitlines(), 1))
    expected = {number: line.partition("  # ")[2] for number, line in lines.items() if "  # " in line}
    assert {number: text[:200] for number, text in said.items() if number not in expected} == {}
    for number, text in expected.items():
        assert text in said.get(number, ""), f"{lines[number]}: {said.get(number)}"


def test_the_types_have_the_flags_that_a_run_has() -> None:
    apart = {"inputs", "out", "tokenizer", "executor", "rank"}
    assert set(RunFlags.__annotations__) == set(Request.__struct_fields__) - apart
    ranks = {"world_size", "overwrite", "scratch", "batch_size", "seed"}
    assert set(SharedRunFlags.__annotations__) == set(RunFlags.__annotations__) - ranks


def test_the_types_have_the_settings_that_loaders_have(open_tiny_store: Callable[[], tm.TokenStore]) -> None:
    assert set(get_args(FrameworkName)) == set(FRAMEWORKS)
    assert set(get_args(LayoutName)) == {*LAYOUTS, "pairs", "prompts"}
    typed = {*AnySettings.__annotations__, "batch_size", "framework", "packing", "layout", "tokenizer"}
    of_text = {*SharedRunFlags.__annotations__, "cache", "verbose", *RowSettings.__struct_fields__}
    known = set()
    for framework in ("numpy", "torch", "jax"):
        with pytest.raises(UsageError) as refused:
            tm.load(open_tiny_store(), 8, 8, framework=framework, unknown=1)  # type: ignore[call-overload]
        known |= set(str(refused.value).partition("; there are ")[2].split(", "))
    assert known <= typed
    assert typed <= known | of_text
