"""Fixtures that tests share: text of many scripts, a tokenizer trained on it, and small stores.

None of them needs a network or `../shared`. Tests of real corpora use `shared_data` and are skipped without it.
Workers of pytest-xdist share one copy of the tokenizer, the corpus and the store: tests must not change them.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.object_server import faulty, s3, s3_server  # noqa: F401
from tests.support.program import Program
from tests.support.warm_python import shared_warm_python
from tokenmill.executors import local
from tokenmill.filling import kernels
from tokenmill.store.store import TokenStore

os.environ["TOKENMILL_CACHE"] = tempfile.mkdtemp(prefix="tokenmill-cache-")
atexit.register(shutil.rmtree, os.environ["TOKENMILL_CACHE"], ignore_errors=True)

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

TEXT = (
    "the mill grinds every token of a text into flour and nothing is lost between stone and wheel "
    "don't we'll they've it's I'd 3.14 1,000,000 2024-05-17 x86_64 foo_bar() {} [] => != \\n "
    "größer Straße naïve façade Ελλάδα μύλος ποταμός мельница река зерно хлеб שלום עולם مطحنة قمح "
    "चक्की नदी आटा 水車 小麦 製粉所 方舟 제분소 물레방아 ไทย ภาษา 😀 👩‍👩‍👧 🇺🇳 ① ½ e\u0301 A\u030a \u200b"
)
WORDS = TEXT.split(" ")
SPACES = (" ", " ", " ", " ", " ", "  ", "\n", "\n\n", "\t", " ... ", ", ")


def make_texts(count: int, seed: int = 0, *, longest: int = 120) -> list[str]:
    """Make documents of several scripts, equal for equal arguments; some are empty, some are one word."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        size = min(longest, int(rng.paretovariate(0.7) * 4) - 4)
        texts.append("".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(size)))
    return texts


def write_jsonl(path: Path, texts: Iterable[str], **extra: Any) -> Path:
    """Write JSON lines; an extra field is one value for all documents, or a list with one for each."""
    lines = []
    for number, text in enumerate(texts):
        fields = {key: value[number] if isinstance(value, list) else value for key, value in extra.items()}
        lines.append(json.dumps({"text": text, **fields}, ensure_ascii=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), "utf-8")
    return path


@pytest.fixture(scope="session", autouse=True)
def warm_fork_servers() -> Iterator[None]:
    """Let executors of the tests' own process fork their fork server too; programs that tests start are not touched."""
    with mock.patch.object(local, "PYTHON", str(shared_warm_python().folder / "python")):
        yield


@pytest.fixture(autouse=True)
def end_programs() -> Iterator[None]:
    """Let no process outlive its test, so that a failed test does not disturb later ones."""
    yield
    Program.end_all()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real corpora and tokenizers."""
    if not SHARED_DATA.is_dir():
        pytest.skip("there is no ../shared/data")
    return SHARED_DATA


def build_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """Return a folder that one worker of the session builds, while the others wait for it."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = Path(f"{folder}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            build(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a byte-level BPE tokenizer with 600 tokens, EOS `<|endoftext|>`."""
    if made := os.environ.get("TOKENMILL_TEST_TOKENIZERS"):
        return Path(made) / "tiny"
    return build_once(tmp_path_factory, "tokenizers/tiny", _train_tokenizer)


def _train_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|begin|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(make_texts(400, seed=7), trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin|>", "eos_token": "<|endoftext|>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two files of JSON lines, 300 documents; the second has two bad lines."""
    return build_once(tmp_path_factory, "corpus", _write_corpus)


def _write_corpus(folder: Path) -> None:
    texts = make_texts(300, seed=1)
    write_jsonl(folder / "a.jsonl", texts[:200], id=[f"a{number}" for number in range(200)])
    path = write_jsonl(folder / "b.jsonl", texts[200:], id=[f"b{number}" for number in range(100)])
    lines = path.read_text("utf-8").split("\n")
    path.write_text("\n".join([*lines[:50], "{not json", '{"id": "no text"}', *lines[50:]]), "utf-8")


@pytest.fixture(scope="session")
def _pristine_store(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, tiny_tokenizer: Path) -> Path:
    from tokenmill.pipeline.tokenize_any import tokenize

    def build(out: Path) -> None:
        tokenize(
            str(tiny_corpus),
            out,
            tokenizer=str(tiny_tokenizer),
            keep_keys=["id"],
            val_fraction=0.2,
            task_bytes=20_000,
            on_error="skip",
            workers=1,
        )

    return build_once(tmp_path_factory, "stores/tiny", build)


@pytest.fixture
def tiny_store(_pristine_store: Path, tmp_path: Path) -> Path:
    """A copy of a store of `tiny_corpus` that a test may damage: two splits, several shards, two rejects."""
    return Path(shutil.copytree(_pristine_store, tmp_path / "store"))


@pytest.fixture(scope="session")
def open_tiny_store(_pristine_store: Path) -> Callable[[], TokenStore]:
    """A function that opens the store of `tiny_store` without a copy, for tests that only read it."""
    return lambda: TokenStore(_pristine_store)


@pytest.fixture(params=["compiled", "numpy"])
def inner_loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test twice: with the loops in C, and with NumPy."""
    if request.param == "numpy":
        monkeypatch.setattr(kernels, "compiled", None)
    elif kernels.compiled is None:
        pytest.skip("the inner loops were not compiled")
    return str(request.param)
