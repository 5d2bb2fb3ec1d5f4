"""What every format promises: an export has the store's tokens, all or nothing, and opens as the same documents."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tokenmill as tm
from tests.support.exports import documents_of, set_special_tokens
from tests.support.stores import make_store
from tokenmill.errors import StoreError, UsageError
from tokenmill.formats import FORMATS, _destination, load_format, load_openers
from tokenmill.formats._destination import RECEIPT
from tokenmill.formats.export import Export, export

OF_DOCUMENTS = ("megatron", "nanogpt", "llmc", "datatrove", "olmo")
OF_ROWS = ("parquet", "hf", "pt", "npy", "mds", "litdata", "arrayrecord")
TABLES = ("parquet", "hf")
LINKED = ("megatron", "datatrove", "olmo")
OPENED = ("megatron", "llmc", "nanogpt", "datatrove", "npy", "olmo", "pt", "parquet")
EOS, SEQ_LEN = 9, 4
DOCUMENTS = [[*range(number, number + number % 7), EOS] for number in range(10, 60)]
SPLITS = {"train": DOCUMENTS, "val": DOCUMENTS[:5]}


class Exported(NamedTuple):
    folder: Path
    result: Export
    progress: dict[str, tuple[int, int]]
    """By stage: how many tokens were done in the end, and how many there were."""


@pytest.fixture(autouse=True)
def _without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk; `tests/formats/test_export.py` tests that exports are synced."""
    monkeypatch.setattr(_destination, "sync_directory", lambda path: None)


def make(folder: Path, num_shards: int) -> Path:
    made = make_store(folder, DOCUMENTS, num_shards=num_shards, val=SPLITS["val"])
    return set_special_tokens(made, eos_id=EOS)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 documents in three shards, and a val split of five."""
    return make(tmp_path_factory.mktemp("store"), 3)


@pytest.fixture(scope="module")
def exported(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """One export of the store in each format, for tests that only look at it."""
    made: dict[str, Exported] = {}

    def find(to: str) -> Exported:
        if to not in made:
            folder, progress = tmp_path_factory.mktemp(to) / "out", dict[str, tuple[int, int]]()
            result = run(store, folder, to, advance=lambda stage, done, total: progress.update({stage: (done, total)}))
            made[to] = Exported(folder, result, progress)
        return made[to]

    return find


def run(store: Path, dest: Path, to: str, **settings: Any) -> Export:
    return export(store, dest, to=to, seq_len=SEQ_LEN if to in OF_ROWS else None, **settings)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_suite_knows_every_format() -> None:
    assert {*OF_DOCUMENTS, *OF_ROWS} == set(FORMATS)
    assert load_openers() == tuple(load_format(name) for name in OPENED), "in the order in which they are asked"


@pytest.mark.parametrize("to", FORMATS)
def test_every_token_is_counted(to: str, exported: Callable[[str], Exported]) -> None:
    num_tokens = sum(map(len, DOCUMENTS))
    splits = exported(to).result.splits
    train = splits["train"]
    assert list(splits) == ["train", "val"]
    assert train.num_tokens + train.num_left_out == num_tokens
    assert train.num_left_out == (num_tokens % SEQ_LEN if to in OF_ROWS and to != "npy" else 0)
    assert (train.num_rows is None) == (to in OF_DOCUMENTS)


def test_the_hash_of_the_same_tokens_is_the_same_in_all_formats(exported: Callable[[str], Exported]) -> None:
    assert len({exported(to).result.splits["train"].xxh3 for to in (*OF_DOCUMENTS, "npy")}) == 1
    assert len({exported(to).result.splits["train"].xxh3 for to in OF_ROWS if to != "npy"}) == 1


def opened_as(to: str, documents: list[list[int]]) -> list[list[int]]:
    """Return the documents of an opened export: one per file if the format has no index, one per row of a row format."""
    stream = [token for ids in documents for token in ids]
    if to in OF_ROWS:
        return np.array(stream[: len(stream) // SEQ_LEN * SEQ_LEN]).reshape(-1, SEQ_LEN).tolist()
    return {"nanogpt": [stream], "llmc": [[EOS, *stream[:-1]]]}.get(to, documents)


@pytest.mark.parametrize("to", [to for to in OPENED if to != "npy"])
def test_an_export_is_opened_with_the_same_documents(to: str, exported: Callable[[str], Exported]) -> None:
    opened = tm.open(exported(to).folder)
    found = {name: documents_of(documents) for name, documents in opened.splits.items()}
    assert found == {name: opened_as(to, documents) for name, documents in SPLITS.items()}


@pytest.mark.parametrize("to", ["npy", "hf", "mds", "arrayrecord"])
def test_an_export_that_cannot_be_opened_is_refused(to: str, exported: Callable[[str], Exported]) -> None:
    with pytest.raises(StoreError, match=r"expected ids in one dimension|has no manifest.json"):
        tm.open(exported(to).folder)


@pytest.fixture(scope="module")
def twins(store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A copy of the store, and a store of the same documents in one shard."""
    folder = tmp_path_factory.mktemp("twins")
    shutil.copytree(store, folder / "copy")
    return folder / "copy", make(folder / "single", 1)


