"""The shape of the package: imports point one way, heavy packages load when used, names are public on purpose."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill

ROOT = Path(tokenmill.__file__).parent
LEVELS = [
    {
        "errors",
        "arguments",
        "checksum",
        "file_lock",
        "formatting",
        "machine",
        "program",
        "regular_files",
        "step_clock",
        "text_batch",
        "arrow_types",
    },
    {"display", "remote"},
    {"compression"},
    {"files"},
    {"checkpoint"},
    {"inputs", "readers", "engines", "executors"},
    {"store", "supervision"},
    {"dataset", "pipeline"},
    {"filling"},
    {"formats"},
    {"loaders"},
    {"streaming"},
    {"load_any"},
    {"tools"},
    {"cli"},
    {"__main__"},
]
SEAMS = {"inputs", "readers", "engines", "executors", "formats", "loaders"}
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
    "trl",
    "torchtitan",
}
ONLY_IN = {
    "gigatoken": {"engines/gigatoken.py"},
    "awkward": set(),
    "sentencepiece": {"engines/tokenizer.py"},
    "tiktoken": {"engines/tiktoken.py"},
    "tiktoken_ext": {"engines/tiktoken.py"},
    "torch": {"tools/bench/loader_race.py", "loaders/torch.py", "formats/pt.py"},
    "jax": {"loaders/jax.py"},
    "grain": {"loaders/grain.py"},
    "tensorflow": {"loaders/tf.py"},
    "ray": {"executors/ray.py"},
    "array_record": {"formats/arrayrecord.py"},
    "datasets": {"inputs/_hub_layout.py", "loaders/trl.py"},
    "trl": {"loaders/trl.py"},
    "torchtitan": {"loaders/torchtitan.py"},
    "huggingface_hub": {
        "engines/tokenizer.py",
        "inputs/_hub_client.py",
        "inputs/_hub_fetch.py",
        "inputs/_hub_layout.py",
    },
    "matplotlib": {"tools/bench/plots.py"},
    "obstore": {"remote/client.py", "remote/remote_errors.py"},
}


DOCS = ROOT.parents[1] / "docs" / "architecture.md"


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
        if part in SEAMS and other in SEAMS and level_of(other) == level_of(part):
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
        # CPU time: other tests keep the cores busy.
        before = os.times()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        after = os.times()
        best = min(best, sum(after[2:4]) - sum(before[2:4]))
    loaded = set(done.stdout.split())
    assert not loaded & (HEAVY | {"numpy", "rich", "typer"})
    assert best < 0.15


PIPELINE = [
    {"settings", "signals", "counts", "input_file", "inspection", "text_field", "parity"},
    {"request"},
    {"plan"},
    {"journal"},
    {"task"},
    {"workers"},
    {"run", "run_flags"},
    {"tokenize_any"},
]
SAME_NAME = {
    "base",
    "parquet",  # a reader and a format
    "local",  # inputs and processes of this machine
}
"""Base names that two modules may have: backends of two seams with the same subject."""


def module_parts(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).with_suffix("").parts


@pytest.mark.parametrize(
    "path", sorted((ROOT / "pipeline").rglob("*.py")), ids=lambda path: "/".join(module_parts(path))
)
def test_the_parts_of_the_pipeline_import_one_way(path: Path) -> None:
    def place(part: str) -> int:
        return next(number for number, parts in enumerate(PIPELINE) if part in parts)

    own = module_parts(path)[1]
    if own == "__init__":
        return
    for module, _ in imports(path):
        if module.startswith("tokenmill.pipeline."):
            other = module.split(".")[2]
            assert place(other) <= place(own), f"{own} imports {module}, which is above it"


def test_functions_that_are_named_by_strings_exist() -> None:
    pattern = re.compile(r'"(tokenmill(?:\.\w+)+):(\w+)"')
    found = [match for path in FILES for match in pattern.findall(path.read_text())]
    assert found
    for module, function in found:
        assert callable(getattr(importlib.import_module(module), function)), f"{module}:{function}"


def test_helpers_are_imported_inside_their_own_folder_only() -> None:
    for path in FILES:
        for module, _ in imports(path):
            parts = module.split(".")
            for depth, part in enumerate(parts):
                if parts[0] == "tokenmill" and part.startswith("_") and part != "__init__":
                    folder = parts[1:depth]
                    own = list(module_parts(path)[: len(folder)])
                    assert own == folder, f"{path.relative_to(ROOT)} imports {module}, a helper of {'/'.join(folder)}"


def test_pyarrow_opens_files_itself() -> None:
    # Its threads may still hold a Python file when the program exits, which then aborts: once in 600 programs.
    for path in FILES:
        text = path.read_text()
        assert "ParquetFile(" not in text or "open_regular(" not in text or path.name == "regular_files.py", path


def test_the_page_on_architecture_names_every_room_and_only_files_that_exist() -> None:
    page = DOCS.read_text()
    rooms = page.partition("## Rooms")[2].partition("\n## ")[0]
    parts = set().union(*LEVELS) - {"__main__"}
    assert {part for part in parts if re.search(rf"[`/ ]{part}[`/ ]", rooms) is None} == set()
    named = set(re.findall(r"`((?:\w+/)*\w+\.(?:py|c))`", page))
    assert named
    exist = [path.as_posix() for folder in (ROOT, ROOT.parents[1] / "tests") for path in folder.rglob("*.*")]
    assert {name for name in named if not any(path.endswith(f"/{name}") for path in exist)} == set()


def test_no_two_modules_have_one_name() -> None:
    names: dict[str, list[str]] = {}
    for path in FILES:
        parts = module_parts(path)
        if parts[-1] in ("__init__", "__main__") or parts[0] == "cli":
            continue
        names.setdefault(parts[-1].lstrip("_"), []).append("/".join(parts))
    assert [found for name, found in names.items() if len(found) > 1 and name not in SAME_NAME] == []


def test_no_two_classes_have_one_name() -> None:
    names: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in names.items() if len(found) > 1} == {}


def test_files_and_functions_are_short() -> None:
    for path in FILES:
        text = path.read_text()
        relative = path.relative_to(ROOT)
        assert text.count("\n") < 400, f"{relative} has {text.count(chr(10))} lines"
        if relative.parts[0] == "cli":
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.name == "load":
                continue
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 60, f"{relative}: {node.name} has {length} lines"
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len([argument for argument in arguments if argument.arg not in ("self", "cls")])
            assert count <= 9, f"{relative}: {node.name} has {count} parameters"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")
@pytest.mark.parametrize(("walk", "most_functions", "most_files"), [("tokenize", 334, 64), ("load", 114, 20)])
def test_the_walks_of_a_document_and_of_a_batch_get_no_longer(walk: str, most_functions: int, most_files: int) -> None:
    script = Path(__file__).parents[1] / "scripts" / "walks.py"
    done = subprocess.run([sys.executable, str(script), walk], capture_output=True, text=True, check=True)
    found = re.fullmatch(r"(\d+) functions in (\d+) files\n", done.stdout)
    assert found is not None
    assert int(found[1]) <= most_functions
    assert int(found[2]) <= most_files
