"""Every command and every Python block in README and docs runs as written, and no line is too long."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import make_texts, write_jsonl
from tests.support.hub_repositories import add_named
from tests.support.hub_server import serving
from tests.support.object_server import KEYS, make_bucket, moto_server
from tests.support.structures import NANOCHAT
from tests.support.warm_python import ONE_THREAD, PACKAGES, WarmPython

ROOT = Path(__file__).resolve().parents[1]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*GUIDES, *(ROOT / name for name in ("FORMAT.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
BLOCK = re.compile(r"^```(sh|python|yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
LONGEST_LINE = 120


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pickled_encoding() -> bytes:
    """A `tokenizer.pkl` as nanochat writes it."""
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b" th": 257}
    specials = {"<|bos|>": 258, "<|user_start|>": 259}
    return pickle.dumps(tiktoken.Encoding("rustbpe", pat_str=NANOCHAT, mergeable_ranks=ranks, special_tokens=specials))


@pytest.fixture
def workplace(tmp_path: Path, tiny_tokenizer: Path) -> Path:
    """The files that pages assume: a corpus, a tokenizer and a few others."""
    texts = make_texts(120, seed=4)
    meta = [{"source": f"s{number % 3}"} for number in range(60)]
    write_jsonl(tmp_path / "corpus" / "a.jsonl", texts[:60], id=list(range(60)), meta=meta)
    write_jsonl(tmp_path / "corpus" / "b.jsonl", texts[60:], id=list(range(60)), meta=meta)
    (tmp_path / "files.txt").write_text("corpus/a.jsonl\ncorpus/b.jsonl\n")
    (tmp_path / "notes.txt").write_text("one line\n\nanother\nparagraph\n\nlast\n")
    pq.write_table(pa.table({"body": [{"text": text} for text in texts[:20]]}), tmp_path / "table.parquet")
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "good"}) + "\n{bad\n")
    (tmp_path / "tokenizer.pkl").write_bytes(pickled_encoding())
    (tmp_path / "tokenizer").symlink_to(tiny_tokenizer)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    """The address of a server on loopback with the data sets that pages name."""
    with serving() as server:
        add_named(server)
        yield server.endpoint


@pytest.fixture(scope="module")
def environment(hub: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables that lead programs to the Hub on loopback."""
    return {**ONE_THREAD, **os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path_factory.mktemp("hf"))}


@pytest.fixture(scope="module")
def warm_python(environment: dict[str, str]) -> Iterator[WarmPython]:
    """Programs that start as forks: a page runs about ten, and half of them import torch or JAX."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder:  # the path of a socket must be short
        warm = WarmPython(Path(folder), environment)
        try:
            yield warm
        finally:
            warm.stop()


def find_objects(page: str, request: pytest.FixtureRequest, folder: Path) -> dict[str, str]:
    """Variables that lead programs to a server on loopback with the bucket that a page names, if it does."""
    if not any("s3://my-bucket" in text for _, text in BLOCK.findall(page)):
        return {}
    endpoint = request.getfixturevalue("s3_server")
    make_bucket(endpoint, "my-bucket")
    return {**KEYS, "AWS_ENDPOINT_URL": endpoint, "TOKENMILL_CACHE": str(folder / "cache")}


@pytest.mark.parametrize("page", [page for page in GUIDES if BLOCK.search(page.read_text())], ids=name_of)
def test_every_block_of_a_page_runs(
    page: Path,
    workplace: Path,
    environment: dict[str, str],
    warm_python: WarmPython,
    request: pytest.FixtureRequest,
) -> None:
    content = page.read_text()
    blocks = BLOCK.findall(content)
    variables = environment | find_objects(content, request, workplace) | {"PATH": warm_python.search_path}
    if "moto_server" in content:
        # Not the folder of the server: it has a Python, too.
        (workplace / "bin").mkdir()
        (workplace / "bin" / "moto_server").symlink_to(moto_server())
        variables["PATH"] += f":{workplace / 'bin'}"
    warm_python.start(*(framework for framework in PACKAGES if framework in content))
    for _, text in (block for block in blocks if block[0] == "yaml"):
        (workplace / "run.yaml").write_text(text)
    for kind, text in blocks:
        if kind == "yaml":
            continue
        command = ["bash", "-euc", text] if kind == "sh" else [str(warm_python.folder / "python"), "-c", text]
        done = subprocess.run(command, cwd=workplace, env=variables, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


PROGRAM = """
import pathlib, sys
print(__name__, __file__, sys.argv, pathlib.Path(sys.path[0]).name)
raise SystemExit("bad")
"""


@pytest.mark.parametrize(
    "command",
    [
        "tokenmill --version",
        "tokenmill inspect nowhere",
        "tokenmill tokenize --no-such-flag",
        "echo text | python -c 'import sys; print(sys.argv, sys.path[0], sys.stdin.read()); sys.exit(7)' a b",
        "python program.py one two",
        "python -c 'import os, torch; os.kill(os.getpid(), 9)'",
        'python -c \'import sys; print(sorted({"torch", "jax", "tokenmill"} & set(sys.modules)))\'',
        "python -m tokenmill --version",
        "JAX_PLATFORMS=cpu python -c 'import jax; print(jax.config.jax_platforms)'",
    ],
)
def test_a_warm_program_behaves_like_a_fresh_one(
    command: str, tmp_path: Path, environment: dict[str, str], warm_python: WarmPython
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    warm_python.start(*PACKAGES)
    outcomes = []
    for path in (warm_python.search_path, warm_python.search_path.partition(":")[2]):
        variables = environment | {"PATH": path}
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=variables, capture_output=True, text=True)
        outcomes.append((done.returncode, done.stdout, done.stderr))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("framework", "package"), [("", "datasets"), ("torch", "torch._dynamo"), ("jax", "optax")])
def test_a_warm_program_finds_its_packages_imported(
    framework: str, package: str, environment: dict[str, str], warm_python: WarmPython
) -> None:
    warm_python.start(framework)
    text = f"import {framework or 'json'}\nimport sys\nsys.exit('{package}' not in sys.modules)"
    subprocess.run([str(warm_python.folder / "python"), "-c", text], env=environment, check=True)


def test_a_warm_program_receives_signals(environment: dict[str, str], warm_python: WarmPython) -> None:
    warm_python.start("")
    text = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); print(flush=True); signal.pause()"
    )
    command = [str(warm_python.folder / "python"), "-c", text]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        program.send_signal(signal.SIGTERM)
        assert program.wait(30) == 5


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_line_of_a_page_is_too_long(page: Path) -> None:
    lines = page.read_text().splitlines()
    too_long = [number for number, line in enumerate(lines, 1) if len(line) > LONGEST_LINE and not may_be_long(line)]
    assert not too_long, f"{name_of(page)} has lines of more than {LONGEST_LINE} characters: {too_long}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{name_of(page)} links to {target}, which does not exist"
        if anchor:
            headings = [line.lstrip("# ").lower() for line in path.read_text().splitlines() if line.startswith("#")]
            anchors = [re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings]
            assert anchor in anchors, (
                f"{name_of(page)} links to the section {anchor} of {name_of(path)}, which does not exist"
            )


def may_be_long(line: str) -> bool:
    """A row of a table, a JSON record or an address cannot be wrapped."""
    return line.startswith(("|", '{"')) or any(len(word) > 60 and "://" in word for word in line.split())
