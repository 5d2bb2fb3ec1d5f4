"""Which files are a data set: as the `datasets` library itself finds them in the same folders and cards."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.errors import UsageError
from tokenmill.inputs.columns import only_text_column, text_column_of_card
from tokenmill.inputs.hub.layout import by_names, configurations, fixed_folder, match, readable, select
from tokenmill.inputs.hub.names import could_be_on_hub, parse

WORDS = ["train", "training", "test", "eval", "valid", "dev", "val", "data", "x", "strain", "Train", "retest", "web"]
JOINTS = ["-", "_", ".", " ", "", "00001", "-00000-of-00003"]
NUMBERS = itertools.count()


@st.composite
def file_names(draw: st.DrawFn) -> str:
    """Paths of words that may be splits, joined in ways that may be understood."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        first, joint, second = (
            draw(st.sampled_from(WORDS)),
            draw(st.sampled_from(JOINTS)),
            draw(st.sampled_from(["", *WORDS])),
        )
        parts.append(f"{first}{joint}{second}".strip(" ."))
    return "/".join(parts) + ".jsonl"


def splits_by_datasets(folder: Path) -> dict[str, list[str]]:
    """What the library finds in a folder without a card."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    return {split: sorted({str(Path(file).relative_to(folder)) for file in files}) for split, files in found.items()}


def make(folder: Path, paths: list[str]) -> list[str]:
    made = []
    for path in paths:
        file = folder / path
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("{}\n")
        except OSError:
            continue
        made.append(path)
    return made


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(file_names(), min_size=1, max_size=6, unique=True))
def test_splits_by_names_are_those_that_the_datasets_library_finds(
    tmp_path_factory: pytest.TempPathFactory, paths: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("repository") / f"number{next(NUMBERS)}"
    made = make(folder, paths)
    assert by_names(lambda _: made) == splits_by_datasets(folder)


@pytest.mark.parametrize(
    "paths",
    [
        ["train.jsonl", "test.jsonl", "validation.jsonl"],
        ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002-abc.jsonl", "data/dev_sft-00000-of-00001.jsonl", "a.jsonl"],
        ["train/chunk1/example_train_0.jsonl", "validation/chunk1/example_holdout_0.jsonl", "other.jsonl"],
        ["my_train_file.jsonl", "my-dev-file.jsonl", "strain.jsonl"],
        ["en/a.jsonl", "de/b.jsonl"],
    ],
)  # fmt: skip
def test_the_usual_layouts_are_understood_as_the_datasets_library_does(tmp_path: Path, paths: list[str]) -> None:
    made = make(tmp_path / "repository", paths)
    assert by_names(lambda _: made) == splits_by_datasets(tmp_path / "repository")


PATHS = ["a.txt", "data/a.txt", "data/b.jsonl", "data/en/a.txt", "data/en/c/d.txt", "data/.h.txt", "data/x[1].txt", ".k/z.txt"]  # fmt: skip


@pytest.mark.parametrize("pattern", ["*", "**", "data/*", "data/**", "**/*.txt", "data/*/*", "data/?.txt", "**/a.txt", "data/e*/**", "data/[ab].*", "data/en/**/d.txt", "a.txt", "data/.*", "*.jsonl"])  # fmt: skip
def test_patterns_match_what_those_of_the_datasets_library_match(tmp_path: Path, pattern: str) -> None:
    from datasets.data_files import resolve_pattern

    make(tmp_path / "r", PATHS)
    try:
        found = sorted(
            str(Path(file).relative_to(tmp_path / "r")) for file in resolve_pattern(pattern, str(tmp_path / "r"))
        )
    except FileNotFoundError:
        found = []
    assert sorted(match(pattern, PATHS)) == found
    below = [path for path in PATHS if path.startswith(f"{fixed_folder(pattern)}/") or not fixed_folder(pattern)]
    assert sorted(match(pattern, below)) == found


def test_cards_say_configurations_in_many_forms() -> None:
    card = {
        "configs": [
            {"config_name": "default", "data_files": "a.txt"},
            {"config_name": "list", "data_files": ["a.txt", "b.txt"]},
            {"config_name": "splits", "data_files": [{"split": "train", "path": ["a.txt"]}, {"split": "test", "path": "b.txt"}]},
            {"config_name": "mapping", "data_files": {"train": "a.txt"}},
            {"config_name": "folder", "data_dir": "c", "default": True},
            "old style",
        ]
    }  # fmt: skip
    files = ["a.txt", "b.txt", "c/train.txt", "c/test.txt", "README.md"]
    found = {config.name: select("o/n", card, lambda _: files, [config.name]) for config in configurations(card)}
    assert {name: (chosen.split, chosen.paths) for name, chosen in found.items()} == {
        "default": ("train", ["a.txt"]),
        "list": ("train", ["a.txt", "b.txt"]),
        "splits": ("train", ["a.txt"]),
        "mapping": ("train", ["a.txt"]),
        "folder": ("train", ["c/train.txt"]),
    }
    assert select("o/n", card, lambda _: files, []).config == "folder"
    assert select("o/n", card, lambda _: files, ["splits", "test"]).paths == ["b.txt"]
    assert select("o/n", {"configs": "nonsense"}, lambda _: ["x.jsonl"], []).paths == ["x.jsonl"]
    assert select("o/n", {}, lambda _: ["x.png"], []) is None
    elsewhere = {"configs": [{"config_name": "default", "data_files": "https://host/a.txt"}]}
    with pytest.raises(UsageError, match="takes its files from https://host/a.txt, which is elsewhere"):
        select("o/n", elsewhere, lambda _: files, [])


def test_files_of_the_kind_that_most_are_hold_the_documents() -> None:
    assert readable(["b.parquet", "a.parquet", "notes.txt", "README.md", ".x.parquet", "__c__/y.parquet"]) == ["a.parquet", "b.parquet"]  # fmt: skip
    assert readable(["a.parquet", "b.jsonl.zst"]) == ["a.parquet"]
    assert readable(["a.jsonl.gz", "b.ndjson", "dataset_infos.json", "c.csv", "LICENSE.txt"]) == [
        "a.jsonl.gz",
        "b.ndjson",
    ]
    assert readable(["a.tar", "requirements.txt"]) == []


@pytest.mark.parametrize(
    ("item", "repository", "revision", "path", "words"),
    [
        ("owner/name", "owner/name", "main", "", ()),
        ("owner/name@v1.0", "owner/name", "v1.0", "", ()),
        ("owner/na.me:en", "owner/na.me", "main", "", ("en",)),
        ("owner/name@abc:en:test", "owner/name", "abc", "", ("en", "test")),
        ("hf://datasets/owner/name@refs/convert/parquet/en/train", "owner/name", "refs/convert/parquet", "en/train", ()),
        ("hf://datasets/owner/name@~parquet/en", "owner/name", "refs/convert/parquet", "en", ()),
        ("hf://datasets/owner/name@refs%2Fpr%2F7/a.txt", "owner/name", "refs/pr/7", "a.txt", ()),
        ("hf://datasets/owner/name/d/*.jsonl", "owner/name", "main", "d/*.jsonl", ()),
        ("hf://datasets/owner/name/", "owner/name", "main", "", ()),
        ("finewebedu", "HuggingFaceFW/fineweb-edu", "main", "", ("sample-10BT",)),
        ("FineWebEdu:train", "HuggingFaceFW/fineweb-edu", "main", "", ("sample-10BT", "train")),
        ("finewebedu:default", "HuggingFaceFW/fineweb-edu", "main", "", ("default",)),
        ("tinystories:validation", "roneneldan/TinyStories", "main", "", ("validation",)),
    ],
)  # fmt: skip
def test_what_is_written_is_taken_apart(
    item: str, repository: str, revision: str, path: str, words: tuple[str, ...]
) -> None:
    target = parse(item)
    assert (target.repository, target.revision, target.path, target.words) == (repository, revision, path, words)


@pytest.mark.parametrize(
    "item",
    ["hf://datasets/name", "hf://owner/name", "hf://spaces/a/b", "hf://datasets/o/n/a.txt:en", "hf://datasets/o/n:a:b:c", "hf://"],
)  # fmt: skip
def test_what_is_no_data_set_is_refused_with_the_forms_there_are(item: str) -> None:
    with pytest.raises(UsageError, match=r"expected hf://datasets/owner/name, hf://datasets/owner/name/path or"):
        parse(item)


def test_a_path_is_not_taken_for_a_data_set() -> None:
    no = ["name", "./a/b", "/a/b", "a/b/c", "../a", "data/train.jsonl", "a/b.jsonl.zst", "a/b.txt", "tests/nothing", ""]
    assert [item for item in no if could_be_on_hub(item)] == []
    yes = ["owner/name", "owner/name.v2", "owner/name:en", "owner/name@main", "tinystories", "TinyStories:test"]
    assert [item for item in yes if could_be_on_hub(item)] == yes


def test_the_text_is_in_text_or_in_the_only_column_of_strings() -> None:
    assert only_text_column({"id": "string", "text": "string"}) == "text"
    assert only_text_column({"id": "int64", "content": "large_string"}) == "content"
    assert only_text_column({"id": "string", "content": "string"}) is None
    features = [{"name": "n", "dtype": "int64"}, {"name": "story", "dtype": "string"}]
    assert text_column_of_card({"dataset_info": {"features": features}}, None) == "story"
    several = [{"config_name": "a", "features": features}, {"config_name": "b", "features": features[:1]}]
    assert text_column_of_card({"dataset_info": several}, "a") == "story"
    assert text_column_of_card({"dataset_info": several}, "b") is None
    assert text_column_of_card({"dataset_info": ["odd", 7]}, None) is None
    assert text_column_of_card({}, None) is None
