"""What a run reads of a directory, and what a Markdown file is."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

import pytest

import tokenmill as tm
from tests.support.running import jsonl, sentence, texts_of, tokenize_here, tokenmill, zstd
from tokenmill.display import Silence
from tokenmill.errors import DataError
from tokenmill.inputs import expand_inputs
from tokenmill.pipeline.input_file import InputFile
from tokenmill.pipeline.inspection import describe_inputs, inspect_inputs
from tokenmill.readers.base import ReadOptions

PROSE = "# A title\n\nA paragraph that\nhas several lines.\n"


class Said(Silence):
    """A display that keeps what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str, *, style: str = "") -> None:
        self.lines.append(text)


def inspect(*items: str | Path) -> tuple[list[str], list[str]]:
    """The names of the files that are read, and what is said of the others."""
    files, said = find(*items)
    return [file.name for file in files], said


def find(*items: str | Path) -> tuple[list[InputFile], list[str]]:
    said = Said()
    return inspect_inputs(expand_inputs([str(item) for item in items], said), "auto", ReadOptions(), said), said.lines


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory as projects have it: data, a page about it, and a licence."""
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.jsonl").write_bytes(jsonl(["one", "two"]))
    (folder / "README.md").write_text(PROSE * 20)
    (folder / "LICENSE").write_text("You may.\n")
    return folder


def test_a_directory_gives_its_main_kind_and_says_what_it_left_out(project: Path) -> None:
    names, said = inspect(project)
    assert names == ["train.jsonl"]
    assert said == [
        f"left out of {project}, which has mostly JSON: LICENSE (unknown format), README.md (Markdown); "
        "to read them, name them"
    ]


def test_a_file_that_is_named_or_that_a_glob_matches_is_read_whatever_it_is(project: Path) -> None:
    assert inspect(project, project / "README.md") == (
        ["README.md", "data/train.jsonl"],
        [f"left out of {project}, which has mostly JSON: LICENSE (unknown format); to read it, name it"],
    )
    assert inspect(project / "*.md", project / "data" / "*")[0] == ["README.md", "data/train.jsonl"]
    with pytest.raises(DataError, match="LICENSE: its format is not known"):
        inspect(project / "*")


def test_the_main_kind_is_that_of_most_text(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a line\n" * 100)
    (tmp_path / "a.json").write_text('[{"text": "x"}]')
    (tmp_path / "b.jsonl.zst").write_bytes(zstd(jsonl(["y"])))
    assert inspect(tmp_path)[0] == ["notes.txt"]
    (tmp_path / "c.jsonl").write_bytes(jsonl(["a longer text"] * 100))
    # JSON and JSON lines hold records both.
    assert inspect(tmp_path)[0] == ["a.json", "b.jsonl.zst", "c.jsonl"]


def test_data_that_cannot_be_read_is_an_error_and_not_left_out(project: Path) -> None:
    packed = project / "data" / "more.jsonl.xz"
    packed.write_bytes(b"\xfd7zXZ\x00 and more")
    with pytest.raises(DataError, match="xz"):
        inspect(project)
    packed.unlink()
    (project / "data" / "gone.jsonl").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"gone.jsonl: cannot be read"):
        inspect(project)


def test_a_directory_of_nothing_that_is_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("You may.\n")
    with pytest.raises(DataError, match="LICENSE: its format is not known"):
        inspect(tmp_path)


def test_named_pipes_sockets_and_devices_are_left_out(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(project / "data" / "pipe.jsonl")
    monkeypatch.chdir(project)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        names, said = inspect(project, "data/*.jsonl")
    assert names == ["train.jsonl"]
    regular = [line for line in said if "only regular files are inputs" in line]
    assert "and 1 more left out" in regular[0]
    assert regular[1] == "data/pipe.jsonl left out: only regular files are inputs"


def test_a_pipe_that_takes_the_place_of_an_input_is_an_error_and_no_wait(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x"]))
    found = expand_inputs([str(tmp_path)])
    (tmp_path / "a.jsonl").unlink()
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a.jsonl: cannot be read: it is a named pipe"):
        inspect_inputs(found, "auto", ReadOptions())


def test_inputs_are_described_by_kind_and_count(project: Path) -> None:
    (project / "data" / "more.jsonl.zst").write_bytes(zstd(jsonl(["y"])))
    options = ReadOptions()
    assert describe_inputs(find(project / "data" / "train.jsonl")[0], options) == "1 file of JSON lines, 32 B"
    assert describe_inputs(find(project / "data", project / "README.md")[0], options) == (
        "3 files, 995 B: 1 of JSON lines (zstd), 1 of JSON lines, 1 of Markdown"
    )


def test_a_run_shows_its_inputs_and_what_it_left_out(project: Path, tmp_path: Path) -> None:
    done = tokenmill("tokenize", project, "-o", tmp_path / "out", "--tokenizer", "bytes")
    assert "inputs     1 file of JSON lines, 32 B\n" in done.stderr
    assert "LICENSE (unknown format), README.md (Markdown)" in done.stderr
    assert tm.open(tmp_path / "out").num_documents == 2


def test_a_markdown_file_is_one_document(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "page.md").write_text(PROSE)
    (pages / "notes.txt").write_text("one\ntwo\n")
    store = tokenize_here(pages, tmp_path / "out", tokenizer="bytes")
    assert texts_of(store) == ["one", "two", PROSE]
    # Also a page that is longer than a task.
    cut = tokenize_here(pages, tmp_path / "cut", tokenizer="bytes", task_bytes=8)
    assert sorted(texts_of(cut)) == sorted(texts_of(store))
    lines = [line for line in PROSE.split("\n") if line]
    for name, flags in {"format": {"format": "text"}, "separator": {"separator": "\n"}}.items():
        cut = tokenize_here(str(pages / "page.md"), tmp_path / name, tokenizer="bytes", **flags)
        assert [text for text in texts_of(cut) if text] == lines


def test_markdown_streams_with_the_rows_of_its_store(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.md").write_text(PROSE * (1 + number))
    flags = {"seq_len": 16, "batch_size": 2, "tokenizer": "bytes", "shuffle": False}
    streamed = tm.load(str(tmp_path), cache=str(tmp_path / "cache"), **flags)
    rows = [next(iter(streamed))[0].tolist()]
    store = tokenize_here(sorted(map(str, tmp_path.glob("*.md"))), tmp_path / "out", tokenizer="bytes")
    assert rows == [next(iter(tm.load(store, seq_len=16, batch_size=2, shuffle=False)))[0].tolist()]


def test_a_flag_for_plain_text_still_refuses_records(project: Path, tmp_path: Path) -> None:
    done = tokenmill("tokenize", project, "-o", tmp_path / "out", "--tokenizer", "bytes", "--whole-files")
    assert "--whole-files is for plain text, and this is jsonl" in sentence(done)


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"


def example_of(stderr: str) -> tuple[str, int]:
    """The text and the number of ids of the example on the first screen."""
    text, ids = re.search(r"^example    (.*)\n .* \(([\d,]+) ids\)$", stderr, re.MULTILINE).groups()  # type: ignore[union-attr]
    return text, int(ids.replace(",", ""))


def test_the_example_is_the_first_document_of_several_inputs_whole(tmp_path: Path) -> None:
    names = ["z", "d", "c", "b", "a"]
    for name in names:
        texts = [] if name == "z" else [f"{name}1 " + "x" * 20_000 + f" end of {name}1", "more"]
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(texts))
    out = tmp_path / "out"
    done = tokenmill("tokenize", *(f"{name}.jsonl" for name in names), "-o", out, "--tokenizer", "bytes", cwd=tmp_path)
    store = tm.open(out)
    text, num_ids = example_of(done.stderr)
    assert text.startswith("d1 xxx")
    assert text.endswith("d1<eos>")
    assert num_ids == len(store.document(0)) == 20_014


@pytest.mark.parametrize("first", ["messages", "prompt"])
def test_the_example_of_mixed_records_has_the_ids_that_are_stored(tmp_path: Path, first: str) -> None:
    records = [{"messages": CHAT}, {"prompt": "Who?", "response": "Me."}]
    records.sort(key=lambda record: first not in record)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records * 5))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    flags = ["--tokenizer", "bytes", "--chat-template", tmp_path / "template.jinja", "--messages-key", "messages"]
    flags += ["--prompt-key", "prompt", "--response-key", "response", "--allow-no-stop"]
    done = tokenmill("tokenize", tmp_path / "a.jsonl", "-o", tmp_path / "out", *flags)
    assert done.returncode == 0, done.stderr
    document = tm.open(tmp_path / "out").document(0)
    text, num_ids = example_of(done.stderr)
    assert num_ids == len(document)
    assert text.endswith("<eos>") == (document[-1] == 256)


def test_of_a_very_long_first_document_the_start_is_shown(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x" * 1_500_000]))
    done = tokenmill("tokenize", tmp_path / "a.jsonl", "-o", tmp_path / "out", "--tokenizer", "bytes")
    assert "120 120 120 120 120 120 120 120 120 ...\n           (the start of 1,500,000 characters)" in done.stderr
    assert all(len(line) <= 80 for line in done.stderr.splitlines() if line.startswith(" " * 11))


def test_a_kept_field_that_no_record_has_is_an_error(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"text {n}", "id": n, **({"rare": 1} if n == 4000 else {})}) for n in range(5000)]
    (tmp_path / "a.jsonl").write_text("".join(f"{line}\n" for line in lines))
    done = tokenmill(
        "tokenize", "a.jsonl", "-o", "out", "--tokenizer", "bytes", "--keep-keys", "id,source", cwd=tmp_path
    )
    assert sentence(done) == (
        "--keep-keys source: none of 5,000 documents from all inputs has this field; the record has 'text', 'id'. "
        "Leave it out, or pass a field that they have"
    )
    # One that few records have is found.
    assert tokenize_here(tmp_path / "a.jsonl", tmp_path / "rare", tokenizer="bytes", keep_keys=["rare"]).num_documents


def test_a_separator_that_only_other_line_ends_hide_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\ntwo\r\n\r\nthree")
    (tmp_path / "b.txt").write_bytes(b"one\n\ntwo")
    done = tokenmill(
        "tokenize", *("a.txt", "b.txt", "-o", "out"), "--tokenizer", "bytes", "--separator", r"\n\n", cwd=tmp_path
    )
    note = r"a.txt: lines end with CR LF, so --separator is not in the text; pass --separator '\r\n\r\n'"
    assert note in done.stderr.splitlines()
    flags = ["--tokenizer", "bytes", "--separator", r"\r\n\r\n"]
    again = tokenmill("tokenize", "a.txt", "-o", "cut", *flags, cwd=tmp_path)
    assert "CR LF" not in again.stderr
    assert texts_of(tm.open(tmp_path / "cut")) == ["one", "two", "three"]


def test_a_resume_with_another_tokenizer_names_both(tmp_path: Path, tiny_tokenizer: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x"] * 30) + b"{broken\n")
    arguments = ["tokenize", tmp_path / "a.jsonl", "-o", tmp_path / "out", "--task-bytes", "40"]
    assert tokenmill(*arguments, "--tokenizer", "bytes").returncode == 1
    again = tokenmill(*arguments, "--tokenizer", tiny_tokenizer)
    assert re.search(
        rf"was tokenized with bytes \(\w{{6}}\); this run uses {tiny_tokenizer.name} \(\w{{6}}\)", sentence(again)
    )
