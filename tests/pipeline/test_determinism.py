"""The bytes of a store follow from its inputs and content flags: not from workers, memory, batches or timing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import tokenmill as tm
from tests.conftest import WORDS
from tests.support.running import compress, jsonl, snapshot, write_parquet

Store = dict[str, bytes]


def make_lines(count: int, seed: int) -> tuple[list[str], bytes]:
    """Texts that do not compress well, and the same as JSON lines with bad ones among them."""
    rng = random.Random(seed)
    texts = [
        " ".join(rng.choice([*WORDS, "\U0003298a'll"]) + f"{rng.getrandbits(40):x}" for _ in range(rng.randint(0, 60)))
        for _ in range(count)
    ]
    lines = jsonl(texts).split(b"\n")
    for _ in range(12):
        bad = rng.choice([b"{broken", b'{"text": 1}', b'{"text": "\xff"}', b"[]", b'{"text": "\\ud800"}', b""])
        lines.insert(rng.randrange(len(lines)), bad)
    return texts, b"\n".join(lines)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Plain, gzip, zstd, Parquet and a JSON array, each large enough for several tasks, and small files."""
    folder = tmp_path_factory.mktemp("mixed")
    for number, (name, kind) in enumerate((("a.jsonl", "none"), ("b.jsonl.gz", "gz"), ("d.jsonl.zst", "zst"))):
        (folder / name).write_bytes(compress(make_lines(90, number)[1], kind))
    texts = make_lines(90, 7)[0]
    write_parquet(
        folder / "c.parquet", [None if n % 50 == 9 else text for n, text in enumerate(texts)], rows_per_group=20
    )
    (folder / "e.json").write_text(json.dumps([{"text": text if n != 3 else n} for n, text in enumerate(texts)]))
    for number in range(6):
        (folder / f"small{number}.jsonl").write_bytes(make_lines(3, 20 + number)[1])
    return [f"{folder}/**"]


@pytest.fixture(scope="module")
def one_stream(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One compressed file, whose text has to be passed to all workers."""
    path = tmp_path_factory.mktemp("stream") / "all.jsonl.zst"
    path.write_bytes(compress(make_lines(300, 50)[1], "zst"))
    return [str(path)]


def run(inputs: list[str], out: Path, tokenizer: str, **flags: Any) -> Store:
    flags = {"task_bytes": 10_000, "val_fraction": 0.2, "on_error": "skip", **flags}
    store = tm.tokenize(inputs, out, tokenizer=tokenizer, **flags)
    assert store.manifest.num_rejects > 5
    assert len(store.manifest.splits["train"].shards) > 7
    return snapshot(out)


@pytest.mark.parametrize("corpus", ["mixed", "one_stream"])
def test_1_2_3_and_7_workers_write_the_same_bytes(
    corpus: str, request: pytest.FixtureRequest, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    inputs = request.getfixturevalue(corpus)
    tokenizer = "bytes" if corpus == "mixed" else str(tiny_tokenizer)
    expected = run(inputs, tmp_path / "1", tokenizer, workers=1)
    assert "rejects.jsonl" in expected
    assert any(name.startswith("val/") for name in expected)
    for workers in (2, 3, 7):
        found = run(inputs, tmp_path / str(workers), tokenizer, workers=workers)
        assert found == expected, f"{workers} workers"


def test_batch_size_memory_and_engine_threads_do_not_change_the_bytes(
    one_stream: list[str], tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(one_stream, tmp_path / "a", str(tiny_tokenizer), workers=2)
    assert run(one_stream, tmp_path / "b", str(tiny_tokenizer), workers=2, batch_size=3) == expected
    monkeypatch.setenv("RAYON_NUM_THREADS", "3")
    assert run(one_stream, tmp_path / "c", str(tiny_tokenizer), workers=1, memory="1GB", batch_size=1) == expected


def test_a_plain_file_and_its_compressed_copies_give_the_same_shards(tmp_path: Path) -> None:
    data = make_lines(300, 9)[1]
    bins = []
    for kind in ("none", "gz", "zst"):
        path = tmp_path / kind / "a.jsonl"
        path.parent.mkdir()
        path.write_bytes(compress(data, kind))
        store = run([str(path)], tmp_path / f"out-{kind}", "bytes", workers=2)
        bins.append({name: content for name, content in store.items() if not name.startswith("manifest")})
    assert bins[0] == bins[1] == bins[2]


def test_where_inputs_lie_and_how_they_are_named_does_not_matter(tmp_path: Path, mixed: list[str]) -> None:
    import shutil

    shutil.copytree(mixed[0].removesuffix("/**"), tmp_path / "elsewhere")
    (tmp_path / "list.txt").write_text("".join(f"{path}\n" for path in sorted((tmp_path / "elsewhere").iterdir())))
    listed = run([f"@{tmp_path / 'list.txt'}"], tmp_path / "b", "bytes", workers=2)
    assert run(mixed, tmp_path / "a", "bytes", workers=2) == listed
