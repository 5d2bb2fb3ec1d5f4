"""Wrong arguments are refused with one sentence, and never with a traceback of tokenmill."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.support.in_process import tokenmill_here
from tests.support.running import sentence
from tests.support.stores import collect, make_documents, make_store
from tokenmill.errors import StoreError, TokenmillError, UsageError
from tokenmill.tools.trace import trace_document, trace_step

HUGE = 10**30
MONSTER = 10**5000
"""Python refuses to print a number with this many digits."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes") / "store"
    documents = make_documents(200)
    return make_store(folder, documents, val=documents[:40])


@pytest.fixture(scope="module")
def store(path: Path) -> Any:
    return tm.open(path)


@pytest.fixture(scope="module")
def rows(store: Any) -> tm.Rows:
    return tm.pack(store, seq_len=8)


def refusal(call: Callable[[], Any]) -> str:
    """Return the message of the error that a call raises: one line, not too long."""
    with pytest.raises(TokenmillError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert 10 < len(message) < 500
    return message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, r"5 \(int\) is not the path of a store"),
        (None, r"None \(NoneType\) is not the path of a store"),
        (b"data", r"b'data' \(bytes\) is not the path of a store"),
        ("", "'' is not the path of a store"),
        ("a\0b", r"'a\\x00b' is not the path of a store or of tokens, .*: no file can have this name"),
        ([5], r"5 \(int\) is not the path"),
        ([["a"]], r"\['a'\] \(list\) is not the path"),
        ([], "the list of stores is empty"),
    ],
)
def test_a_value_that_is_not_a_path_is_refused(value: Any, message: str) -> None:
    for call in (lambda: tm.open(value), lambda: tm.load(value, seq_len=8, batch_size=2)):
        with pytest.raises(UsageError, match=message):
            call()
    if not isinstance(value, list):
        with pytest.raises(UsageError, match="is not the path of a store"):
            tm.TokenStore(value)


def test_an_open_store_cannot_be_opened_again(store: Any, rows: tm.Rows) -> None:
    for value in (store, [store], store.split(), [store.split()], rows):
        assert "is not the path of a store" in refusal(lambda value=value: tm.open(value))


def test_pack_shuffle_and_the_loader_say_what_they_need(path: Path, store: Any, rows: tm.Rows) -> None:
    for wrong in (5, None, str(path), path, [store], rows):
        assert refusal(lambda wrong=wrong: tm.pack(wrong, seq_len=8)).startswith("pack needs a store or documents")
        assert refusal(lambda wrong=wrong: tm.deny(wrong, [1])).startswith("deny needs a store or documents")
    assert "packed already" in refusal(lambda: tm.pack(rows, seq_len=8))
    assert "open it first: tm.open(path)" in refusal(lambda: tm.pack(str(path), seq_len=8))
    for wrong in (5, None, str(path), [rows], store, store.split()):
        assert refusal(lambda wrong=wrong: tm.shuffle(wrong)).startswith("shuffle needs rows, not ")
        assert refusal(lambda wrong=wrong: tm.Loader(wrong, batch_size=2)).startswith("Loader needs rows, not ")
    assert "pack them first: tm.pack(store, seq_len=...)" in refusal(lambda: tm.shuffle(store))
    assert "tm.pack(tm.open(path), seq_len=...)" in refusal(lambda: tm.shuffle(str(path)))
    for wrong in (5, None, str(path)):
        for verb, call in (
            ("take", lambda wrong=wrong: tm.take(wrong, 3)),
            ("skip", lambda wrong=wrong: tm.skip(wrong, 3)),
            ("slice", lambda wrong=wrong: tm.slice(wrong, 0, 3)),
        ):
            assert refusal(call).startswith(f"{verb} needs rows")


NUMBERS: list[Any] = ["3", 1.5, True, None, [1], HUGE, -HUGE, MONSTER, -MONSTER, float("nan"), np.array([1, 2])]