@pytest.mark.parametrize("to", FORMATS)
def test_bytes_do_not_depend_on_shards_or_time(
    to: str, exported: Callable[[str], Exported], twins: tuple[Path, Path], tmp_path: Path
) -> None:
    for store, name in zip(twins, ("again", "single"), strict=True):
        run(store, tmp_path / name, to)
    once, again, single = (
        files_of(folder) for folder in (exported(to).folder, tmp_path / "again", tmp_path / "single")
    )
    assert once == again
    # Two files say where documents came from: from which store, and from where in it.
    sources = {"state.json", "train.csv.gz"}
    assert once.keys() == single.keys()
    assert [name for name in once if once[name] != single[name] and Path(name).name not in sources] == []


@pytest.mark.parametrize("to", FORMATS)
def test_one_split_can_be_chosen(to: str, store: Path, tmp_path: Path) -> None:
    assert list(run(store, tmp_path / "out", to, split="val").splits) == ["val"]
    with pytest.raises(UsageError, match="has no split 'test'; it has train, val"):
        run(store, tmp_path / "other", to, split="test")


@pytest.mark.parametrize("to", FORMATS)
def test_an_existing_export_is_replaced_only_when_asked(to: str, store: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    run(store, dest, to)
    before = files_of(dest)
    with pytest.raises(UsageError, match="exists; use another name, or --overwrite"):
        run(store, dest, to)
    assert files_of(dest) == before
    run(store, dest, to, split="val", overwrite=True)
    assert files_of(dest) != before
    assert list(tmp_path.iterdir()) == [dest]


@pytest.mark.parametrize("to", FORMATS)
def test_an_export_that_reads_back_differently_is_never_published(
    to: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = type(load_format(to))
    write = exporter.write

    def damage(self: Any, split: Any, folder: Path) -> None:
        write(self, split, folder)
        if split.name == "train":
            _change_a_token(folder)

    monkeypatch.setattr(exporter, "write", damage)
    with pytest.raises(StoreError, match=r"what was written of split train (reads back as|cannot be read back)"):
        run(store, tmp_path / "out", to)
    assert list(tmp_path.iterdir()) == []


SUFFIXES = (".bin", ".ds", ".npy", ".parquet", ".arrow", ".pt", ".mds", ".array_record")


def _change_a_token(folder: Path) -> None:
    """Change 11 into 77 in the first document, which is 10, 11, 12; or any byte if ids are compressed."""
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
        data = bytearray(path.read_bytes())
        for dtype in ("<u2", "<i4", "<i8"):
            place = data.find(np.array([10, 11, 12], dtype).tobytes())
            if place >= 0:
                data[place + np.dtype(dtype).itemsize] = 77
                break
        else:
            if path.suffix != ".parquet":
                continue
            data[len(data) // 4] ^= 255
        # A link shares its bytes with the store, so write another file.
        path.unlink()
        path.write_bytes(data)
        return
    raise AssertionError("there is no such token")


@pytest.mark.parametrize("to", FORMATS)
def test_a_failure_leaves_nothing_behind(to: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, split: Any, folder: Path) -> Iterator[Any]:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(type(load_format(to)), "read", fail)
        with pytest.raises(OSError, match="No space left"):
            run(store, tmp_path / "out", to)
    assert list(tmp_path.iterdir()) == []
    run(store, tmp_path / "out", to)


@pytest.mark.parametrize("to", [to for to in OF_ROWS if to not in TABLES])
def test_rows_need_a_length(to: str, store: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--to {to} needs --seq-len, the number of tokens per row"):
        export(store, tmp_path / "out", to=to)
    with pytest.raises(UsageError, match="--seq-len 0 must be a whole number, at least 1"):
        export(store, tmp_path / "out", to=to, seq_len=0)


@pytest.mark.parametrize("to", [to for to in OF_ROWS if to != "npy"])
def test_a_split_that_fills_no_row_is_refused(to: str, store: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"split val has 23 tokens, which fill no row of 24"):
        export(store, tmp_path / "out", to=to, seq_len=24)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", OF_DOCUMENTS)
def test_whole_documents_have_no_row_length(to: str, store: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    export(store, tmp_path / "out", to=to, seq_len=16, note=notes.append)
    assert notes == [f"--to {to} stores whole documents; --seq-len 16 is not used"]


@pytest.mark.parametrize("to", [to for to in FORMATS if to not in LINKED])
def test_links_are_refused_if_files_are_not_shards(to: str, store: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--links is for formats whose files are the store's shards"):
        run(store, tmp_path / "out", to, links=True)


@pytest.mark.parametrize("to", LINKED)
def test_links_share_the_bytes_of_the_store_and_copies_replace_links_that_fail(
    to: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store, tmp_path / "links", to, links=True)
    shards = {os.stat(path).st_ino for path in (store / "train").glob("*.bin")}
    found = {path.stat().st_ino for path in (tmp_path / "links").rglob("*") if path.is_file()}
    assert len(shards) == 3 and shards <= found
    with _without(monkeypatch, os, "link"), _without(monkeypatch, os, "copy_file_range"):
        run(store, tmp_path / "copies", to, links=True)
    assert files_of(tmp_path / "copies") == files_of(tmp_path / "links")
    assert not shards & {path.stat().st_ino for path in (tmp_path / "copies").rglob("*")}


@contextmanager
def _without(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Iterator[None]:
    def fail(*arguments: Any, **settings: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    with monkeypatch.context() as patch:
        patch.setattr(module, name, fail)
        yield


@pytest.mark.parametrize("to", FORMATS)
def test_progress_ends_with_the_last_token(to: str, exported: Callable[[str], Exported]) -> None:
    progress = exported(to).progress
    assert list(progress) == ["writing", "checking"]
    for done, total in progress.values():
        # Tokens after the last full row of a split are in the total and never done; nor is llm.c's moved token.
        assert 0.9 * total < done <= total


@pytest.mark.parametrize("to", FORMATS)
def test_an_export_says_what_it_is(to: str, exported: Callable[[str], Exported]) -> None:
    folder, result, _ = exported(to)
    said = json.loads((folder / RECEIPT).read_bytes())
    assert said["format"] == to and said["splits"]["train"]["xxh3"] == result.splits["train"].xxh3
    line = result.line("out")
    assert line.startswith(f"out ({to}): train ") and line.endswith("; tokens read back and equal to the store's")
    assert ("left out" in line) == (to in OF_ROWS and to != "npy")
