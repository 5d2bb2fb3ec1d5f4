"""Which files of a repository are a data set: the same that `load_dataset` would read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tokenmill.errors import UsageError
from tokenmill.inputs._glob import translate
from tokenmill.inputs._hub_layout import Layout, Selection
from tokenmill.inputs._hub_names import CONVERTED, Target


def make(folder: Path, *paths: str, card: dict[str, Any] | None = None) -> Layout:
    """A repository with files of these names, as another program leaves one in the cache."""
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("{}\n")
    if card is not None:
        (folder / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
    target = Target(item="o/n", repository="o/n")
    return Layout(SimpleNamespace(target=target, id="o/n", cache=folder, is_snapshot=True))  # type: ignore[arg-type]


def outcome(selection: Selection) -> tuple[str | None, list[str]]:
    """The split and the files of a selection; the obstacle, if there is one."""
    return selection.obstacle or selection.split, list(selection.files)


SFT = [{"split": "train_sft", "path": ["a/*"]}, {"split": "test", "path": "b/*"}]
REPOSITORIES: list[tuple[list[str], dict[str, Any] | None]] = [
    (["train.jsonl", "test.jsonl", "validation.jsonl"], None),
    (["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002-abc.jsonl", "data/dev_sft-00000-of-00001.jsonl", "a.jsonl"], None),
    (["train/chunk1/example_train_0.jsonl", "validation/chunk1/example_holdout_0.jsonl", "other.jsonl"], None),
    (["my_train_file.jsonl", "my-dev-file.jsonl", "strain.jsonl"], None),
    (["en/a.jsonl", "de/b.jsonl"], None),
    (["data/train-00000-of-00001.parquet", "notes.txt", "changes.txt"], None),
    (["train/a.json", "train/b.jsonl", "train/c.jsonl", "train/train/d.jsonl", "train/e.txt"], None),
    (["a.parquet", "notice.parquet", "license-texts.parquet"], None),
    (["en/a.jsonl", "b.jsonl"], {"configs": [{"config_name": "default", "data_dir": "./en"}]}),
    ([".k/a.jsonl", "b.jsonl"], {"configs": [{"config_name": "default", "data_files": ".k/a.jsonl"}]}),
    (["config.json", "b.json"], {"configs": [{"config_name": "default", "data_files": "config.json"}]}),
    (["a/1.jsonl", "a/.2.jsonl", "b/3.jsonl"], {"configs": [{"config_name": "default", "data_files": SFT}]}),
]  # fmt: skip


@pytest.mark.parametrize(("paths", "card"), REPOSITORIES)
def test_splits_have_the_files_that_load_dataset_reads(
    tmp_path: Path, paths: list[str], card: dict[str, Any] | None
) -> None:
    import datasets

    layout = make(tmp_path / "repository", *paths, card=card)
    builder = datasets.load_dataset_builder(str(tmp_path / "repository"), cache_dir=str(tmp_path / "cache"))
    assert builder.config.data_files
    for split, files in builder.config.data_files.items():
        expected = sorted({str(Path(file).relative_to(tmp_path / "repository")) for file in files})
        assert outcome(layout.select_split([str(split)])) == (str(split), expected)


def test_cards_describe_configurations_in_many_forms(tmp_path: Path) -> None:
    files = ["a.txt", "b.txt", "c/train.txt", "c/test.txt", "license.txt", "__x__/.h.txt"]
    configs = [
        {"config_name": "one", "data_files": "a.txt"},
        {"config_name": "list", "data_files": ["a.txt", "b.txt"]},
        {"config_name": "splits", "data_files": [{"split": "train", "path": ["a.txt"]}, {"split": "test", "path": "b.txt"}]},
        {"config_name": "mapping", "data_files": {"train": "a.txt"}},
        {"config_name": "folder", "data_dir": "./c/", "default": True},
        {"config_name": 2023, "data_files": "hf://datasets/o/n/c/*"},
        {"config_name": "notes", "data_files": ["license.txt", "__x__/.h.txt"]},
        {"config_name": "elsewhere", "data_files": "https://host/a.txt"},
        {"config_name": "broken", "data_files": [{"split": "train"}]},
    ]  # fmt: skip
    layout = make(tmp_path, *files, card={"configs": configs})
    expected = {
        "one": ["a.txt"],
        "list": ["a.txt", "b.txt"],
        "splits": ["a.txt"],
        "mapping": ["a.txt"],
        "folder": ["c/train.txt"],
        "2023": ["c/test.txt", "c/train.txt"],
        "notes": ["__x__/.h.txt", "license.txt"],
    }
    for config, paths in expected.items():
        assert outcome(layout.select_split([config])) == ("train", paths)
    assert layout.select_split([]).config == "folder"
    assert outcome(layout.select_split(["splits", "test"])) == ("test", ["b.txt"])
    with pytest.raises(UsageError, match="o/n takes its files from https://host/a.txt, which is elsewhere"):
        layout.select_split(["elsewhere"])
    with pytest.raises(UsageError, match=r"^input o/n: the datasets library cannot read the layout of o/n \(Invalid"):
        layout.select_split(["broken"])


@pytest.mark.parametrize("configs", ["nonsense", ["old style"], [{"data_files": "a.txt"}], [{"config_name": "default"}, {"config_name": "b", "default": True}]])  # fmt: skip
def test_a_card_that_load_dataset_refuses_is_refused_in_a_sentence(tmp_path: Path, configs: Any) -> None:
    with pytest.raises(UsageError, match=r"^input o/n: the datasets library cannot read .*; name files of it$"):
        make(tmp_path, "a.txt", card={"configs": configs}).select_split([])


def test_a_card_that_is_not_yaml_is_ignored(tmp_path: Path) -> None:
    layout = make(tmp_path, "a.txt")
    (tmp_path / "README.md").write_text("---\na: [\n---\n")
    assert outcome(layout.select_split([])) == ("train", ["a.txt"])


def test_a_word_is_a_configuration_or_else_a_split_of_the_default_one(tmp_path: Path) -> None:
    sft = [{"split": "train_sft", "path": "a.txt"}, {"split": "test", "path": "b.txt"}]
    card = {"configs": [{"config_name": "default", "data_files": sft}, {"config_name": "en", "data_files": "b.txt"}]}
    layout = make(tmp_path, "a.txt", "b.txt", card=card)
    assert outcome(layout.select_split(["train_sft"])) == ("train_sft", ["a.txt"])
    assert outcome(layout.select_split(["en"])) == ("train", ["b.txt"])
    refusals = {
        (): "o/n:default has no train split; there is train_sft and test",
        ("de",): "o/n has no configuration 'de'; there is default and en; and the default one, default, has no such "
        "split; there is train_sft and test",
        ("en", "test"): "o/n:en has no split 'test'; there is train",
        ("de", "train"): "o/n has no configuration 'de'; there is default and en",
    }
    for words, said in refusals.items():
        with pytest.raises(UsageError) as refused:
            layout.select_split(words)
        assert str(refused.value) == said


def test_the_conversion_of_the_hub_has_a_folder_for_each_configuration_and_split(tmp_path: Path) -> None:
    files = ["en/train/0000.parquet", "en/test/0000.parquet", "de/partial-train/0.parquet", "x.json"]
    layout = make(tmp_path, *files)
    layout._repository.target = Target(item="o/n", repository="o/n", revision=CONVERTED)  # type: ignore[misc]
    assert outcome(layout.select_split(["en"])) == ("train", ["en/train/0000.parquet"])
    assert outcome(layout.select_split(["en", "test"])) == ("test", ["en/test/0000.parquet"])
    assert outcome(layout.select_split(["de", "partial-train"])) == ("partial-train", ["de/partial-train/0.parquet"])
    with pytest.raises(UsageError, match="converted only a part of o/n; to read that part, write o/n:de:partial-tr"):
        layout.select_split(["de"])
    with pytest.raises(UsageError, match="none is the default; write o/n:NAME, there is de and en"):
        layout.select_split(["train"])


@pytest.mark.parametrize(
    ("paths", "chosen", "num_others", "ending"),
    [
        (["a.parquet", "b.parquet", "notes.txt", "x.py", "y.md", "z.md", "u.md"], ["a.parquet", "b.parquet"], 1, None),
        (["a.parquet", "b.jsonl.zst"], ["a.parquet"], 1, None),
        (["a.jsonl.gz", "b.ndjson", "c.json", "d.csv"], ["a.jsonl.gz", "b.ndjson", "c.json"], 1, None),
        (["a.txt", "b.txt", "LICENSE.txt"], ["a.txt", "b.txt"], 0, None),
        (["a.csv", "b.csv", "b.txt"], [], 0, "csv"),
        (["a.jsonl", "b.jsonl", "c.jsonl.bz2"], [], 0, "bz2"),
        (["a.jsonl", "b.jsonl", "c.zip"], [], 0, "zip"),
        (["a.zip"], [], 0, "zip"),
        (["A.JSONL", "B.Parquet", "c.py"], ["A.JSONL"], 0, None),
        (["a.parquet.gz"], [], 0, "gz"),
        (["metadata.jsonl", "images/metadata.jsonl", "a.png"], [], 0, "png"),
        (["a.py", "LICENSE.txt"], [], 0, ""),
    ],
)
def test_the_most_frequent_format_holds_the_documents(
    tmp_path: Path, paths: list[str], chosen: list[str], num_others: int, ending: str | None
) -> None:
    found = make(tmp_path, *paths).select_split([])
    assert list(found.files) == chosen
    assert len(found.notes) == num_others
    missing = "has no Parquet, JSON lines, JSON or text"
    obstacle = None if ending is None else f"is in .{ending} files, which are not read" if ending else missing
    assert found.obstacle == obstacle


PATHS = ["a.txt", "data/a.txt", "data/b.jsonl", "data/en/a.txt", "data/en/c/d.txt", "data/x[1].txt"]


@pytest.mark.parametrize(
    "pattern",
    ["*", "**", "data/*", "data/**", "**/*.txt", "data/*/*", "data/?.txt", "**/a.txt", "data/e*/**", "data/[ab].*", "data/en/**/d.txt", "data/[!a].jsonl", "*.jsonl", "data/x[[]1].txt", "data[!x]a.txt", "data/[^b].txt", "data/[z-a].txt"],
)  # fmt: skip
def test_globs_match_the_same_names_on_the_hub_in_a_bucket_and_on_a_disk(
    tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import glob

    layout = make(tmp_path, *PATHS)
    monkeypatch.chdir(tmp_path)
    on_disk = sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
    assert layout._match(pattern, is_data=False) == on_disk
    assert sorted(filter(translate(pattern).fullmatch, PATHS)) == on_disk