@pytest.mark.parametrize("wrong", NUMBERS, ids=lambda value: f"{type(value).__name__}")
def test_numbers_are_checked_everywhere(store: Any, rows: tm.Rows, wrong: Any) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "seq_len": lambda: tm.pack(store, seq_len=wrong),
        "seed": lambda: tm.shuffle(rows, seed=wrong),
        "batch_size": lambda: tm.Loader(rows, batch_size=wrong),
        "prefetch": lambda: tm.Loader(rows, batch_size=2, prefetch=wrong if wrong is not None else "x"),
        "row": lambda: tm.Loader(rows, batch_size=2).seek(wrong),
        "document": lambda: store.document(wrong),
        "start": lambda: store.read(wrong, 5),
        "stop": lambda: store.read(0, wrong),
        "take": lambda: tm.take(rows, wrong),
        "skip": lambda: tm.skip(store, wrong),
        "slice": lambda: tm.slice(rows, wrong, wrong),
        "deny": lambda: tm.deny(store, [0, wrong]),
        "rows[]": lambda: rows[wrong],
        "step": lambda: trace_step(rows, wrong, batch_size=2),
        "sizes": lambda: trace_step(rows, 0, batch_size=2, world_size=wrong if wrong is not None else 0),
        "traced": lambda: trace_document(rows, wrong, batch_size=2),
        "leaf": lambda: trace_document(rows, 0, batch_size=2, leaf=wrong if wrong is not None else 3),
    }
    if not isinstance(wrong, (type(None),)):
        calls["vocab_size"] = lambda: tm.load(store, seq_len=8, batch_size=2, vocab_size=wrong)
        calls["rank"] = lambda: tm.Loader(rows, batch_size=2, rank=wrong, world_size=2)
        calls["world_size"] = lambda: tm.Loader(rows, batch_size=2, rank=0, world_size=wrong)
    for name, call in calls.items():
        # A large number of room for ids, of tokens in a row that pad fills, or of documents is refused for being large.
        assert refusal(call), name


