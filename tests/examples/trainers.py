"""What the tests of both trainers share: a trainer as a module, and its logs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load_example(name: str) -> ModuleType:
    """Import a trainer as a module, which costs no new process."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def read_log(path: Path) -> dict[int, str]:
    """Read values by step; a step that was done twice, before and after a kill, must have the same value."""
    values: dict[int, str] = {}
    for line in path.read_text().splitlines():
        step, value = line.split()
        assert values.setdefault(int(step), value) == value, f"step {step} differs when it is repeated"
    return values
