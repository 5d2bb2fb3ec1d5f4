"""A damaged or hostile tokenizer file is refused in one sentence; a good one has the ids of its library."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from tests.faults.hostile_tokenizers import (
    CHANGES,
    EOS,
    PIECES,
    Hostile,
    description,
    fuzzed_configs,
    fuzzed_descriptions,
    fuzzed_models,
    fuzzed_ranks,
    load_all,
    ranks,
    try_all,
    written_configs,
)
from tests.support.tiny_tokenizers import added, byte_level_config, split
from tokenmill.engines import choose, load_tokenizer
from tokenmill.engines._guard import PanicError, guarded
from tokenmill.errors import DataError, UsageError


def write(folder: Path, config: dict[str, Any], **side: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_bytes(json.dumps(side).encode() if side else EOS)
    return str(folder)


def tokenize(tmp_path: Path, config: dict[str, Any], texts: tuple[str, ...] = ("a cat",), **side: Any) -> Any:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = write(tmp_path / "own", config, **side)
    return tokenmill.tokenize(corpus, tmp_path / "store", tokenizer=tokenizer, workers=1, display="quiet")


def changed(name: str) -> dict[str, Any]:
    config = byte_level_config()
    CHANGES[name](config)
    return config


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(lambda: list(written_configs()), id="written tokenizer.json"),
        pytest.param(lambda: list(fuzzed_configs(120)), id="fuzzed tokenizer.json"),
        pytest.param(lambda: list(fuzzed_ranks(300)), id=".tiktoken"),
        pytest.param(lambda: list(fuzzed_descriptions(108)), id="tiktoken.json"),
        pytest.param(lambda: list(fuzzed_models(60)), id="SentencePiece"),
    ],
)
def test_each_hostile_file_loads_or_gives_a_sentence_and_prints_nothing(tmp_path: Path, kind: Any) -> None:
    files: list[Hostile] = kind()
    outcomes = zip(files, load_all(files, tmp_path), strict=True)
    wrong = {hostile.name: outcome for hostile, outcome in outcomes if outcome.kind not in ("loads", "sentence")}
    assert not wrong


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"])
def test_the_files_beside_a_tokenizer_are_named_with_their_folder(tmp_path: Path, name: str) -> None:
    for number, (said, make) in enumerate(
        (
            ("is not a tokenizer file: it is a named pipe", os.mkfifo),
            ("is not a tokenizer file: it is a device", lambda path: path.symlink_to("/dev/zero")),
            (
                "is nested too deeply|is not UTF-8 at byte 6",
                lambda path: path.write_bytes(b'{"a": \xff' + b"[" * 200_000),
            ),
        )
    ):
        folder = tmp_path / str(number)
        write(folder, byte_level_config())
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        with pytest.raises(DataError, match=f"^{re.escape(str(folder / name))}: (is not valid JSON|{said})"):
            assert load_tokenizer(str(folder)).chat_template is None


def test_a_tokenizer_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(UsageError, match="is not a regular file"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_some_hostile_files_give_a_sentence_for_a_whole_run_and_leave_no_directory(tmp_path: Path) -> None:
    names = {"EOS with another id", "an empty Replace", "charsmap points outside", "id -1", "a catastrophic Split"}
    files = [hostile for hostile in written_configs() if hostile.name in names]
    assert len(files) == len(names)
    assert {outcome.kind for outcome in try_all(files, tmp_path)} == {"sentence"}


def test_an_id_that_the_library_ignores_is_refused_with_the_id_that_it_gives(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'<\|x\|>' the id 5, and the tokenizers library 0"):
        tokenize(tmp_path, changed("EOS with another id"))
    assert not (tmp_path / "store").exists()


def test_an_added_token_that_continues_the_vocabulary_has_the_id_of_the_library(tmp_path: Path) -> None:
    config = byte_level_config()
    config["added_tokens"].append(added("<|y|>", len(config["model"]["vocab"]), special=True))
    config["pre_tokenizer"] = split("a+| ?[^ a]+| +")
    tokenizer = load_tokenizer(write(tmp_path / "own", config))
    assert choose(tokenizer).engine == "wordcache"
    number = tokenizer.special_tokens["<|y|>"]
    assert tokenizer.open_library().token_id("<|y|>", number) == number


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("a first token in no vocabulary", "adds '<nowhere>', which is not in the vocabulary"),
        ("a first token with another id", r"gives '<\|x\|>' the id 9, and the vocabulary 0"),
        ("id 2^31", "gives 'a' the id 2147483648; expected a whole number from 0 to 2,147,483,647"),
        ("an id twice", "gives the id 6 to both"),
        ("dropout 0.5", "has dropout 0.5, so a text has other ids each time"),
        ("a Replace by a megabyte", "can make a text 1,000,000 times as long"),
        ("ten Replaces by ten", "can make a text 10,000,000,000 times as long"),
        ("a million added tokens", "has 1,000,001 added tokens"),
        ("a catastrophic Split", r"pattern '\(a\+\)\+\$\|\( \+\)\+\$' backtracks without end"),
    ],
)
def test_what_is_wrong_is_in_the_sentence(tmp_path: Path, change: str, said: str) -> None:
    started = time.monotonic()
    with pytest.raises(DataError, match=said) as refused:
        choose(load_tokenizer(write(tmp_path / "own", changed(change), bos_token="<|x|>", eos_token="<|x|>")))
    assert str(tmp_path / "own" / "tokenizer.json") in str(refused.value)
    assert time.monotonic() - started < 10


def test_a_largest_id_that_fits_is_stored(tmp_path: Path) -> None:
    config = byte_level_config(split("a+| ?[^ a]+| +"))
    config["model"]["vocab"]["a"] = (1 << 31) - 1
    config["added_tokens"][0]["id"] = 0
    store = tokenize(tmp_path, config, ("b a",))
    assert (1 << 31) - 1 in store.document(0).tolist()


def test_a_pattern_that_fails_only_on_some_texts_ends_the_run_in_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = byte_level_config(split("(q+)+$|."))
    with pytest.raises(DataError, match=r"tokenizer.json: cannot encode a text: Onig"):
        tokenize(tmp_path, config, ("fine", "q" * 60 + "!"))
    assert capfd.readouterr().err == ""


def test_a_tokenizer_that_lacks_a_token_is_used_for_texts_that_do_not_need_it(tmp_path: Path) -> None:
    config = byte_level_config()
    CHANGES["Unigram without an unknown piece"](config)
    config["pre_tokenizer"] = None
    store = tokenize(tmp_path, config, ("aa",))
    assert store.document(0).tolist() == [2, 2, [piece for piece, _ in PIECES].index("<|x|>")]


def test_verify_names_a_tokenizer_that_is_no_function(tmp_path: Path) -> None:
    from tokenmill.store.manifest import read_manifest
    from tokenmill.tools.verify import _check_tokenizer

    tokenize(tmp_path, byte_level_config())
    path = tmp_path / "store" / "tokenizer" / "tokenizer.json"
    config = json.loads(path.read_text())
    config["model"]["dropout"] = 0.5
    path.write_text(json.dumps(config))
    # An earlier version may have made such a store, with the right hash of this file.
    problems = list(_check_tokenizer(tmp_path / "store", read_manifest(tmp_path / "store")))
    assert "dropout 0.5" in problems[0]


def test_special_tokens_of_a_description_may_not_have_the_rank_of_another_token(tmp_path: Path) -> None:
    (tmp_path / "own.tiktoken").write_bytes(ranks())
    (tmp_path / "tiktoken.json").write_text(json.dumps(description(special_tokens={"<|endoftext|>": 5})))
    with pytest.raises(DataError, match=r"has a token of rank 5, which tiktoken.json gives to '<\|endoftext\|>'"):
        load_tokenizer(str(tmp_path / "own.tiktoken"))


def test_what_a_library_prints_is_dropped_only_if_it_fails(capfd: pytest.CaptureFixture[str]) -> None:
    class PanicException(BaseException):
        """Named like those of Rust libraries."""

    with guarded("x.json"):
        os.write(2, b"a warning\n")

    def panic() -> None:
        with guarded("x.json"):
            os.write(2, b"thread panicked\n")
            raise PanicException("index out of\nbounds")

    with pytest.raises(PanicError, match=re.escape("x.json: cannot be loaded: index out of bounds")):
        panic()
    with pytest.raises(KeyboardInterrupt), guarded("x.json"):
        raise KeyboardInterrupt
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "a warning\nafter\n"


def test_the_redirection_ends_with_the_last_of_several_calls(capfd: pytest.CaptureFixture[str]) -> None:
    with guarded("outer"):
        with guarded("inner"):
            pass
        os.write(2, b"held back\n")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "held back\n"


MESSAGE_DURING_A_CALL = """
import os, sys, threading
from tokenmill.cli._output import fail
from tokenmill.engines._guard import guarded
from tokenmill.program import open_standard_streams

if sys.argv[1] == "command line":
    open_standard_streams()
is_inside, may_end = threading.Event(), threading.Event()

def call() -> None:
    with guarded("x.json"):
        is_inside.set()
        may_end.wait()

threading.Thread(target=call, daemon=True).start()
is_inside.wait()
fail("the disk is full")
"""


@pytest.mark.parametrize("program", ["command line", "a script"])
def test_messages_are_printed_while_another_thread_is_in_a_library(program: str) -> None:
    ended = subprocess.run([sys.executable, "-c", MESSAGE_DURING_A_CALL, program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "error: the disk is full\n")
