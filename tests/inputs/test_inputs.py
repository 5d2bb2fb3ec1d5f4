"""Listing inputs: local paths, lists, refusals and names; the contract suite has what all backends share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenmill.errors import UsageError
from tokenmill.inputs import Input, expand_inputs, name_inputs


def make_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def paths_of(*inputs: str) -> list[str]:
    return [file.path for file in expand_inputs(inputs)]


def names_of(*paths: str | Path) -> list[str]:
    return name_inputs([Input(str(path)) for path in paths])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_inputs_come_in_the_order_given_and_directories_are_sorted(here: Path) -> None:
    make_files(here, "z.jsonl", "d/b.jsonl", "d/a/2.jsonl", "d/a/1.jsonl", "d/.hidden", "d/.git/config", "a.txt")
    assert paths_of("z.jsonl", "d", "*.txt") == ["z.jsonl", "d/a/1.jsonl", "d/a/2.jsonl", "d/b.jsonl", "a.txt"]


def test_a_list_names_one_path_per_line(here: Path) -> None:
    make_files(here, "b c.jsonl", "a.jsonl", "d/x.jsonl")
    (here / "files.txt").write_text("b c.jsonl\n\n  a.jsonl\r\nd\n")
    assert paths_of("@files.txt") == ["b c.jsonl", "a.jsonl", "d/x.jsonl"]


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        (["missing.jsonl"], "missing.jsonl"),
        (["a.jsonl", "*.parquet"], "*.parquet"),
        (["empty"], "empty"),
        (["@missing.txt"], "missing.txt"),
        (["@blank.txt"], "blank.txt"),
        (["a.jsonl", "./a.jsonl"], "a.jsonl"),
        (["pipe"], "pipe"),
        (["-"], "standard input is not read, because a run"),
        (["ftp://host/a.jsonl"], "ftp://"),
        ([], "no input"),
    ],
)
def test_an_input_that_gives_no_file_is_refused_by_name(here: Path, inputs: list[str], named: str) -> None:
    make_files(here, "a.jsonl", "empty/.hidden")
    (here / "blank.txt").write_text("\n\n")
    os.mkfifo(here / "pipe")
    with pytest.raises(UsageError, match=named.replace("*", r"\*")):
        expand_inputs(inputs)


def test_links_to_folders_are_followed_without_going_in_circles(here: Path) -> None:
    make_files(here, "other/x.jsonl", "d/a.jsonl")
    (here / "d/more").symlink_to(here / "other")
    (here / "other/back").symlink_to(here / "d")
    assert paths_of("d") == ["d/a.jsonl", "d/more/x.jsonl"]


def test_a_name_that_is_not_utf8_is_refused(here: Path) -> None:
    try:
        Path(os.fsdecode(b"bad\xff.jsonl")).write_bytes(b"x")
    except OSError:
        pytest.skip("the file system takes UTF-8 names only")
    with pytest.raises(UsageError, match="not UTF-8"):
        expand_inputs(["*.jsonl"])


def test_names_are_relative_to_the_common_folder(here: Path) -> None:
    assert names_of("c/a/x.jsonl", "c/b/y.jsonl") == ["a/x.jsonl", "b/y.jsonl"]
    assert names_of(here / "c" / "x.jsonl") == ["x.jsonl"]
    assert names_of("/x.jsonl", "/y/z.jsonl") == ["x.jsonl", "y/z.jsonl"]
    assert names_of("c/d/x.jsonl", "c/../c/y.jsonl") == ["d/x.jsonl", "y.jsonl"]
    assert names_of() == []


def test_an_input_that_has_a_name_keeps_it(here: Path) -> None:
    inputs = [Input("c/a/x.jsonl"), Input("/cache/blob", "datasets/o/n/x.jsonl"), Input("c/b/y.jsonl")]
    assert name_inputs(inputs) == ["a/x.jsonl", "datasets/o/n/x.jsonl", "b/y.jsonl"]
