"""The pages in `docs/recipes` and `make test-trainers` agree: versions, and code that runs inside trainers."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.interop.environments import TRAINERS
from tests.interop.run_trainers import PROGRAMS
from tests.interop.run_trainers import TRAINERS as RUNS
from tokenmill.errors import MissingDependencyError

RECIPES = Path(__file__).resolve().parents[1] / "docs" / "recipes"
BLOCK = re.compile(r"^```python in (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [(page.name, *block) for page in sorted(RECIPES.glob("*.md")) for block in BLOCK.findall(page.read_text())]


@pytest.mark.parametrize(("page", "name", "code"), BLOCKS, ids=lambda value: value[:20])
def test_code_for_a_trainer_is_run_by_its_program(page: str, name: str, code: str) -> None:
    ast.parse(code)
    programs = [(PROGRAMS / run.program).read_text() for run in RUNS.values()]
    assert any(f'recipe("{page}", "{name}")' in text for text in programs)


def test_pages_name_the_versions_that_run() -> None:
    pages = "".join(page.read_text() for page in RECIPES.glob("*.md"))
    pinned = [package.split("==") for lists in TRAINERS.values() for one in lists for package in one if "==" in package]
    for package, version in pinned:
        if package not in ("torch", "litdata"):
            assert re.search(rf"\b{re.escape(version)}\b", pages), f"no page in docs/recipes names {package} {version}"


@pytest.mark.parametrize("name", ["torchtitan", "trl"])
def test_a_missing_trainer_is_named(name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(MissingDependencyError, match=rf"loaders\.{name} needs a package .* 'tokenmill\[{name}\]'"):
        importlib.import_module(f"tokenmill.loaders.{name}")