def test_numpy_numbers_are_accepted(store: Any) -> None:
    assert store.read(np.int32(0), np.int32(5)).tolist() == store.read(0, 5).tolist()
    assert store.document(np.uint8(3)).tolist() == store.document(3).tolist()
    assert tm.deny(store, np.array([1, 2], np.uint16)).num_documents == 198
    rows = tm.shuffle(tm.pack(store, seq_len=np.int16(8)), seed=np.int64(3))
    assert rows[np.int64(3)].tolist() == rows[3].tolist()
    loader = tm.Loader(rows, batch_size=np.int8(2), rank=np.int64(0), world_size=np.int32(1), document_mask=np.True_)
    assert len(tm.Loader(rows, batch_size=2, epochs=np.float32(1.5))) == -(-int(1.5 * len(rows)) // 2)
    json.dumps(loader.state_dict())


def test_rows_are_asked_for_one_by_one(rows: tm.Rows) -> None:
    assert "use tm.slice(rows, start, stop)" in refusal(lambda: rows[1:3])  # type: ignore[index]
    assert "row -1 does not exist; rows are counted from 0" in refusal(lambda: rows[-1])
    with pytest.raises(IndexError):
        rows[-1]
    bounded = tm.mix([(rows, 1.0)], max_epochs=1, on_exhausted="stop")
    assert f"row {len(rows)} does not exist; rows are 0 to {len(rows) - 1}" in refusal(lambda: bounded[len(rows)])


def test_denied_documents_are_numbers_of_documents(store: Any) -> None:
    for wrong, message in (
        ([1.5], "document 1.5 must be a whole number"),
        (["12"], "document '12' must be a whole number"),
        ("12", "document '1' must be a whole number"),
        ([True], "document True must be a whole number"),
        ([200], "document 200 is not in .*, which has 200, from 0 on"),
        ([-1], "document -1 is not in"),
        (5, "5 is not a list of document numbers"),
        (None, "None is not a list of document numbers"),
        (np.array([1.0]), r"document np.float64\(1.0\) must be a whole number"),
    ):
        with pytest.raises(UsageError, match=message):
            tm.deny(store, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": []}, r"layout \[\] is unknown; expected xy, hf"),
        ({"dtype": "nope"}, "dtype 'nope' is no type of numpy; expected int64 or int32"),
        ({"dtype": None}, "dtype None cannot hold every id"),
        ({"dtype": "uint8"}, "dtype uint8 cannot hold every id"),
        ({"dtype": float}, "dtype float64 cannot hold every id"),
        ({"epochs": [1]}, r"epochs \[1\] must be a number above 0"),
        ({"epochs": 1j}, "epochs 1j must be a number above 0"),
        ({"epochs": True}, "epochs True must be a number above 0"),
        ({"epochs": float("nan")}, "epochs nan must be a number above 0"),
        ({"epochs": 1e300}, r"epochs 1e\+300 must be a number above 0, at most"),
        ({"epochs": MONSTER}, "epochs a very large int must be a number above 0, at most"),
        ({"document_mask": np.ones(3)}, r"document_mask array\(\[1., 1., 1.\]\) must be True or False"),
        ({"document_mask": "no"}, "document_mask 'no' must be True or False"),
        ({"drop_last": 1}, "drop_last 1 must be True or False"),
        ({"batch_size": HUGE}, "batch_size 1000000000000000000000000000000 must be a whole number, at most"),
        ({"rank": 0, "world_size": HUGE}, "world_size 1000000000000000000000000000000 must be a whole number, at most"),
    ],
)
def test_settings_of_a_loader(rows: tm.Rows, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tm.Loader(rows, **{"batch_size": 2, **settings})


def test_settings_of_load(path: Path) -> None:
    for settings, message in (
        ({"framework": []}, r"framework \[\] is unknown; expected numpy, torch"),
        (
            {"bogus": 1},
            "'bogus' is no setting of framework 'numpy'; there are align, .*batch_size, .*packing.*world_size",
        ),
        ({"device": "cpu"}, "'device' is no setting of framework 'numpy'; there are"),
        ({"vocab_size": "a"}, "vocab_size 'a' must be a whole number, at least 1"),
        ({"vocab_size": 0}, "vocab_size 0 must be a whole number, at least 1"),
        ({"split": []}, r"has no split \[\]; it has train, val"),
        ({"packing": []}, r"packing \[\] is unknown; expected concat, best-fit, pad"),
        ({"long_documents": 3}, "long_documents 3 is unknown; expected split, truncate, drop"),
        ({"shuffle": "yes"}, "shuffle 'yes' must be True, False or 'blocks'"),
        ({"seq_len": "8"}, "seq_len '8' must be a whole number"),
        ({"batch_size": None}, "load needs a batch_size"),
        ({"batch_size": None, "batch_sise": 8}, "in a batch of one rank; there is no setting 'batch_sise'"),
    ):
        with pytest.raises(UsageError, match=message):
            tm.load(path, **{"seq_len": 8, "batch_size": 2, **settings})


def test_seq_len_and_batch_size_may_be_given_by_position(path: Path) -> None:
    ((x, _),) = collect(tm.load(path, 16, 4), 1)
    assert x.shape == (4, 16)
    assert (x == collect(tm.load(path, batch_size=4, seq_len=16), 1)[0][0]).all()


def test_settings_without_effect_on_rows_or_documents_are_refused_by_name(store: Any, rows: tm.Rows) -> None:
    for settings in (
        {"split": "train"},
        {"seed": 0},
        {"shuffle": True},
        {"shuffle": False},
        {"packing": "concat"},
        {"long_documents": "split"},
    ):
        ((name, value),) = settings.items()
        message = f"{name}={value!r} has no effect: the rows are made already; leave it out"
        assert refusal(lambda s=settings: tm.load(rows, batch_size=2, **s)) == message
    said = refusal(lambda: tm.load(store.split("val"), 8, 2, split="train"))
    assert said.startswith("split='train' has no effect: store/val are documents already")
    assert "seq_len '8' must be a whole number" in refusal(lambda: tm.load(rows, batch_size=2, seq_len="8"))  # type: ignore[arg-type]


def test_the_vocabulary_size_is_compared_if_it_is_known(path: Path, store: Any, rows: tm.Rows) -> None:
    joined = tm.open([path, path])
    mixture = tm.mix([(tm.shuffle(rows), 1.0), (tm.pack(tm.deny(store, [3]), seq_len=8), 1.0)])
    for source in (path, [path], store, store.split("val"), tm.take(store, 9), tm.deny(store, [1]), joined.split()):
        assert "has a vocabulary of 65536 tokens and the model has room for 50257" in refusal(
            lambda source=source: tm.load(source, 8, 2, vocab_size=50257)
        )
        tm.load(source, 8, 2, vocab_size=65536)
    for made in (rows, tm.take(rows, 5), mixture):
        assert "room for 50257" in refusal(lambda made=made: tm.load(made, batch_size=2, vocab_size=50257))
        tm.load(made, batch_size=2, vocab_size=np.int64(65536))


def test_decoding_takes_ids_of_one_text(tiny_store: Path) -> None:
    store = tm.open(tiny_store)
    ids = store.document(3)
    assert store.decode(ids.tolist()) == store.decode(ids) == store.decode(ids.astype(np.int64))
    assert store.decode([]) == ""
    for wrong, message in (
        ([5, -100], "id -100 is not in the vocabulary of 600 tokens; leave out targets that have no loss"),
        (np.array([600]), "id 600 is not in the vocabulary of 600 tokens"),
        ([HUGE], "is not a list of ids"),
        (np.zeros((2, 3), int), "is not a list of ids"),
        ([[1], [2, 3]], "is not a list of ids"),
        ("text", "'text' is not a list of ids"),
        ([1.5], r"\[1.5\] is not a list of ids"),
        (5, "5 is not a list of ids"),
        (None, "None is not a list of ids"),
    ):
        with pytest.raises(UsageError, match=message):
            store.decode(wrong)


def test_a_store_without_its_tokenizer_says_so(tiny_store: Path) -> None:
    (tiny_store / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(StoreError, match="tokenizer is damaged .*; restore it"):
        tm.open(tiny_store).decode([1])
    (tiny_store / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(StoreError, match="tokenizer is missing or has no tokenizer in it; restore it"):
        tm.open(tiny_store).decode([1])


def test_tracing_in_python(rows: tm.Rows, store: Any) -> None:
    for call, message in (
        (lambda: trace_step(rows, 1.5, batch_size=2), "step 1.5 must be a whole number"),  # type: ignore[arg-type]
        (lambda: trace_step(store, 1, batch_size=2), "trace_step needs rows"),
        (lambda: trace_step(rows, 1 << 62, batch_size=2), "step 4611686018427387904 does not exist; expected 0 to"),
        (lambda: trace_step(rows, 1, batch_size=1 << 40), "has too many rows to list"),
        (lambda: trace_document(rows, 0, batch_size=2, leaf=3), "leaf 3 must be a whole number, at most 0"),
        (lambda: trace_document(rows, 0, batch_size=0), "batch_size 0 must be a whole number, at least 1"),
        (lambda: trace_document(rows, 0, batch_size=2, epochs=1e12), r"epochs 1000000000000.0 .* at most 10000"),
        (lambda: trace_document(rows, 200, batch_size=2), "document 200 is not in"),
    ):
        assert message.partition(" .* ")[0] in refusal(call)
    bounded = tm.mix([(rows, 1.0)], max_epochs=1, on_exhausted="stop")
    last = -(-len(rows) // 2) - 1
    assert trace_step(bounded, last, batch_size=2).step == last
    assert f"expected 0 to {last}" in refusal(lambda: trace_step(bounded, last + 1, batch_size=2))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step", str(HUGE)], "step 1000000000000000000000000000000 must be a whole number"),
        (["--step", str(1 << 62)], "step 4611686018427387904 does not exist"),
        (["--step", "0", "--batch-size", "0"], "batch_size 0 must be a whole number, at least 1"),
        (["--step", "0", "--batch-size", "-3"], "batch_size -3 must be a whole number, at least 1"),
        (["--step", "0", "--world-size", "-1"], "world_size -1 must be a whole number, at least 1"),
        (["--document", "0", "--batch-size", "0"], "batch_size 0 must be a whole number, at least 1"),
        (["--document", "0", "--epochs", "nan"], "epochs nan must be a number above 0"),
        (["--document", "0", "--epochs", "inf"], "epochs inf must be a number above 0"),
        (["--document", "0", "--epochs", "1e12"], "epochs 1000000000000.0 must be a number above 0, at most 10000"),
        (["--document", "0", "--epochs", "0"], "epochs 0.0 must be a number above 0"),
        (["--document", "0", "--epochs", "-1"], "epochs -1.0 must be a number above 0"),
        (["--document", "-1"], "document -1 is not in"),
        (["--step", "0", "--seed", str(HUGE)], "seed 1000000000000000000000000000000 must be a whole number"),
    ],
)
def test_tracing_on_the_command_line(path: Path, flags: list[str], message: str) -> None:
    done = tokenmill_here("trace", path, "--seq-len", "8", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {message}")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["tokenize", "{store}/manifest.json", "--tokenizer", "bytes", "-o", "S3://bucket/x"],
        ["train-tokenizer", "{store}/manifest.json", "--vocab-size", "300", "-o", "s3://bucket/x"],
        ["export", "{store}", "s3://bucket/x", "--to", "megatron"],
        ["report", "{store}", "-o", "s3://bucket/x.html"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_urls_that_are_not_written_to_make_no_folder(path: Path, tmp_path: Path, arguments: list[str]) -> None:
    done = tokenmill_here(*(argument.format(store=path) for argument in arguments), cwd=tmp_path)
    assert "3:// is not written to; expected a path" in sentence(done)
    assert not list(tmp_path.iterdir())
