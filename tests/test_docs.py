"""Every command and every Python block in README and docs runs as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import make_texts, write_jsonl
from tests.hub_repositories import add_named
from tests.hub_server import serving
from tests.object_server import KEYS, make_bucket

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(sh|python|yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def workplace(tmp_path: Path, tiny_tokenizer: Path) -> Path:
    """What the pages take for granted: a corpus, a tokenizer and a few odd files."""
    texts = make_texts(120, seed=4)
    meta = [{"source": f"s{number % 3}"} for number in range(60)]
    write_jsonl(tmp_path / "corpus" / "a.jsonl", texts[:60], id=list(range(60)), meta=meta)
    write_jsonl(tmp_path / "corpus" / "b.jsonl", texts[60:], id=list(range(60)), meta=meta)
    (tmp_path / "files.txt").write_text("corpus/a.jsonl\ncorpus/b.jsonl\n")
    (tmp_path / "notes.txt").write_text("one line\n\nanother\nparagraph\n\nlast\n")
    pq.write_table(pa.table({"body": [{"text": text} for text in texts[:20]]}), tmp_path / "table.parquet")
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "good"}) + "\n{bad\n")
    (tmp_path / "tokenizer").symlink_to(tiny_tokenizer)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What leads programs to a server on loopback with the data sets that pages name."""
    with serving() as server:
        add_named(server)
        yield {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / "hf")}


def find_objects(page: str, request: pytest.FixtureRequest, folder: Path) -> dict[str, str]:
    """What leads programs to a server on loopback with the bucket that a page names, if it does."""
    if not any("s3://my-bucket" in text for _, text in BLOCK.findall(page)):
        return {}
    endpoint = request.getfixturevalue("s3_server")
    make_bucket(endpoint, "my-bucket")
    return {**KEYS, "AWS_ENDPOINT_URL": endpoint, "TOKENMILL_CACHE": str(folder / "cache")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_a_page_runs(
    page: Path, workplace: Path, hub: dict[str, str], request: pytest.FixtureRequest
) -> None:
    blocks = BLOCK.findall(page.read_text())
    hub = hub | find_objects(page.read_text(), request, workplace)
    for _, text in (block for block in blocks if block[0] == "yaml"):
        (workplace / "run.yaml").write_text(text)
    program = Path(sys.executable).parent
    # Threads that wait for each other are many times slower on a busy machine.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PATH": f"{program}:{os.environ['PATH']}", **hub}
    for kind, text in blocks:
        if kind == "yaml":
            continue
        command = ["bash", "-euc", text] if kind == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=workplace, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
