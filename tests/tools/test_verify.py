"""`verify` finds and names every defect of a store, and finds none in a sound one."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import make_texts, write_jsonl
from tests.support.running import tokenize_here, write_damaged_parquet
from tokenmill.errors import UsageError
from tokenmill.store import check as checking
from tokenmill.store.manifest import FileInfo, encode_sealed, hash_bytes, read_manifest
from tokenmill.store.shard import dtype_for
from tokenmill.tools.verify import source_documents as finding
from tokenmill.tools.verify import verify


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def published_files(store: Path) -> list[Path]:
    return sorted(path for path in store.rglob("*") if path.is_file())


def reseal(store: Path, change: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
    """Make the manifest agree with the files as they are, so that only the structure can be wrong."""
    manifest = msgspec.to_builtins(read_manifest(store))
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            for suffix in shard["files"]:
                data = (store / f"{shard['name']}{suffix}").read_bytes()
                shard["files"][suffix] = msgspec.to_builtins(FileInfo(len(data), hash_bytes(data)))
    for name in manifest["files"]:
        data = (store / name).read_bytes()
        manifest["files"][name] = msgspec.to_builtins(FileInfo(len(data), hash_bytes(data)))
    change(manifest)
    (store / "manifest.json").write_bytes(encode_sealed(msgspec.convert(manifest, type(read_manifest(store)))))


def first_shard(store: Path, suffix: str) -> Path:
    return store / f"{read_manifest(store).splits['train'].shards[0].name}{suffix}"


def the_problem(store: Path, **arguments: Any) -> str:
    problems = verify(store, **arguments).problems
    assert len(problems) == 1, problems
    return problems[0]


def test_a_sound_store_has_no_problem_and_everything_is_counted(tiny_store: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    result = verify(tiny_store, advance=lambda *moment: stages.append(moment))
    manifest = read_manifest(tiny_store)
    assert result.problems == []
    assert result.is_sound
    assert result.num_files == len(published_files(tiny_store))
    assert result.num_bytes == sum(path.stat().st_size for path in published_files(tiny_store))
    assert result.num_documents == manifest.num_documents == result.num_with_eos == 300
    assert result.num_tokens == manifest.num_tokens
    assert result.num_with_bos is None
    assert stages[-1][1] == stages[-1][2]
    assert dict(result.rows())["EOS"] == "300 of 300 documents end with it"


def test_the_store_of_these_tests_has_everything_that_can_break(tiny_store: Path) -> None:
    manifest = read_manifest(tiny_store)
    assert len(manifest.splits["train"].shards) >= 3
    assert len(manifest.splits["val"].shards) >= 2
    assert manifest.num_rejects == 2
    names = {path.name for path in published_files(tiny_store)}
    assert {"manifest.json", "run.json", "rejects.jsonl", "tokenizer.json", "tokenizer_config.json"} <= names


def test_the_first_and_last_bits_of_every_file_are_guarded(tiny_store: Path) -> None:
    for path in published_files(tiny_store):
        sound = path.read_bytes()
        for bit in (0, 7, 8 * len(sound) - 8, 8 * len(sound) - 1):
            flip_bit(path, bit)
            problems = verify(tiny_store).problems
            assert any(path.name in problem for problem in problems), (path, bit, problems)
            path.write_bytes(sound)
    assert verify(tiny_store).is_sound


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_in_any_published_file_is_found(tiny_store: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(published_files(tiny_store)))
    sound = path.read_bytes()
    flip_bit(path, data.draw(st.integers(0, 8 * len(sound) - 1)))
    try:
        problems = verify(tiny_store).problems
        assert len(problems) == 1
        assert path.name in problems[0]
    finally:
        path.write_bytes(sound)


def test_a_missing_a_shorter_and_a_longer_file_are_named_with_what_to_do(tiny_store: Path) -> None:
    path = first_shard(tiny_store, ".bin")
    sound = path.read_bytes()
    path.write_bytes(sound[:-2])
    assert f"has {len(sound) - 2:,} bytes and the manifest says {len(sound):,}" in the_problem(tiny_store)
    path.write_bytes(sound + b"\0")
    assert f"has {len(sound) + 1:,} bytes" in the_problem(tiny_store)
    path.unlink()
    assert the_problem(tiny_store) == f"{path} is missing; restore it, or tokenize again with --overwrite"


def test_files_that_do_not_belong_to_the_store_are_named(tiny_store: Path) -> None:
    strangers = ["train/shard-00009-0000.bin", "train/shard-00000-0000.bin.1f.tmp", "val/notes", "tokenizer/merges.txt"]
    for name in strangers:
        (tiny_store / name).write_bytes(b"x")
    (tiny_store / "run.json.tmp").write_bytes(b"x")
    problems = verify(tiny_store).problems
    assert len(problems) == 5
    for name in (*strangers, "run.json.tmp"):
        assert any(str(tiny_store / name) in problem and "remove it" in problem for problem in problems), name


def test_every_damaged_file_is_reported_and_not_only_the_first(tiny_store: Path) -> None:
    damaged = [first_shard(tiny_store, ".idx"), first_shard(tiny_store, ".docs.parquet"), tiny_store / "rejects.jsonl"]
    for path in damaged:
        flip_bit(path, 100)
    problems = verify(tiny_store).problems
    assert len(problems) == 3
    assert all(any(str(path) in problem for problem in problems) for path in damaged)


def test_a_directory_without_a_finished_store_is_one_problem(tmp_path: Path) -> None:
    assert "does not exist" in the_problem(tmp_path / "nowhere")
    assert "not a token store" in the_problem(tmp_path)
    (tmp_path / ".tasks").mkdir()
    assert "unfinished" in the_problem(tmp_path)


def test_a_store_without_run_json_is_sound(tiny_store: Path) -> None:
    (tiny_store / "run.json").unlink()
    assert verify(tiny_store).is_sound


def test_a_document_without_eos_is_found_though_checksums_agree(tiny_store: Path) -> None:
    path = first_shard(tiny_store, ".bin")
    tokens = np.fromfile(path, np.uint16)
    tokens[-1] = 77
    tokens.tofile(path)
    reseal(tiny_store)
    shard = read_manifest(tiny_store).splits["train"].shards[0]
    expected = f"{shard.num_documents - 1:,} of {shard.num_documents:,} documents end with the EOS token 0"
    assert expected in the_problem(tiny_store)


def test_an_id_outside_the_vocabulary_is_found_though_checksums_agree(tiny_store: Path) -> None:
    path = first_shard(tiny_store, ".bin")
    tokens = np.fromfile(path, np.uint16)
    long_document = int(np.flatnonzero(tokens[:-1] != 0)[0])
    tokens[long_document] = 600
    tokens.tofile(path)
    reseal(tiny_store)
    assert "holds id 600, outside the vocabulary of 600" in the_problem(tiny_store)


@pytest.mark.parametrize(("offset", "what"), [(34, "disagree"), (8, "is not the index"), (-8, "not consecutive")])
def test_an_index_that_contradicts_itself_is_found_though_checksums_agree(
    tiny_store: Path, offset: int, what: str
) -> None:
    path = first_shard(tiny_store, ".idx")
    flip_bit(path, 8 * (offset if offset >= 0 else path.stat().st_size + offset))
    reseal(tiny_store)
    assert what in the_problem(tiny_store)


def test_a_table_of_documents_with_a_row_too_few_or_out_of_order_is_found(tiny_store: Path) -> None:
    path = first_shard(tiny_store, ".docs.parquet")
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)
    reseal(tiny_store)
    assert f"has {len(table) - 1} rows for {len(table)} documents" in the_problem(tiny_store)
    pq.write_table(table.take([1, 0, *range(2, len(table))]), path)
    reseal(tiny_store)
    assert "not in the order of the inputs" in the_problem(tiny_store)


def test_totals_that_do_not_add_up_are_found(tiny_store: Path) -> None:
    reseal(tiny_store, lambda manifest: manifest["splits"]["train"].update(num_tokens=5))
    assert "and 5 tokens in train, but its shards have" in verify(tiny_store).problems[0]
    reseal(tiny_store, lambda manifest: manifest.update(num_documents_in=1))
    assert any("says 1 documents were read" in problem for problem in verify(tiny_store).problems)


def test_rejects_that_the_manifest_does_not_count_are_found(tiny_store: Path) -> None:
    path = tiny_store / "rejects.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    reseal(tiny_store)
    assert "rejects, but manifest.json says" in the_problem(tiny_store)


def test_a_manifest_that_leads_out_of_the_store_is_refused(tiny_store: Path) -> None:
    reseal(tiny_store, lambda manifest: manifest["splits"]["train"]["shards"][0].update(name="train/../../etc/x"))
    assert "names a shard outside the store" in the_problem(tiny_store)


def test_documents_across_many_pieces_are_checked_alike(tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "PIECE_BYTES", 14)
    monkeypatch.setattr(checking, "INDEX_PIECE", 3)
    result = verify(tiny_store)
    assert result.is_sound
    assert result.num_with_eos == result.num_documents


def test_documents_without_bos_and_eos_may_be_empty(tmp_path: Path) -> None:
    texts = ["", "", "word", "", "and", ""]
    tokenize_here(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "s", tokenizer="bytes", eos=False)
    result = verify(tmp_path / "s", against=[str(tmp_path / "a.jsonl")])
    assert result.problems == []
    assert (result.num_with_bos, result.num_with_eos, result.num_compared) == (None, None, 6)


def test_bos_and_eos_are_counted_where_both_were_asked_for(tmp_path: Path) -> None:
    texts = ["", "word", "x" * 70_000, ""]
    tokenize_here(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "s", tokenizer="bytes", bos=True)
    result = verify(tmp_path / "s")
    assert (result.num_with_bos, result.num_with_eos) == (4, 4)
    assert result.is_sound


def test_ids_equal_the_reference_on_every_document_of_the_inputs(tiny_store: Path, tiny_corpus: Path) -> None:
    moments: list[tuple[str, int, int]] = []
    for every in (False, True):
        result = verify(
            tiny_store, against=[str(tiny_corpus)], every=every, advance=lambda *moment: moments.append(moment)
        )
        assert result.problems == []
        assert (result.num_compared, result.reference) == (300, "huggingface")
        assert moments[-1] == ("comparing documents", 300, 300)


def test_a_wrong_id_is_named_by_input_position_and_document(tiny_store: Path, tiny_corpus: Path) -> None:
    shards = read_manifest(tiny_store).splits["val"].shards
    which = max(range(1, len(shards)), key=lambda index: shards[index].num_tokens)
    shard = shards[which]
    lengths = np.memmap(tiny_store / f"{shard.name}.idx", "<i4", offset=34, mode="r", shape=(shard.num_documents,))
    inner = int(np.argmax(lengths))
    path = tiny_store / f"{shard.name}.bin"
    tokens = np.fromfile(path, np.uint16)
    wrong = int(lengths[:inner].sum()) + 2
    tokens[wrong] += 1
    tokens.tofile(path)
    reseal(tiny_store)
    row = pq.read_table(tiny_store / f"{shard.name}.docs.parquet").to_pylist()[inner]
    number = sum(before.num_documents for before in shards[:which]) + inner
    expected = (
        f"{'ab'[row['input']]}.jsonl position {row['position']} (document {number} of val): "
        f"token 2 is {tokens[wrong]}, and huggingface gives {tokens[wrong] - 1}"
    )
    assert expected in the_problem(tiny_store, against=[str(tiny_corpus)])
    assert expected in the_problem(tiny_store, against=[str(tiny_corpus)], every=True)


def test_a_document_that_is_longer_in_the_store_is_named(tiny_store: Path, tiny_corpus: Path) -> None:
    reseal(tiny_store, lambda manifest: manifest["special_tokens"].update(eos_id=None))
    problems = verify(tiny_store, against=[str(tiny_corpus)]).problems
    assert "is 0, and huggingface gives nothing" in problems[0]
    assert len(problems) == 21
    assert problems[-1] == "280 more documents differ"


def test_inputs_that_changed_are_named_and_the_others_still_compared(tiny_store: Path, tiny_corpus: Path) -> None:
    corpus = tiny_store.parent / "changed"
    shutil.copytree(tiny_corpus, corpus)
    sound = (corpus / "b.jsonl").read_bytes()
    (corpus / "b.jsonl").write_bytes(sound[:-9] + b"?" + sound[-8:])
    result = verify(tiny_store, against=[str(corpus)])
    assert result.problems == ["input b.jsonl has other content than when it was tokenized, at the same size"]
    assert result.num_compared == 200
    (corpus / "b.jsonl").write_bytes(sound + b"\n")
    assert f"has {len(sound) + 1:,} bytes and had {len(sound):,}" in the_problem(tiny_store, against=[str(corpus)])
    (corpus / "b.jsonl").write_bytes(sound)
    write_jsonl(corpus / "c.jsonl", ["more"])
    assert "c.jsonl is not an input of the store" in the_problem(tiny_store, against=[str(corpus)])
    (corpus / "c.jsonl").unlink()
    assert verify(tiny_store, against=[str(corpus)]).is_sound


def test_inputs_that_are_missing_are_named(tiny_store: Path, tiny_corpus: Path) -> None:
    assert "b.jsonl of the store is not among" in the_problem(tiny_store, against=[str(tiny_corpus / "a.jsonl")])
    with pytest.raises(UsageError, match="nowhere"):
        verify(tiny_store, against=[str(tiny_corpus / "nowhere.jsonl")])


def test_a_damaged_store_is_not_compared_with_its_inputs(tiny_store: Path, tiny_corpus: Path) -> None:
    flip_bit(first_shard(tiny_store, ".bin"), 9)
    problems = verify(tiny_store, against=[str(tiny_corpus)]).problems
    assert len(problems) == 2
    assert "not compared" in problems[1]


def test_a_document_that_the_store_lacks_is_found_when_all_are_compared(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    tokenize_here(path, tmp_path / "s", tokenizer="bytes", limit=2)
    assert verify(tmp_path / "s", against=[str(path)], every=True).is_sound
    reseal(tmp_path / "s", lambda manifest: manifest["settings"].update(limit=None))
    assert verify(tmp_path / "s", against=[str(path)]).is_sound
    assert "1 document that is neither in the store" in the_problem(tmp_path / "s", against=[str(path)], every=True)


def make_mixed_corpus(folder: Path) -> Path:
    """The same kinds of documents in every format, each file larger than a task, and a few tiny files."""
    texts = {name: make_texts(150, seed) for seed, name in enumerate(("jsonl", "gz", "zst", "parquet", "json", "txt"))}
    write_jsonl(folder / "a.jsonl", texts["jsonl"])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(write_jsonl(folder / "x", texts["gz"]).read_bytes()))
    packed = zstandard.ZstdCompressor().compress(write_jsonl(folder / "x", texts["zst"]).read_bytes())
    (folder / "c.jsonl.zst").write_bytes(packed)
    (folder / "x").unlink()
    pq.write_table(pa.table({"text": texts["parquet"]}), folder / "d.parquet", row_group_size=40)
    (folder / "e.json").write_text(json.dumps([{"text": text} for text in texts["json"]], indent=1))
    (folder / "f.txt").write_text("\r\n".join(" ".join(text.split()) for text in texts["txt"]), "utf-8")
    for number in range(3):
        write_jsonl(folder / f"g{number}.jsonl", make_texts(3, number))
    return folder


def test_documents_are_found_again_in_inputs_of_every_format(
    tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_mixed_corpus(tmp_path / "corpus")
    flags = {"tokenizer": str(tiny_tokenizer), "task_bytes": 5000, "val_fraction": 0.3, "bos": True}
    store = tokenize_here(str(corpus), tmp_path / "s", **flags)
    total = store.manifest.num_documents
    assert len(store.manifest.splits["train"].shards) > 12
    result = verify(store.path, against=[str(corpus)], every=True)
    assert (result.problems, result.num_compared) == ([], total)
    monkeypatch.setattr(finding, "SAMPLE_DOCUMENTS", 100)
    monkeypatch.setattr(finding, "SEEK_BYTES", 1)
    result = verify(store.path, against=[str(corpus)])
    assert result.problems == []
    assert 100 <= result.num_compared < total


@pytest.mark.parametrize("task_bytes", ["40kB", "100MB"])
def test_documents_after_a_damaged_page_are_found_again(
    task_bytes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{number:04d} {number * 7919 % 10007} " * 40 for number in range(400)]
    path = write_damaged_parquet(tmp_path / "a.parquet", texts, damaged_group=1, rows_per_group=100)
    store = tokenize_here(path, tmp_path / "s", tokenizer="bytes", task_bytes=task_bytes, on_error="skip")
    assert store.manifest.rejects["damaged"] < 300
    result = verify(store.path, against=[str(path)], every=True)
    assert (result.problems, result.num_compared) == ([], store.num_documents)
    monkeypatch.setattr(finding, "SAMPLE_DOCUMENTS", store.num_documents - 1)
    assert verify(store.path, against=[str(path)]).problems == []


@pytest.mark.parametrize("flags", [{"separator": "|"}, {"whole_files": True}])
def test_documents_are_found_again_in_plain_text(tmp_path: Path, flags: dict[str, Any]) -> None:
    (tmp_path / "in").mkdir()
    for number in range(4):
        (tmp_path / "in" / f"{number}.txt").write_text("|".join(make_texts(6, number)), "utf-8")
    tokenize_here(str(tmp_path / "in"), tmp_path / "s", tokenizer="bytes", task_bytes=500, **flags)
    for every in (False, True):
        result = verify(tmp_path / "s", against=[str(tmp_path / "in")], every=every)
        assert result.problems == []
        assert result.num_compared == read_manifest(tmp_path / "s").num_documents


def test_special_tokens_in_texts_are_compared_as_the_run_read_them(tmp_path: Path, tiny_tokenizer: Path) -> None:
    rng = random.Random(5)
    texts = [text + rng.choice(["", "<|endoftext|> and on", "<|begin|>"]) for text in make_texts(40, 3)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    for policy, on_error in (("as-text", "fail"), ("parse", "fail"), ("error", "skip")):
        out = tmp_path / policy
        store = tokenize_here(path, out, tokenizer=str(tiny_tokenizer), special_tokens=policy, on_error=on_error)
        result = verify(out, against=[str(path)], every=True)
        assert result.problems == []
        assert result.num_compared == store.manifest.num_documents


def test_a_vocabulary_of_the_wrong_width_is_found(tiny_store: Path) -> None:
    assert dtype_for(600) == "uint16"
    reseal(tiny_store, lambda manifest: manifest.update(dtype="int32"))
    assert "says int32 for a vocabulary of 600" in the_problem(tiny_store)


def test_a_store_without_documents_is_sound(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("")
    tokenize_here(tmp_path / "in.jsonl", tmp_path / "store", tokenizer="bytes")
    for every in (False, True):
        result = verify(tmp_path / "store", against=[str(tmp_path / "in.jsonl")], every=every)
        assert (result.problems, result.num_documents, result.num_with_eos) == ([], 0, 0)


def test_documents_of_damaged_shards_are_not_counted_as_without_eos(tiny_store: Path) -> None:
    whole = dict(verify(tiny_store).rows())
    assert whole["EOS"] == "300 of 300 documents end with it"
    shards = sorted((tiny_store / "train").glob("*.bin"))
    assert len(shards) > 1
    with shards[0].open("r+b") as file:
        file.write(b"\xff")
    damaged = verify(tiny_store)
    assert not damaged.is_sound
    rows = dict(damaged.rows())
    assert damaged.num_looked_at == damaged.num_with_eos
    assert 0 < damaged.num_looked_at < 300
    assert rows["EOS"] == f"{damaged.num_looked_at} of {damaged.num_looked_at} documents in shards without damage " + (
        "end with it"
    )
    for path in tiny_store.glob("*/*.bin"):
        path.unlink()
    assert dict(verify(tiny_store).rows())["EOS"] == "not looked at"
