"""Which files are a data set: as the `datasets` library itself finds them in the same folders and cards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from tokenmill.errors import UsageError
from tokenmill.inputs.columns import only_text_column, text_column_of_card, text_column_of_file
from tokenmill.inputs.hub.kinds import NOT_READ, PREFERRED, READ, sort_out
from tokenmill.inputs.hub.layout import Selection, by_names, configurations, converted, described
from tokenmill.inputs.hub.names import could_be_on_hub, parse
from tokenmill.inputs.hub.patterns import fixed_folder, match

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


ENDINGS = [
    "parquet",
    "jsonl",
    "json",
    "txt",
    "csv",
    "tsv",
    "png",
    "py",
    "jsonl.gz",
    "json.gz",
    "jsonl.zst",
    "ndjson",
    "arrow",
]
STEMS = [
    "train",
    "test",
    "val",
    "data",
    "foo",
    "notes",
    "metadata",
    "train-00000-of-00002",
    "train_sft-00000-of-00001",
    "c4-train.00000-of-01024",
    ".hidden",
]
FOLDERS = ["", "", "data/", "en/", "train/", "test/", "en/train/", "data/train/", ".hidden/", "__special__/"]
PATTERNS = ["*", "**", "data/*", "./en/*", "en/**", "train*", "data/train-*", "*.jsonl", "**/*.parquet", ".hidden/*", "__special__/*", "__*/**", "**/.*"]  # fmt: skip


@st.composite
def repositories(draw: st.DrawFn) -> tuple[list[str], dict[str, Any]]:
    """Files of several kinds, and maybe a card that names some of them."""
    endings = draw(st.lists(st.sampled_from(ENDINGS), min_size=1, max_size=3, unique=True))
    parts = st.tuples(st.sampled_from(FOLDERS), st.sampled_from(STEMS), st.sampled_from(endings))
    files = sorted(
        {f"{folder}{stem}.{ending}" for folder, stem, ending in draw(st.lists(parts, min_size=1, max_size=7))}
    )
    if draw(st.booleans()):
        return files, {}
    pattern = st.sampled_from([*PATTERNS, *files])
    paths = st.one_of(pattern, st.lists(pattern, min_size=1, max_size=2))
    splits = st.lists(st.sampled_from(["train", "test", "train_sft"]), min_size=1, max_size=2, unique=True)
    by_split = splits.flatmap(
        lambda names: st.tuples(*(st.fixed_dictionaries({"split": st.just(name), "path": paths}) for name in names))
    )
    config = st.fixed_dictionaries(
        {"config_name": st.sampled_from(["default", "en"])},
        optional={
            "data_files": st.one_of(paths, by_split.map(list)),
            "data_dir": st.sampled_from(["data", "en", "./en", "en/"]),
            "default": st.just(True),
        },
    )
    return files, {"configs": draw(st.lists(config, min_size=1, max_size=2, unique_by=lambda one: one["config_name"]))}


def chosen_by_datasets(folder: Path) -> tuple[str, dict[str, list[str]]] | None:
    """The kind of files that the library reads with its default configuration, and those of each split."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(str(folder), cache_dir=str(folder.parent / "cache"))
    except (ValueError, OSError, TypeError, datasets.exceptions.DatasetsError):
        return None
    found = builder.config.data_files
    splits = {str(name): sorted({str(Path(file).relative_to(folder)) for file in found[name]}) for name in found}
    return type(builder).__module__.rpartition(".")[2], splits


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(repositories())
@example((["data/train-00000-of-00001.parquet", "notes.txt", "changes.txt"], {}))
@example((["train/a.json", "train/b.jsonl", "train/c.jsonl"], {}))
@example((["train.csv", "test.csv", "vocab.txt"], {}))
@example((["a.parquet", "notice.parquet", "license-texts.parquet"], {}))
@example((["en/a.jsonl", "b.jsonl"], {"configs": [{"config_name": "default", "data_dir": "./en"}]}))
@example(([".k/a.jsonl"], {"configs": [{"config_name": "default", "data_files": ".k/a.jsonl"}]}))
@example((["config.json"], {"configs": [{"config_name": "default", "data_files": "config.json"}]}))
def test_files_of_several_kinds_are_chosen_as_the_datasets_library_does(
    tmp_path_factory: pytest.TempPathFactory, repository: tuple[list[str], dict[str, Any]]
) -> None:
    paths, card = repository
    folder = tmp_path_factory.mktemp("repository") / f"number{next(NUMBERS)}"
    files = make(folder, paths)
    if card:
        (folder / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
        files = [*files, "README.md"]
    theirs = chosen_by_datasets(folder)
    # What the library refuses may be read here, where it is clear what is meant.
    assume(theirs is not None)
    assert theirs is not None
    kind, splits = theirs
    for split, expected in splits.items():
        # With a card, files of other kinds are given to the reader of one, which fails.
        kinds = {READ.get(word) for path in expected for word in path.split(".") if word in READ or word in NOT_READ}
        if not expected or (card and kinds != {kind}):
            continue
        found = choose(card, files, split)
        assert found is not None
        if kind in READ.values():
            assert (found.paths, found.not_read) == (expected, None)
        else:
            assert found.not_read is not None


def choose(card: dict[str, Any], files: Sequence[str], *words: str) -> Selection | None:
    return described("o/n", card, lambda folder: [path for path in files if path.startswith(folder)]).choose(words)


def test_endings_mean_the_kinds_that_they_mean_to_the_datasets_library() -> None:
    from datasets.packaged_modules import _ALL_EXTENSIONS, _EXTENSION_TO_MODULE

    assert {ending: _EXTENSION_TO_MODULE[f".{ending}"][0] for ending in READ} == READ
    assert {f".{ending}" for ending in NOT_READ} <= {*_ALL_EXTENSIONS}
    assert set(PREFERRED) <= READ.keys() | NOT_READ
    kinds = {"parquet", "json", "text", "csv", "arrow", "webdataset", "xml", "hdf5", "lance", "vortex", "conll"}
    usual = {ending for ending, (kind, _) in _EXTENSION_TO_MODULE.items() if kind in kinds}
    assert usual <= {f".{ending}" for ending in (*READ, *NOT_READ)}


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
            {"config_name": "folder", "data_dir": "./c/", "default": True},
            {"config_name": 2023, "data_files": "hf://datasets/o/n/c/*"},
            {"config_name": "notes", "data_files": ["license.txt", "__x__/.h.txt"]},
            "old style",
        ]
    }  # fmt: skip
    files = ["a.txt", "b.txt", "c/train.txt", "c/test.txt", "README.md", "license.txt", "__x__/.h.txt"]
    found = {config.name: choose(card, files, config.name) for config in configurations(card)}
    assert {name: (chosen.split, chosen.paths) for name, chosen in found.items()} == {
        "default": ("train", ["a.txt"]),
        "list": ("train", ["a.txt", "b.txt"]),
        "splits": ("train", ["a.txt"]),
        "mapping": ("train", ["a.txt"]),
        "folder": ("train", ["c/train.txt"]),
        "2023": ("train", ["c/test.txt", "c/train.txt"]),
        "notes": ("train", ["__x__/.h.txt", "license.txt"]),
    }
    assert choose(card, files).config == "folder"
    assert choose(card, files, "splits", "test").paths == ["b.txt"]
    assert choose({"configs": "nonsense"}, ["x.jsonl"]).paths == ["x.jsonl"]
    assert choose({}, ["x.jsonl"], "default").config is None
    assert choose({}, ["x.py", "README.md", "LICENSE.txt"]) is None
    elsewhere = {"configs": [{"config_name": "default", "data_files": "https://host/a.txt"}]}
    with pytest.raises(UsageError, match="takes its files from https://host/a.txt, which is elsewhere"):
        choose(elsewhere, files)


