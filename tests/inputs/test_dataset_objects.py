"""`Dataset` and `IterableDataset` objects of Hugging Face as inputs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

import tokenmill as tm
from tests.conftest import make_texts, write_jsonl
from tests.support.running import ThreadExecutor, ids_of, snapshot, sources_of, texts_of, tokenize_here
from tokenmill.display import Silence
from tokenmill.errors import StoreError, UsageError
from tokenmill.inputs import dataset_objects
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.tokenize_any import _staging
from tokenmill.store.store import TokenStore

TEXTS = [text for text in make_texts(700, seed=3) if text]


def tokenize(dataset: Any, out: Path, **flags: Any) -> TokenStore:
    return tm.tokenize(dataset, out, tokenizer="bytes", executor=ThreadExecutor(), **flags)  # type: ignore[arg-type]


def test_a_dataset_gives_the_tokens_that_its_texts_give_as_a_file(tmp_path: Path) -> None:
    store = tokenize(
        Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))}), tmp_path / "out", keep_keys=["n"]
    )
    expected = tokenize_here(write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "expected", tokenizer="bytes")
    assert ids_of(store) == ids_of(expected)
    assert sources_of(store)["key.n"].to_pylist() == [str(number) for number in range(len(TEXTS))]
    assert [file.path for file in store.manifest.inputs] == ["rows-000000000000.parquet"]
    assert str(tmp_path).encode() not in b"".join(snapshot(tmp_path / "out").values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "expected", "out"]


def test_selections_shuffles_and_transformations_apply(tmp_path: Path) -> None:
    dataset = Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))})
    shuffled = dataset.shuffle(seed=7).select(range(100)).map(lambda row: {"text": row["text"] + "!"})
    assert texts_of(tokenize(shuffled, tmp_path / "shuffled")) == shuffled["text"][:]
    loud = dataset.with_transform(lambda rows: {"loud": [text.upper() for text in rows["text"]]})
    assert texts_of(tokenize(loud, tmp_path / "loud", text_key="loud")) == [text.upper() for text in TEXTS]


def test_equal_datasets_give_equal_bytes_wherever_the_store_is(tmp_path: Path) -> None:
    for name in ("a", "b"):
        dataset = Dataset.from_dict({"text": TEXTS}) if name == "a" else IterableDataset.from_generator(rows)
        tokenize(dataset, tmp_path / name / "out", task_bytes=20_000)
    assert snapshot(tmp_path / "a" / "out") == snapshot(tmp_path / "b" / "out")


def rows() -> Iterator[dict[str, Any]]:
    for text in TEXTS:
        yield {"text": text}


def test_a_generator_is_read_once_and_may_change_the_types_of_its_fields(tmp_path: Path) -> None:
    calls = []

    def changing() -> Iterator[dict[str, Any]]:
        calls.append(1)
        for number, text in enumerate(TEXTS):
            yield {"text": text, "score": None if number < 300 else number / 2, "other": object.__name__}

    store = tokenize(IterableDataset.from_generator(changing), tmp_path / "out", keep_keys=["score"])
    assert texts_of(store) == TEXTS
    kept = sources_of(store)["key.score"].to_pylist()
    assert kept == [None] * 300 + [json.dumps(number / 2) for number in range(300, len(TEXTS))]
    assert [file.path for file in store.manifest.inputs] == ["rows-000000000000.parquet", "rows-000000000256.parquet"]
    assert len(calls) == 1


def test_a_limit_ends_an_endless_generator(tmp_path: Path) -> None:
    endless = IterableDataset.from_generator(lambda: ({"text": f"document {number}"} for number in itertools.count()))
    store = tokenize(endless, tmp_path / "out", limit=300)
    assert texts_of(store) == [f"document {number}" for number in range(300)]


def test_large_datasets_are_cut_into_files_and_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_objects, "GROUP_BYTES", 4_000)
    monkeypatch.setattr(dataset_objects, "FILE_BYTES", 60_000)
    monkeypatch.setattr(dataset_objects, "BATCH_ROWS", 10)
    store = tokenize(Dataset.from_dict({"text": TEXTS}), tmp_path / "out", task_bytes=5_000)
    assert texts_of(store) == TEXTS
    assert len(store.manifest.inputs) > 2
    assert len(store.manifest.splits["train"].shards) > len(store.manifest.inputs)


def test_conversations_and_nested_fields_are_found_in_their_columns(tmp_path: Path) -> None:
    nested = Dataset.from_dict({"body": [{"text": text, "more": 1} for text in TEXTS], "url": ["u"] * len(TEXTS)})
    assert texts_of(tokenize(nested, tmp_path / "nested", text_key="body.text", keep_keys=["url"])) == TEXTS
    pairs = Dataset.from_dict({"q": ["one", "two"], "a": ["1", "2"], "unused": [object.__name__] * 2})
    store = tokenize(pairs, tmp_path / "pairs", prompt_key="q", response_key="a", template="{prompt}={response}")
    assert texts_of(store) == ["one=1", "two=2"]


def test_the_only_column_of_strings_holds_the_text_unless_another_is_named(tmp_path: Path) -> None:
    one = Dataset.from_dict({"story": ["once"], "n": [1]})
    assert texts_of(tokenize(one, tmp_path / "one")) == ["once"]
    two = Dataset.from_dict({"title": ["t"], "body": ["b"]})
    with pytest.raises(UsageError, match=r"no column 'text'; it has 'title', 'body': pass text_key="):
        tokenize(two, tmp_path / "two")
    assert texts_of(tokenize(two, tmp_path / "two", text_key="body")) == ["b"]


def test_an_unreadable_dataset_is_refused_in_a_sentence_and_leaves_no_file(tmp_path: Path) -> None:
    dataset = Dataset.from_dict({"text": ["a"]})
    mixed = IterableDataset.from_generator(lambda: iter([{"text": "a"}, {"text": 7}]))
    surrogate = IterableDataset.from_generator(lambda: iter([{"text": "a"}] * 300 + [{"text": "b\ud800"}]))
    refused = {
        "the dataset is a set of splits, DatasetDict; pass one of them: 'train', 'test'": DatasetDict(
            train=dataset, test=dataset
        ),
        "join several, for example with datasets.concatenate_datasets": [dataset, dataset],
        "the dataset has no rows": Dataset.from_dict({"text": []}),
        "the dataset has no column 'text'; it has no columns$": Dataset.from_dict({}),
        "it has 'messages': pass messages_key='messages' for conversations": Dataset.from_dict({"messages": [[]]}),
        "column 'text' of the dataset has values in rows 1 to 2 that do not go together": mixed,
        "column 'text' of the dataset has the lone surrogate .ud800 in row 301, which UTF-8 cannot hold": surrogate,
    }
    for said, value in refused.items():
        with pytest.raises(UsageError, match=said):
            tokenize(value, tmp_path / "out")
    with pytest.raises(UsageError, match="no input for ranks"):
        tokenize(dataset, tmp_path / "out", rank=0, world_size=2)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/\.out\.inputs cannot be written: Not a directory"):
        tokenize(dataset, tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("columns", "flags", "said"),
    [
        ({"text": [1, 2], "body": ["a", "b"]}, {}, "column 'text' of the dataset has type int64, and texts are strings; name another with text_key=..."),
        ({"text": [["a"], ["b"]]}, {}, "has type list<item: string>, and texts are strings"),
        ({"m": [{"text": 1}]}, {"text_key": "m.text"}, "column 'm.text' of the dataset has type int64"),
        ({"text": ["a"], "n": [1]}, {"keep_keys": ["url"]}, "the dataset has no column 'url' to keep; it has 'text', 'n'"),
        ({"text": ["a"], "m": [{"n": 1}]}, {"keep_keys": ["m.url"]}, "column 'm' of the dataset has no field 'm.url' to keep"),
    ],
)  # fmt: skip
def test_columns_that_give_no_documents_are_refused_before_anything_is_written(
    tmp_path: Path, columns: dict[str, Any], flags: dict[str, Any], said: str
) -> None:
    dataset = Dataset.from_dict(columns)
    written = [dataset, dataset.to_iterable_dataset(), IterableDataset.from_generator(lambda: iter(dataset))]
    for one in written:
        with pytest.raises(UsageError) as refused:
            tokenize(one, tmp_path / "out", **{"text_key": "text", **flags})
        assert said in str(refused.value)
        assert list(tmp_path.iterdir()) == []


def test_rows_are_counted_through_all_files_that_were_written(tmp_path: Path) -> None:
    def changing() -> Iterator[dict[str, Any]]:
        for number in range(400):
            yield {"text": None if number == 300 else "a", "n": number if number < 256 else str(number)}

    with pytest.raises(tm.DataError, match=r"^the dataset row 301: column 'text' is null; .* stay in .*/\.out\.inputs"):
        tokenize(IterableDataset.from_generator(changing), tmp_path / "out", keep_keys=["n"])


def test_a_transformation_runs_again_in_every_attempt(tmp_path: Path) -> None:
    """Its fingerprint covers its code, but not the data that it reads."""
    state = tmp_path / "state"
    state.write_text("")

    def read(rows: dict[str, list[str]]) -> dict[str, list[str | None]]:
        return {"text": [state.read_text() or None for _ in rows["text"]]}

    dataset = Dataset.from_dict({"text": ["a", "b"]}).with_transform(read)
    with pytest.raises(tm.DataError, match="null"):
        tokenize(dataset, tmp_path / "out")
    state.write_text("mended")
    assert texts_of(tokenize(dataset, tmp_path / "out", overwrite=True)) == ["mended", "mended"]


def test_a_missing_text_is_a_reject_that_names_its_row(tmp_path: Path) -> None:
    dataset = Dataset.from_dict({"text": ["a", None, "c"]})
    store = tokenize(dataset, tmp_path / "out", on_error="skip")
    assert texts_of(store) == ["a", "c"]
    (reject,) = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert (reject["file"], reject["row"]) == ("rows-000000000000.parquet", 2)


def test_rows_of_a_failed_run_are_reused_for_the_same_dataset_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Dataset.from_dict({"text": [*TEXTS, None]})
    with pytest.raises(tm.DataError, match=f"the dataset row {len(TEXTS) + 1}: column 'text' is null"):
        tokenize(dataset, tmp_path / "out")
    folder = tmp_path / ".out.inputs"
    assert sorted(path.name for path in folder.iterdir()) == [".complete.json", "rows-000000000000.parquet"]
    written = []
    write = dataset_objects._write
    monkeypatch.setattr(dataset_objects, "_write", lambda *given: (written.append(1), write(*given)))
    store = tokenize(dataset, tmp_path / "out", on_error="skip")
    assert not written
    assert not folder.exists()
    assert store.num_documents == len(TEXTS)
    with pytest.raises(tm.DataError):
        tokenize(dataset, tmp_path / "other")
    assert tokenize(Dataset.from_dict({"text": ["else"]}), tmp_path / "other", overwrite=True).num_documents == 1
    assert len(written) == 2


def test_two_runs_do_not_share_the_folder_of_rows(tmp_path: Path) -> None:
    wanted = dataset_objects.DatasetRows(keys=["text"], kept=[], limit=None)
    dataset = Dataset.from_dict({"text": ["a"]})
    with (
        dataset_objects.staged(dataset, tmp_path / "out", wanted, Silence()),
        pytest.raises(StoreError, match="in use by another run"),
    ):
        tokenize(dataset, tmp_path / "out")
    assert not (tmp_path / ".out.inputs").exists()


class Notes(Silence):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def say(self, text: str, *, style: str = "") -> None:
        self.notes.append(text)


def test_a_generator_that_is_written_again_resumes_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_objects, "GROUP_BYTES", 8_000)
    monkeypatch.setattr(dataset_objects, "BATCH_ROWS", 20)
    calls = []

    def failing(last: str | None = None) -> Iterator[dict[str, Any]]:
        calls.append(1)
        yield from rows()
        yield {"text": last}

    flags = {"task_bytes": 10_000, "workers": 1}
    with pytest.raises(tm.DataError):
        tokenize(IterableDataset.from_generator(failing), tmp_path / "out", **flags)
    display = Notes()
    tokenize(IterableDataset.from_generator(failing), tmp_path / "out", on_error="skip", display=display, **flags)
    assert any(note.startswith("continuing: ") for note in display.notes)
    assert not any("done again" in note for note in display.notes)
    tokenize(IterableDataset.from_generator(failing), tmp_path / "whole", on_error="skip", **flags)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")
    assert len(calls) == 3

    with pytest.raises(tm.DataError):
        tokenize(IterableDataset.from_generator(failing), tmp_path / "other", **flags)
    changed = IterableDataset.from_generator(lambda: failing("another"))
    with pytest.raises(StoreError, match=r"rows-000000000000.parquet (had|has)"):
        tokenize(changed, tmp_path / "other", **flags)


def test_for_a_store_in_a_bucket_rows_are_written_on_this_machine(tmp_path: Path) -> None:
    flags = {"inputs": ["a dataset"], "tokenizer": "bytes", "out": "s3://bucket/tok"}
    request = Request.from_flags({**flags, "scratch": str(tmp_path)})
    with _staging(Dataset.from_dict({"text": TEXTS}), request, Silence()) as ready:
        (folder,) = ready.inputs
        assert Path(folder).parent == tmp_path
        assert ready.out == "s3://bucket/tok"
        assert [path.name for path in Path(folder).glob("rows*")] == ["rows-000000000000.parquet"]
    assert list(tmp_path.iterdir()) == []
