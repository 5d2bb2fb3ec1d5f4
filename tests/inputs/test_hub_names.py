"""How data sets of the Hub are written, and which items are not taken for one."""

from __future__ import annotations

import pytest

from tokenmill.errors import UsageError
from tokenmill.inputs._hub_names import may_be_on_hub, parse


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
def test_an_item_is_parsed_into_its_parts(
    item: str, repository: str, revision: str, path: str, words: tuple[str, ...]
) -> None:
    target = parse(item)
    assert (target.repository, target.revision, target.path, target.words) == (repository, revision, path, words)


@pytest.mark.parametrize(
    "item",
    ["hf://datasets/name", "hf://owner/name", "hf://spaces/a/b", "hf://datasets/o/n:en/a.txt", "hf://datasets/o/n:a:b:c", "hf://"],
)  # fmt: skip
def test_any_other_item_is_refused_with_the_accepted_forms(item: str) -> None:
    with pytest.raises(UsageError, match=r"expected hf://datasets/owner/name, hf://datasets/owner/name/path or"):
        parse(item)


def test_a_path_is_not_taken_for_a_data_set() -> None:
    no = ["name", "./a/b", "/a/b", "a/b/c", "../a", "data/train.jsonl", "a/b.jsonl.zst", "a/b.txt", "tests/nothing", ""]
    assert [item for item in no if may_be_on_hub(item)] == []
    yes = [
        "owner/name",
        "owner/name.v2",
        "owner/name:en",
        "owner/name@main",
        "tinystories",
        "TinyStories:test",
        "tinystories@v1",
    ]
    assert [item for item in yes if may_be_on_hub(item)] == yes
