"""The shape of the package: imports point one way, heavy packages load when used, names are public on purpose."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tokenmill

ROOT = Path(tokenmill.__file__).parent
LEVELS = [
    {
        "errors",
        "arguments",
        "clock",
        "remote",
        "compression",
        "files",
        "batch",
        "machine",
        "progress",
        "monitoring",
        "schemas",
    },
    {"inputs", "readers", "engines", "executors"},
    {"store", "supervision"},
    {"pipeline", "dataset"},
    {"loaders", "exporters"},
    {"verification", "comparison", "inspection", "status", "training", "tracing", "estimation", "report"},
    {"summary", "bench"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
SEAMS = {"inputs", "readers", "engines", "executors", "loaders", "exporters"}
HEAVY = {
    "torch",
    "jax",
    "grain",
    "tensorflow",
    "ray",
    "pyarrow",
    "tokenizers",
    "gigatoken",
    "awkward",
    "sentencepiece",
    "tiktoken",
    "array_record",
    "matplotlib",
    "huggingface_hub",
    "datasets",
}
ONLY_IN = {
    "gigatoken": {"engines/gigatoken.py"},
    "awkward": set(),
    "sentencepiece": {"engines/tokenizer.py"},
    "tiktoken": {"engines/tiktoken.py"},
    "tiktoken_ext": {"engines/tiktoken.py"},
    "torch": {"bench/loaders.py", "loaders/torch.py", "exporters/pt.py", "store/foreign/pt.py"},
    "jax": {"loaders/jax.py"},
    "grain": {"loaders/grain.py"},
    "tensorflow": {"loaders/tf.py"},
    "ray": {"executors/ray.py"},
    "array_record": {"exporters/arrayrecord.py"},
    "datasets": set(),
    "huggingface_hub": {
        "engines/hub.py",
        "inputs/hub/fetching.py",
        "inputs/hub/refusals.py",
        "inputs/hub/repository.py",
    },
    "matplotlib": {"bench/plots.py"},
    "obstore": {"remote/client.py"},
}


def level_of(part: str) -> int:
    return next(number for number, parts in enumerate(LEVELS) if part in parts)


def imports(path: Path) -> list[tuple[str, bool]]:
    """Modules that a file imports, and whether it does so as soon as it is imported itself."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, id(node) in top))
    return found


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    relative = path.relative_to(ROOT)
    part = relative.parts[0].removesuffix(".py")
    for module, _ in imports(path):
        if not module.startswith("tokenmill."):
            continue
        other = module.split(".")[1]
        assert level_of(other) <= level_of(part), f"{relative} imports {module}, which is above it"
        if part in SEAMS and other in SEAMS:
            assert other == part, f"{relative} imports {module}: seams do not import each other"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_packages_are_imported_when_used_and_in_one_place(path: Path) -> None:
    relative = str(path.relative_to(ROOT))
    for module, at_once in imports(path):
        package = module.split(".")[0]
        assert not (package in HEAVY and at_once), f"{relative} imports {package} as soon as it is imported"
        if package in ONLY_IN:
            assert relative in ONLY_IN[package], f"{relative} imports {package}"


def test_public_names_are_sorted_and_exist() -> None:
    assert sorted(tokenmill.__all__) == tokenmill.__all__
    for name in tokenmill.__all__:
        assert getattr(tokenmill, name) is not None
    assert dir(tokenmill) == tokenmill.__all__


def test_import_is_fast_and_light() -> None:
    program = "import sys, tokenmill; print(' '.join(sorted(m for m in sys.modules if '.' not in m)))"
    best = 9.0
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        best = min(best, time.perf_counter() - started)
    loaded = set(done.stdout.split())
    assert not loaded & (HEAVY | {"numpy", "rich", "typer"})
    assert best < 0.15
