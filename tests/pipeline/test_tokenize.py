"""`tokenize` from text files to a store: every document, its ids, its BOS and EOS, and its origin."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tokenizers
import xxhash

import tokenmill as tm
from tests.conftest import make_texts, write_jsonl
from tests.support.running import (
    compress,
    ids_of,
    jsonl,
    rejects_of,
    snapshot,
    sources_of,
    texts_of,
    tokenize_here,
    tokenmill,
    write_damaged_parquet,
    write_parquet,
)

EOS, BOS = 0, 1
ODD_TEXTS = [
    "\U0003298a'll",
    "",
    " ",
    "a" * 5000,
    "<|endoftext|> and <|begin|> are text here",
    "line one\nline two\r\n\ttab \x00 nul \x7f",
    "\u2028\u0085 odd line ends \ufeff inside",
    "e\u0301 \ud7ff \U0010ffff 🏴\U000e0067\U000e0062",
]
BAD_LINES = {31: b"{not json", 97: b'{"id": "no text"}', 140: b'{"text": null}'}


@pytest.fixture(scope="module")
def reference(tiny_tokenizer: Path) -> Callable[[str], list[int]]:
    """The reference: Hugging Face `tokenizers`, with special-token strings as text."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_tokenizer / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


class Corpus:
    """Two files of JSON lines with bad lines in the first, and the store of one run over them."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.texts = [*make_texts(180, seed=3), *ODD_TEXTS]
        self.folder = folder
        self.out = folder / "store"
        self.paths = [folder / "a.jsonl", folder / "b.jsonl"]
        self.split = 150
        for path, texts, first in zip(self.paths, (self.texts[:150], self.texts[150:]), (0, 150), strict=True):
            ids = [f"doc-{first + n}" for n in range(len(texts))]
            # One document has a field that the others lack.
            absent = [None] * (len(texts) - 1) + ["there"]
            write_jsonl(
                path,
                texts,
                id=ids,
                absent=absent,
                meta=[{"n": n, "deep": {"tags": ["x", n]}} for n in range(len(texts))],
            )
        lines = self.paths[0].read_bytes().split(b"\n")
        for at, bad in BAD_LINES.items():
            lines.insert(at - 1, bad)
        self.paths[0].write_bytes(b"\n".join(lines))
        self.store = tm.tokenize(
            [str(path) for path in self.paths],
            self.out,
            tokenizer=str(tokenizer),
            keep_keys=["id", "meta.deep.tags", "absent"],
            task_bytes=9_000,
            on_error="skip",
            workers=2,
        )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("tokenize"), tiny_tokenizer)


def test_documents_in_are_documents_out_and_rejects(corpus: Corpus) -> None:
    manifest = corpus.store.manifest
    assert manifest.num_documents == len(corpus.texts)
    assert manifest.num_rejects == len(BAD_LINES)
    assert manifest.num_documents_in == len(corpus.texts) + len(BAD_LINES)
    assert manifest.rejects == {"malformed-json": 1, "missing-field": 1, "null-text": 1}
    assert [(row["file"], row["line"]) for row in rejects_of(corpus.out)] == [("a.jsonl", at) for at in BAD_LINES]


def test_every_document_has_the_ids_of_the_reference_then_eos(
    corpus: Corpus, reference: Callable[[str], list[int]]
) -> None:
    assert ids_of(corpus.store) == [[*reference(text), EOS] for text in corpus.texts]


def test_a_document_with_a_disputed_code_point_goes_through_the_reference(corpus: Corpus) -> None:
    engine = corpus.store.manifest.engine
    assert engine.name == "gigatoken"
    assert engine.num_rerouted >= 1
    assert engine.parity is not None
    assert engine.parity.num_mismatches == 0
    assert engine.parity.num_documents == len(corpus.texts)
    assert engine.parity.num_awkward > 0


def test_the_store_opens_and_decodes_documents(corpus: Corpus) -> None:
    store = tm.open(corpus.out)
    assert store.num_documents == len(corpus.texts)
    assert store.num_tokens == sum(map(len, ids_of(store)))
    for number in (0, 149, 150, len(corpus.texts) - 1):
        assert store.decode(store.document(number)) == corpus.texts[number] + "<|endoftext|>"
    with pytest.raises(tm.UsageError, match="188"):
        store.document(len(corpus.texts))


def test_positions_lead_to_the_records(corpus: Corpus) -> None:
    data = [path.read_bytes() for path in corpus.paths]
    table = sources_of(corpus.store)
    rows = zip(table["input"].to_pylist(), table["position"].to_pylist(), corpus.texts, strict=True)
    for input, position, text in rows:
        record = data[input][position:].split(b"\n", 1)[0]
        assert json.loads(record)["text"] == text


def test_kept_fields_lie_beside_their_documents(corpus: Corpus) -> None:
    table = sources_of(corpus.store)
    count = len(corpus.texts)
    assert table.column_names == ["input", "position", "key.id", "key.meta.deep.tags", "key.absent"]
    assert table["key.id"].to_pylist() == [f"doc-{number}" for number in range(count)]
    numbers = [*range(150), *range(count - 150)]
    assert table["key.meta.deep.tags"].to_pylist() == [f'["x",{number}]' for number in numbers]
    assert table["key.absent"].null_count == count - 2


def test_tasks_are_cut_every_task_bytes(corpus: Corpus) -> None:
    names = [Path(shard.name).name for shard in corpus.store.manifest.splits["train"].shards]
    assert len(names) > 4
    for name in names:
        input, task = map(int, name.removeprefix("shard-").split("-"))
        sources = pq.read_table(corpus.out / "train" / f"{name}.docs.parquet")
        assert set(sources["input"].to_pylist()) == {input}
        assert {position // 9_000 for position in sources["position"].to_pylist()} == {task}


def test_an_index_has_the_bytes_of_the_format(corpus: Corpus) -> None:
    for shard in corpus.store.manifest.splits["train"].shards:
        base = f"{corpus.out / shard.name}"
        data = Path(f"{base}.idx").read_bytes()
        count = shard.num_documents
        tokens = np.memmap(f"{base}.bin", dtype=corpus.store.manifest.dtype, mode="r")
        lengths = np.frombuffer(data, "<i4", count, 34)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1)
        expected += lengths.tobytes() + (starts[:-1] * 2).astype("<i8").tobytes()
        expected += np.arange(count + 1, dtype="<i8").tobytes()
        assert data == expected
        assert len(data) == 42 + 20 * count
        assert len(tokens) == shard.num_tokens == starts[-1]
        assert (tokens[starts[1:] - 1] == EOS).all()


def test_the_manifest_has_every_files_size_and_hash_and_nothing_of_the_machine(corpus: Corpus) -> None:
    manifest = json.loads((corpus.out / "manifest.json").read_bytes())
    files = {
        f"{s['name']}{suffix}": f for s in manifest["splits"]["train"]["shards"] for suffix, f in s["files"].items()
    }
    files |= manifest["files"] | {f"tokenizer/{name}": f for name, f in manifest["tokenizer"]["files"].items()}
    found = snapshot(corpus.out)
    del found["manifest.json"]
    assert files == {name: {"bytes": len(d), "xxh3": xxhash.xxh3_64_hexdigest(d)} for name, d in found.items()}
    assert [entry["path"] for entry in manifest["inputs"]] == ["a.jsonl", "b.jsonl"]
    assert str(corpus.folder).encode() not in (corpus.out / "manifest.json").read_bytes()
    assert manifest["dtype"] == "uint16"


POLICIES: list[tuple[dict[str, Any], list[int], list[int]]] = [
    ({"eos": False}, [], []),
    ({"bos": True}, [BOS], [EOS]),
    ({"eos_token": "<|begin|>"}, [], [BOS]),
    ({"eos_token": "599", "bos_token": 7}, [7], [599]),
]


@pytest.mark.parametrize(("flags", "before", "after"), POLICIES, ids=lambda value: str(value).replace(" ", ""))
def test_bos_and_eos_are_what_the_flags_say(
    flags: dict[str, Any],
    before: list[int],
    after: list[int],
    tmp_path: Path,
    tiny_tokenizer: Path,
    reference: Callable[[str], list[int]],
) -> None:
    texts = ["the mill", "", "a b"]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    store = tokenize_here(path, tmp_path / "out", tokenizer=str(tiny_tokenizer), workers=1, **flags)
    assert ids_of(store) == [[*before, *reference(text), *after] for text in texts]
    policy = store.manifest.special_tokens
    assert ([policy.bos_id] if before else []) == before
    assert ([policy.eos_id] if after else []) == after


def _change_tokenizer(source: Path, target: Path, change: Callable[[dict[str, Any]], None], **config: Any) -> Path:
    parsed = json.loads((source / "tokenizer.json").read_bytes())
    change(parsed)
    target.mkdir()
    (target / "tokenizer.json").write_text(json.dumps(parsed))
    if config:
        (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


def test_a_tokenizer_that_names_no_eos_is_an_error_that_names_the_flag(tmp_path: Path, tiny_tokenizer: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    tokenizer = _change_tokenizer(tiny_tokenizer, tmp_path / "tokenizer", lambda _: None)
    with pytest.raises(tm.UsageError, match="--eos-token"):
        tokenize_here(path, tmp_path / "out", tokenizer=str(tokenizer))
    assert not (tmp_path / "out").exists()
    with pytest.raises(tm.UsageError, match="--bos-token"):
        tokenize_here(path, tmp_path / "out", tokenizer=str(tokenizer), eos=False, bos=True)
    with pytest.raises(tm.UsageError, match="--eos-token '<nope>' is not a token"):
        tokenize_here(path, tmp_path / "out", tokenizer=str(tokenizer), eos_token="<nope>")


def test_a_template_that_adds_bos_adds_it_by_default(tmp_path: Path, tiny_tokenizer: Path) -> None:
    def add_template(parsed: dict[str, Any]) -> None:
        parsed["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [BOS], "tokens": ["<|begin|>"]}},
        }

    tokenizer = _change_tokenizer(tiny_tokenizer, tmp_path / "t", add_template, eos_token="<|endoftext|>")
    path = write_jsonl(tmp_path / "a.jsonl", ["the mill", ""])
    store = tokenize_here(path, tmp_path / "out", tokenizer=str(tokenizer), workers=1)
    assert [(ids[0], ids[-1]) for ids in ids_of(store)] == [(BOS, EOS)] * 2
    store = tokenize_here(path, tmp_path / "bare", tokenizer=str(tokenizer), bos=False, workers=1)
    assert ids_of(store)[1] == [EOS]


SPECIAL_TEXTS = ["plain", "one <|endoftext|> two <|begin|>", "<|endoftext|>", "also plain"]


def test_special_token_strings_can_be_parsed_and_are_counted(tmp_path: Path, tiny_tokenizer: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", SPECIAL_TEXTS)
    store = tokenize_here(path, tmp_path / "out", tokenizer=str(tiny_tokenizer), special_tokens="parse", workers=1)
    assert store.manifest.special_tokens.num_parsed == 3
    assert [sum(token < 2 for token in ids) - 1 for ids in ids_of(store)] == [0, 2, 1, 0]


def test_special_token_strings_can_be_errors(tmp_path: Path, tiny_tokenizer: Path) -> None:
    data = jsonl(SPECIAL_TEXTS).split(b"\n")
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([data[0], data[1], b"broken", *data[2:]]))
    flags: dict[str, Any] = {"tokenizer": str(tiny_tokenizer), "special_tokens": "error", "workers": 1}
    with pytest.raises(tm.DataError, match=r"a\.jsonl line 2: .*special token"):
        tokenize_here(path, tmp_path / "fail", **flags)
    store = tokenize_here(path, tmp_path / "skip", **flags, on_error="skip")
    assert store.manifest.rejects == {"malformed-json": 1, "special-token": 2}
    assert store.num_documents == 2
    assert [row["reason"] for row in rejects_of(store.path)] == ["special-token", "malformed-json", "special-token"]
    assert [row["line"] for row in rejects_of(store.path)] == [2, 3, 4]
    assert [row["byte"] for row in rejects_of(store.path)] == [
        len(data[0]) + 1,
        len(data[0]) + len(data[1]) + 2,
        len(data[0]) + len(data[1]) + len("broken") + 3,
    ]
    with pytest.raises(tm.TokenmillError, match="more than --max-errors 2"):
        tokenize_here(path, tmp_path / "few", **flags, on_error="skip", max_errors=2)


@pytest.mark.parametrize("task_bytes", [100, 1 << 20])
@pytest.mark.parametrize(
    ("name", "place", "flags"),
    [
        ("a.jsonl", "line 13", {}),
        ("a.jsonl.gz", "line 13", {}),
        ("a.txt", "line 13", {}),
        ("a.txt.zst", "line 13", {}),
        ("a.txt", "byte 80", {"separator": "\n\n"}),
        ("a.json", "element 11", {}),
        ("a.parquet", "row 11", {}),
    ],
)
def test_a_special_token_in_a_text_is_found_by_its_place(
    name: str, place: str, flags: dict[str, Any], task_bytes: int, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    texts = [f"text {number}" for number in range(10)] + ["<|endoftext|>"]
    path = tmp_path / name
    if name == "a.parquet":
        write_parquet(path, texts, rows_per_group=3)
    elif name == "a.json":
        path.write_text(json.dumps([{"text": text} for text in texts], indent=1))
    else:
        lines = texts if ".txt" in name else [json.dumps({"text": text}) for text in texts]
        # Two blank lines among the first ones: these are lines, and no documents.
        data = "\n\n".join(lines) if flags else "\n".join([*lines[:4], "", "\r", *lines[4:]])
        path.write_bytes(compress(data.encode(), {".gz": "gz", ".zst": "zst"}.get(path.suffix, "none")))
    flags = {"tokenizer": str(tiny_tokenizer), "special_tokens": "error", "task_bytes": task_bytes, **flags}
    with pytest.raises(tm.DataError) as caught:
        tokenize_here(path, tmp_path / "fail", **flags)
    assert str(caught.value).startswith(f"{path} {place}: the text has the string of a special token")
    store = tokenize_here(path, tmp_path / "skip", **flags, on_error="skip")
    (reject,) = rejects_of(store.path)
    unit, number = place.split()
    assert (reject["file"], reject[unit]) == (name, int(number))
    assert set(reject) & {"line", "byte", "row", "element"} == {
        "row": {"row"}, "element": {"element"}, "line": {"line", "byte"}, "byte": {"line", "byte"},
    }[unit]  # fmt: skip


def test_an_error_names_the_file_as_the_user_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("x", "y"):
        (tmp_path / "data" / folder).mkdir(parents=True)
        (tmp_path / "data" / folder / "a.txt").write_bytes(b"good\nb\xffd\n")
    monkeypatch.chdir(tmp_path / "data")
    with pytest.raises(tm.DataError, match=r"^x/a\.txt line 2: byte 1"):
        tokenize_here(["x", "y"], tmp_path / "out", tokenizer="bytes")
    monkeypatch.chdir(tmp_path / "data" / "y")
    with pytest.raises(tm.DataError, match=r"^\.\./x/a\.txt line 2: byte 1"):
        tokenize_here(["../x"], tmp_path / "out2", tokenizer="bytes")
    with pytest.raises(tm.DataError, match=rf"^{tmp_path}/data/x/a\.txt line 2: byte 1"):
        tokenize_here([str(tmp_path / "data" / "x")], tmp_path / "out3", tokenizer="bytes")


def test_json_lines_that_are_named_like_text_are_read_as_json_lines_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(jsonl(["one", "two"]))
    done = tokenmill("tokenize", path, "-o", tmp_path / "out", "--tokenizer", "bytes")
    assert done.returncode == 0
    assert f"{path}: JSON lines by content, and read as such; pass --format text" in done.stderr
    assert texts_of(tm.open(tmp_path / "out")) == ["one", "two"]
    plain = tokenize_here(path, tmp_path / "plain", tokenizer="bytes", format="text")
    assert texts_of(plain) == ['{"text": "one"}', '{"text": "two"}']


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "json", "parquet", "txt"])
@pytest.mark.parametrize("task_bytes", [1_000, 1 << 20])
def test_limit_takes_exactly_the_first_documents_of_the_inputs(kind: str, task_bytes: int, tmp_path: Path) -> None:
    texts = [f"document {number} " + "x" * (number % 40) for number in range(120)]
    paths = []
    for name, some in (("a", texts[:70]), ("b", texts[70:100]), ("c", texts[100:])):
        path = tmp_path / f"{name}.{kind}"
        if kind == "parquet":
            write_parquet(path, [None if text == texts[20] else text for text in some], rows_per_group=16)
        elif kind == "json":
            path.write_text(json.dumps([{"text": 0 if text == texts[20] else text} for text in some], indent=1))
        elif kind == "txt":
            path.write_bytes(b"".join((b"\xff" if t == texts[20] else t.encode()) + b"\n" for t in some))
        else:
            path.write_bytes(
                compress(jsonl(some).replace(b'"text": "document 20 ', b'"text": 20, "'), kind[6:] or "none")
            )
        paths.append(str(path))
    store = tokenize_here(
        paths, tmp_path / "out", tokenizer="bytes", limit=83, on_error="skip", task_bytes=task_bytes, workers=2
    )
    assert store.manifest.num_documents_in == 83
    assert store.manifest.num_rejects == 1
    assert texts_of(store) == [text for text in texts[:83] if text != texts[20]]


@pytest.mark.parametrize("task_bytes", ["40kB", "100MB"])
@pytest.mark.parametrize("limit", [50, 150, 300, 400])
def test_limit_counts_the_rows_that_damage_hides(limit: int, task_bytes: str, tmp_path: Path) -> None:
    texts = [f"{number:04d} {number * 7919 % 10007} " * 40 for number in range(400)]
    path = write_damaged_parquet(tmp_path / "a.parquet", texts, damaged_group=1, rows_per_group=100)
    store = tokenize_here(
        path, tmp_path / "out", tokenizer="bytes", limit=limit, task_bytes=task_bytes, on_error="skip"
    )
    assert store.manifest.num_documents_in == limit
    found = set(texts_of(store))
    assert found <= set(texts[:limit])
    assert set(texts[:limit]) - found <= set(texts[100:200]), "damage costs rows of its own group only"
    again = tokenize_here(
        path, tmp_path / "again", tokenizer="bytes", limit=limit, task_bytes=task_bytes, on_error="skip"
    )
    assert snapshot(again.path) == snapshot(store.path)


def test_val_fraction_sends_equal_texts_to_one_side_and_depends_on_the_seed(tmp_path: Path) -> None:
    texts = [f"text number {number}" for number in range(3000)]
    paths = [str(write_jsonl(tmp_path / f"{name}.jsonl", texts)) for name in "ab"]
    flags: dict[str, Any] = {"tokenizer": "bytes", "val_fraction": 0.1, "task_bytes": 30_000, "workers": 2}
    store = tm.tokenize(paths, tmp_path / "out", **flags)
    train, val = texts_of(store), texts_of(store, "val")
    assert sorted(train + val) == sorted(texts * 2)
    assert not set(train) & set(val)
    assert abs(len(val) / 6000 - 0.1) < 0.02
    other = tm.tokenize(paths, tmp_path / "other", **flags, seed=1)
    assert set(texts_of(other, "val")) != set(val)
    assert abs(len(set(texts_of(other, "val")) & set(val)) / 3000 - 0.01) < 0.01


def test_a_split_without_documents_has_no_files(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["only one"])
    store = tokenize_here(path, tmp_path / "out", tokenizer="bytes", val_fraction=1e-9, workers=1)
    assert store.splits["val"].num_documents == 0
    assert not (tmp_path / "out" / "val").exists()


def test_files_directories_globs_and_lists_are_read_in_order_and_small_ones_share_a_task(tmp_path: Path) -> None:
    for number in range(12):
        write_jsonl(tmp_path / "folder" / f"sub{number % 3}" / f"{number:02d}.jsonl", [f"folder {number}"])
    for number in range(5):
        write_jsonl(tmp_path / f"glob{number}.jsonl", [f"glob {number}"] * 40)
    write_jsonl(tmp_path / "named.jsonl", ["named"])
    (tmp_path / "list.txt").write_text(f"{tmp_path / 'named.jsonl'}\n\n{tmp_path / 'glob3.jsonl'}\n")
    inputs = [str(tmp_path / "folder"), f"@{tmp_path / 'list.txt'}", str(tmp_path / "glob[0-4].jsonl")]
    store = tokenize_here(inputs, tmp_path / "out", tokenizer="bytes", task_bytes=2_000, workers=2)
    assert texts_of(store) == [
        *(f"folder {number}" for number in sorted(range(12), key=lambda n: (n % 3, n))),
        "named",
        *(f"glob {number}" for number in (3, 0, 1, 2, 4) for _ in range(40)),
    ]
    names = [Path(shard.name).name for shard in store.manifest.splits["train"].shards]
    assert names == [f"shard-{input:05d}-0000" for input in (0, 15, 17)]


def test_empty_inputs_and_empty_texts_are_no_special_case(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.txt").write_bytes(b"\n\n \r\n")
    (tmp_path / "nothing.jsonl.zst").write_bytes(compress(b"", "zst"))
    write_jsonl(tmp_path / "texts.jsonl", ["", "", "x", ""])
    bare = tokenize_here(
        [str(tmp_path / name) for name in ("empty.jsonl", "texts.jsonl", "blank.txt")],
        tmp_path / "bare",
        tokenizer="bytes",
        eos=False,
        workers=1,
    )
    assert ids_of(bare) == [[], [], [120], []]
    assert bare.document(0).tolist() == []
    none = tokenize_here(
        [str(tmp_path / "empty.jsonl"), str(tmp_path / "nothing.jsonl.zst")], tmp_path / "none", tokenizer="bytes"
    )
    assert (none.num_documents, none.num_tokens, none.manifest.splits["train"].shards) == (0, 0, [])


def test_a_large_vocabulary_is_stored_as_int32(tmp_path: Path, tiny_tokenizer: Path) -> None:
    def enlarge(parsed: dict[str, Any]) -> None:
        parsed["model"]["vocab"] |= {f"zz{number}": number for number in range(600, 65_537)}

    tokenizer = _change_tokenizer(tiny_tokenizer, tmp_path / "t", enlarge)
    path = write_jsonl(tmp_path / "a.jsonl", ["the mill", "größer"])
    store = tokenize_here(path, tmp_path / "out", tokenizer=str(tokenizer), eos_token="65536", workers=1)
    assert store.manifest.dtype == "int32"
    data = np.memmap(tmp_path / "out/train/shard-00000-0000.bin", dtype="<i4", mode="r")
    assert data[-1] == 65_536
    index = (tmp_path / "out/train/shard-00000-0000.idx").read_bytes()
    assert index[:26] == b"MMIDIDX\0\0" + struct.pack("<QBQ", 1, 4, 2)
    assert np.frombuffer(index, "<i8", 2, 42)[1] == 4 * np.frombuffer(index, "<i4", 1, 34)[0]


def test_a_dotted_text_key_leads_into_nested_objects(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"doc": {"body": {"raw": f"text {n}"}, "id": n}, "text": "not this"} for n in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags: dict[str, Any] = {"text_key": "doc.body.raw", "keep_keys": ["doc.id"], "workers": 1}
    store = tokenize_here(path, tmp_path / "out", tokenizer="bytes", **flags)
    assert texts_of(store) == [f"text {n}" for n in range(5)]
    assert sources_of(store)["key.doc.id"].to_pylist() == [str(n) for n in range(5)]


@pytest.mark.parametrize("separator", ["\n\n", "---"])
def test_plain_text_is_cut_at_separators_however_tasks_are_cut(separator: str, tmp_path: Path) -> None:
    pieces = [f"piece {number}\nsecond line" + "\n" * (number % 4) + "." for number in range(60)]
    data = separator.join([*pieces, "", "after an empty one", "\nlast"]).encode()
    expected = data.decode().split(separator)
    for kind in ("none", "gz"):
        (tmp_path / f"a-{kind}.txt").write_bytes(compress(data, kind))
    paths = [str(tmp_path / f"a-{kind}.txt") for kind in ("none", "gz")]
    store = tokenize_here(paths, tmp_path / "out", tokenizer="bytes", separator=separator, task_bytes=100, workers=2)
    assert texts_of(store) == expected * 2
    for input, position, text in zip(
        *(sources_of(store)[name].to_pylist() for name in ("input", "position")), expected * 2, strict=True
    ):
        assert input in (0, 1)
        assert data[position:].startswith(text.encode())


def test_whole_files_are_one_document_each(tmp_path: Path) -> None:
    texts = ["one\n\ntwo\n", "", "\ufeffbom\r\nkept line ends\r\n", "x" * 5000]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(compress(text.encode(), "zst" if number == 3 else "none"))
    store = tokenize_here(
        str(tmp_path / "*.txt"), tmp_path / "out", tokenizer="bytes", whole_files=True, task_bytes=1000, workers=2
    )
    assert texts_of(store) == [text.removeprefix("\ufeff") for text in texts]


@pytest.mark.parametrize("task_bytes", [1_500, 1 << 22])
def test_every_format_and_compression_gives_the_same_documents(task_bytes: int, tmp_path: Path) -> None:
    texts = [text for text in make_texts(60, seed=5) if "\n" not in text and text.strip()]
    rows = [{"text": text, "n": n} for n, text in enumerate(texts)]
    contents = {
        "jsonl": jsonl(texts),
        "json": json.dumps(rows, indent=2, ensure_ascii=False).encode(),
        "txt": "".join(f"{text}\r\n" for text in texts).encode(),
    }
    names = []
    for suffix, data in contents.items():
        for kind in ("none", "gz", "zst"):
            names.append(f"a.{suffix}" + f".{kind}" * (kind != "none"))
            (tmp_path / names[-1]).write_bytes(compress(data, kind))
    (tmp_path / "concatenated.json").write_text("".join(json.dumps(row, indent=1) for row in rows))
    write_parquet(tmp_path / "a.parquet", texts, rows_per_group=7)
    (tmp_path / "no-suffix").write_bytes(compress(jsonl(texts), "gz"))
    names += ["concatenated.json", "a.parquet", "no-suffix"]
    store = tm.tokenize(
        [str(tmp_path / name) for name in names], tmp_path / "out", tokenizer="bytes", task_bytes=task_bytes, workers=2
    )
    by_input: dict[int, list[str]] = {}
    for input, text in zip(sources_of(store)["input"].to_pylist(), texts_of(store), strict=True):
        by_input.setdefault(input, []).append(text)
    for number, name in enumerate(names):
        assert by_input[number] == texts, name


def test_a_store_may_lie_inside_the_directory_that_it_is_made_from(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    store = tm.tokenize(tmp_path, tmp_path / "tok", tokenizer="bytes", workers=1)
    before = snapshot(tmp_path / "tok")
    again = tm.tokenize(tmp_path, tmp_path / "tok", tokenizer="bytes", workers=1)
    assert again.manifest == store.manifest
    assert snapshot(tmp_path / "tok") == before


def test_a_document_above_the_limit_of_bytes_is_a_reject_with_its_position(tmp_path: Path) -> None:
    texts = ["short", "é" * 600, "x" * 1000, "x" * 1001, "last"]
    for kind in ("none", "zst"):
        (tmp_path / f"{kind}.jsonl").write_bytes(compress(jsonl(texts), kind))
    store = tokenize_here(
        [str(tmp_path / "none.jsonl"), str(tmp_path / "zst.jsonl")],
        tmp_path / "out",
        tokenizer="bytes",
        max_document_bytes=1000,
        on_error="skip",
        task_bytes=500,
        workers=2,
    )
    assert texts_of(store) == ["short", "x" * 1000, "last"] * 2
    assert [(row["line"], row["reason"]) for row in rejects_of(store.path)] == [(2, "too-long"), (4, "too-long")] * 2