def test_a_word_is_a_configuration_or_else_a_split_of_the_default_one() -> None:
    sft = [{"split": "train_sft", "path": "a.txt"}, {"split": "test", "path": "b.txt"}]
    card = {"configs": [{"config_name": "default", "data_files": sft}, {"config_name": "en", "data_files": "b.txt"}]}
    files = ["a.txt", "b.txt"]
    assert choose(card, files, "train_sft").paths == ["a.txt"]
    assert choose(card, files, "en").paths == ["b.txt"]
    refusals = {
        (): "o/n:default has no train split; there is train_sft and test",
        ("de",): "o/n has no configuration 'de'; there is default and en; and the default one, default, has no such "
        "split; there is train_sft and test",
        ("en", "test"): "o/n:en has no split 'test'; there is train",
        ("de", "train"): "o/n has no configuration 'de'; there is default and en",
    }
    for words, said in refusals.items():
        with pytest.raises(UsageError) as refused:
            choose(card, files, *words)
        assert str(refused.value) == said


def test_what_the_hub_has_converted_is_a_folder_for_each_configuration_and_split() -> None:
    offer = converted("o/n", ["en/train/0000.parquet", "en/test/0000.parquet", "de/partial-train/0.parquet", "x.json"])
    assert offer.choose(["en"]).paths == ["en/train/0000.parquet"]
    assert offer.choose(["en", "test"]).paths == ["en/test/0000.parquet"]
    assert offer.choose(["de", "partial-train"]).paths == ["de/partial-train/0.parquet"]
    with pytest.raises(
        UsageError, match="has converted a part of o/n only; to take that part, write o/n:de:partial-tr"
    ):
        offer.choose(["de"])
    with pytest.raises(UsageError, match="none is the default; write o/n:NAME, there is en and de"):
        offer.choose(["train"])


def test_files_of_the_kind_that_most_are_hold_the_documents() -> None:
    files = {
        ("b.parquet", "a.parquet", "notes.txt", "x.py"): (["a.parquet", "b.parquet"], 1, None),
        ("a.parquet", "b.jsonl.zst"): (["a.parquet"], 1, None),
        ("a.jsonl.gz", "b.ndjson", "c.json", "d.csv"): (["a.jsonl.gz", "b.ndjson", "c.json"], 1, None),
        ("a.tar", "b.txt"): (["b.txt"], 1, None),
        ("a.csv", "b.csv", "b.txt"): (["a.csv", "b.csv"], 1, "csv"),
        ("a.jsonl", "b.jsonl", "c.jsonl.bz2"): (["a.jsonl", "b.jsonl", "c.jsonl.bz2"], 0, "bz2"),
        ("a.jsonl", "b.jsonl", "c.zip"): (["a.jsonl", "b.jsonl", "c.zip"], 0, "zip"),
        ("a.parquet.gz",): (["a.parquet.gz"], 0, "gz"),
        ("metadata.jsonl", "images/metadata.jsonl", "a.png"): (["a.png"], 2, "png"),
    }
    for paths, (chosen, num_others, not_read) in files.items():
        found = sort_out(paths)
        assert (found.paths, found.num_others, found.not_read) == (chosen, num_others, not_read)
    assert sort_out(["a.py", "b.md"]) is None


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
        ("tinystories@abc", "roneneldan/TinyStories", "abc", "", ()),
        ("finewebedu@v1:train", "HuggingFaceFW/fineweb-edu", "v1", "", ("sample-10BT", "train")),
        ("hf://datasets/owner/name/a:b.txt", "owner/name", "main", "a:b.txt", ()),
    ],
)  # fmt: skip
def test_what_is_written_is_taken_apart(
    item: str, repository: str, revision: str, path: str, words: tuple[str, ...]
) -> None:
    target = parse(item)
    assert (target.repository, target.revision, target.path, target.words) == (repository, revision, path, words)


@pytest.mark.parametrize(
    "item",
    ["hf://datasets/name", "hf://owner/name", "hf://spaces/a/b", "hf://datasets/o/n:en/a.txt", "hf://datasets/o/n:a:b:c", "hf://"],
)  # fmt: skip
def test_what_is_no_data_set_is_refused_with_the_forms_there_are(item: str) -> None:
    with pytest.raises(UsageError, match=r"expected hf://datasets/owner/name, hf://datasets/owner/name/path or"):
        parse(item)


def test_a_path_is_not_taken_for_a_data_set() -> None:
    no = ["name", "./a/b", "/a/b", "a/b/c", "../a", "data/train.jsonl", "a/b.jsonl.zst", "a/b.txt", "tests/nothing", ""]
    assert [item for item in no if could_be_on_hub(item)] == []
    yes = [
        "owner/name",
        "owner/name.v2",
        "owner/name:en",
        "owner/name@main",
        "tinystories",
        "TinyStories:test",
        "tinystories@v1",
    ]
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
    assert text_column_of_card({"dataset_info": several}, None) is None
    assert text_column_of_card({"dataset_info": ["odd", 7]}, None) is None
    assert text_column_of_card({}, None) is None


def test_the_first_records_tell_the_only_field_of_strings(tmp_path: Path) -> None:
    files = {
        '{"content": "a", "n": 1}\n{"content": "b"}\n': "content",
        '{"content": "a", "title": null}\n{"content": "b", "title": "c"}\n': None,
        '{"content": "a", "text": null}\n': "text",
        '{"content": "a"}\nbroken': "content",
        "[1]": None,
        "": None,
    }
    for content, key in files.items():
        path = tmp_path / "a.jsonl"
        path.write_text(content)
        assert text_column_of_file(str(path)) == key
