"""The JAX trainer: the same rows on any devices and with any loader, exact resuming, and settings that are checked."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

import tokenmill as tm
from tests.conftest import make_texts, write_jsonl
from tests.examples.trainers import EXAMPLES, load_example, read_log
from tests.support.program import Program
from tests.support.running import tokenize_here, wait_for

jax = pytest.importorskip("jax")
pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

STEPS = 40
QUICKLY = {"xla_backend_optimization_level": 0}
"""Programs that are hardly optimized compile in a sixth of the time."""
PROGRAM = f"""
import functools, runpy, sys
import optax, orbax.checkpoint
import jax
jax.jit = functools.partial(jax.jit, compiler_options={QUICKLY})
sys.path.insert(0, {str(EXAMPLES)!r})
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""The trainer in a new process, with the options of this one, so that they share compiled programs."""
TOY: dict[str, dict[str, Any]] = {
    "model_config": {"num_layers": 2, "num_heads": 2, "width": 32, "mlp_width": 64},
    "data_config": {"loader": "tokenmill", "batch_size": 4, "seq_len": 64},
    "train_config": {
        "steps": STEPS,
        "learning_rate": 0.01,
        "warmup_steps": 5,
        "log_every": 8,
        "table_every": 20,
        "validate_every": 20,
        "validation_batches": 3,
        "checkpoint_every": 16,
    },
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store and a file of settings."""
    home = tmp_path_factory.mktemp("jax")
    corpus = write_jsonl(home / "corpus.jsonl", make_texts(400, seed=3))
    store = tokenize_here(corpus, home / "store", tokenizer="bytes", val_fraction=0.1)
    assert store.split("train").num_tokens > STEPS * 4 * 64
    toy = {**TOY, "data_config": {**TOY["data_config"], "dataset_name": str(home / "store")}}
    (home / "toy.yaml").write_text(yaml.safe_dump(toy))
    return home


@pytest.fixture(scope="module")
def train_jax(home: Path) -> Iterator[ModuleType]:
    """The trainer in this process, with programs that compile quickly and are kept from one run to the next."""
    sys.path.insert(0, str(EXAMPLES))
    module = load_example("train_jax")
    options = {"jax_compilation_cache_dir": str(home / "programs"), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=QUICKLY))
        for name, value in options.items():
            jax.config.update(name, value)
        yield module
    for name, value in before.items():
        jax.config.update(name, value)
    sys.path.remove(str(EXAMPLES))


class Trainer:
    """Runs of the trainer in a folder of their own."""

    def __init__(self, module: ModuleType, home: Path, folder: Path) -> None:
        self.module = module
        self.home = home
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        self.output = ""

    def arguments(self, *changes: str) -> list[str]:
        """The command line of a run with some settings changed."""
        ours = [f"train_config.{name}={self.folder / name}" for name in ("checkpoint_path", "loss_log", "batch_log")]
        sets = [part for change in (*ours, *changes) for part in ("--set", change)]
        return [str(EXAMPLES / "train_jax.py"), "--config", str(self.home / "toy.yaml"), *sets]

    def run(self, capsys: pytest.CaptureFixture[str], *changes: str, without: tuple[str, ...] = ()) -> str:
        """Run to the end in this process, as if some packages were missing; return the standard output."""
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", self.arguments(*changes))
            for package in without:
                patch.setitem(sys.modules, package, None)
                patch.delitem(sys.modules, f"tokenmill.loaders.{LOADERS[package]}", raising=False)
            self.module.main()
        self.output = capsys.readouterr().out
        return self.output

    def start(self, *changes: str, num_devices: int = 1, **env: Any) -> Any:
        """Start a run in a process of its own."""
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}"} if num_devices > 1 else {}
        settings = {
            **flags,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.home / "programs"),
            "JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        return Program(
            [sys.executable, "-c", PROGRAM, *self.arguments(*changes)],
            env={**os.environ, **settings, **{name: str(value) for name, value in env.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run_two(self, *changes: str, kill: bool = False) -> list[str]:
        """Run as two processes; with `kill`, until the first checkpoint is there."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        names = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": 2}
        both = [self.start("data_config.batch_size=2", *changes, JAX_PROCESS_ID=n, **names) for n in range(2)]
        if kill:
            kill_later(both, lambda: self.checkpoints(), 0)
            return []
        done = [finish(process) for process in both]
        assert [code for _, _, code in done] == [0, 0], done
        return [output for output, _, _ in done]

    def checkpoints(self) -> list[int]:
        """The steps of whole checkpoints."""
        folders = (self.folder / "checkpoint_path").glob("*")
        return sorted(int(folder.name) for folder in folders if folder.name.isdecimal())

    def read(self, name: str) -> dict[int, str]:
        """Read a log."""
        return read_log(self.folder / name)

    @property
    def losses(self) -> list[float]:
        written = self.read("loss_log")
        assert list(written) == list(range(1, len(written) + 1))
        return [float(value) for value in written.values()]


LOADERS = {"grain": "grain", "tensorflow": "tf"}


def finish(process: Any) -> tuple[str, str, int]:
    """Return output, errors and exit code of a run, without what Gloo prints about itself."""
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    return output, re.sub(r"(?m)^\[Gloo\].*\n", "", errors), process.returncode


def kill_later(processes: list[Any], condition: Any, seconds: float) -> None:
    """Kill processes some time after something is true; fail if they ended before."""
    try:
        wait_for(condition, 100)
        time.sleep(seconds)
        assert [process.poll() for process in processes] == [None] * len(processes)
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=20)


@pytest.fixture
def trainer(train_jax: ModuleType, home: Path, tmp_path: Path) -> Trainer:
    return Trainer(train_jax, home, tmp_path / "run")


@pytest.fixture(scope="module")
def finished(train_jax: ModuleType, home: Path) -> Trainer:
    return Trainer(train_jax, home, home / "whole")


@pytest.fixture
def whole(finished: Trainer, capsys: pytest.CaptureFixture[str]) -> Trainer:
    """A run from the first step to the last, which others are compared with; the first test that needs it starts it."""
    if not finished.output:
        finished.run(capsys)
    return finished


def test_a_run_learns_and_says_where_its_time_goes(whole: Trainer) -> None:
    losses, output = whole.losses, whole.output
    assert len(losses) == STEPS
    assert 5 < losses[0] < 6 and np.mean(losses[-5:]) < losses[0] - 0.7
    assert "cpu: devices 1, processes 1\n" in output
    assert f"step {STEPS} of {STEPS}: loss {np.mean(losses[-8:]):.4f}, " in output
    assert output.count(" tokens/s") == 5 + 3  # Every 8 steps, and in three tables.
    assert output.count("waits for data ") == 3
    validation = [line.split()[-1] for line in output.splitlines() if "validation loss" in line]
    assert len(validation) == 2 and float(validation[1]) < float(validation[0]) < 5.6
    assert whole.checkpoints() == [32, 40]


def test_the_batches_are_those_of_the_store(whole: Trainer) -> None:
    loader = tm.load(whole.home / "store", seq_len=64, batch_size=4, document_mask=True)
    assert whole.read("batch_log") == hash_batches(loader, STEPS)


def hash_batches(loader: Any, count: int) -> dict[int, str]:
    """The expected log of the first steps."""
    tokens = (batch.inputs.astype("<i4").tobytes() for batch in itertools.islice(loader, count))
    return {step: hashlib.sha256(part).hexdigest()[:16] for step, part in enumerate(tokens, 1)}


def test_losses_after_kills_at_random_moments_are_those_of_a_whole_run(
    whole: Trainer, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    often = ("train_config.checkpoint_every=2", "train_config.log_every=3")
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    for least in (2, 12):
        process = trainer.start(*often)
        kill_later([process], lambda least=least: max(trainer.checkpoints(), default=0) >= least, rng.uniform(0, 0.15))
    reached = max(trainer.checkpoints())
    assert 12 <= reached < STEPS
    assert f"resumed after step {reached}, from " in trainer.run(capsys, *often), f"seed {seed}"
    assert trainer.losses == whole.losses, f"seed {seed}"
    assert trainer.read("batch_log") == whole.read("batch_log")


def test_two_processes_see_the_same_rows_and_resume_after_a_kill(whole: Trainer, trainer: Trainer) -> None:
    often = ("train_config.checkpoint_every=4", "train_config.log_every=1", "train_config.validate_every=0")
    trainer.run_two(*often, kill=True)
    outputs = trainer.run_two(*often)
    assert "cpu: devices 2, processes 2\n" in outputs[0] and "resumed after step" in outputs[0]
    assert "step" not in outputs[1]
    assert trainer.read("batch_log") == whole.read("batch_log")
    assert np.abs(np.subtract(trainer.losses, whole.losses)).max() < 1e-3
    # The same place in training, whichever process wrote it.
    place = yaml.safe_load((trainer.folder / "checkpoint_path" / "40" / "data" / "metadata").read_text())
    assert (place["next_row"], place["batch_size"], place["world_size"]) == (160, 2, 2)


def test_two_devices_share_rows_and_parameters(whole: Trainer, trainer: Trainer) -> None:
    output, errors, code = finish(
        trainer.start("train_config.shard_parameters=true", "train_config.validate_every=0", num_devices=2)
    )
    assert (code, errors) == (0, ""), output + errors
    assert "cpu: devices 2, processes 1\n" in output
    assert trainer.read("batch_log") == whole.read("batch_log")
    assert np.abs(np.subtract(trainer.losses, whole.losses)).max() < 1e-3


def test_a_run_resumes_with_another_loader_and_other_devices(
    whole: Trainer, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Grain's workers and tf.data read ahead; what was trained on is what counts."""
    shutil.copytree(whole.folder / "checkpoint_path" / "32", trainer.folder / "checkpoint_path" / "32")
    half_written = trainer.folder / "checkpoint_path" / "36.orbax-checkpoint-tmp"
    shutil.copytree(whole.folder / "checkpoint_path" / "40", half_written)
    shutil.rmtree(half_written / "state" / "d")
    changes = ("data_config.loader=grain", "data_config.worker_count=2", "data_config.cache_size=100000")
    output = trainer.run(capsys, *changes)
    assert "resumed after step 32, from " in output and "loader grain: 4 rows" in output
    assert "data_config.cache_size has no effect" in output
    rest = {step: value for step, value in whole.read("batch_log").items() if step > 32}
    assert trainer.read("batch_log") == rest
    assert {step: float(loss) for step, loss in trainer.read("loss_log").items()} == {
        step: whole.losses[step - 1] for step in rest
    }
    assert trainer.checkpoints() == [32, 40] and not half_written.exists()


def test_without_grain_tf_data_gives_the_same_rows(
    whole: Trainer, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("data_config.loader=grain", "data_config.worker_count=1")
    output = trainer.run(capsys, *settings, without=("grain",))
    assert (
        "framework='grain' needs a package that is not installed: pip install 'tokenmill[jax]'; "
        "continuing with loader tf\nloader tf: 4 rows of 64 tokens a process\n"
        "data_config.worker_count has no effect: loader tf"
    ) in output
    assert trainer.losses == whole.losses
    assert trainer.read("batch_log") == whole.read("batch_log")


def test_without_grain_and_tensorflow_tokenmill_gives_the_same_rows(
    whole: Trainer, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    output = trainer.run(capsys, "data_config.loader=grain", without=("grain", "tensorflow"))
    assert "continuing with loader tf\n" in output and "pip install 'tokenmill[tf]'" in output
    assert "continuing with loader tokenmill\nloader tokenmill: 4 rows" in output
    assert trainer.losses == whole.losses


def test_raw_text_is_trained_on_while_it_is_tokenized(
    home: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (f"data_config.dataset_name={home / 'corpus.jsonl'}", "data_config.tokenizer_name=bytes")
    kept = ("data_config.val_fraction=0.2", "train_config.validate_every=9")
    output = trainer.run(capsys, *text, *kept, "data_config.loader=grain")
    assert "step 9: validation loss" in output
    assert (trainer.folder / "checkpoint_path-cache").is_dir()
    again = {"tokenizer": "bytes", "cache": trainer.folder / "again", "val_fraction": 0.2}
    loader = tm.load(home / "corpus.jsonl", 64, 4, **again)
    assert trainer.read("batch_log") == hash_batches(loader, STEPS)


@pytest.mark.parametrize("package", ["jax", "optax", "orbax.checkpoint"])
def test_a_missing_package_is_one_sentence_with_a_command(
    train_jax: ModuleType, package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_jax.py"])
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "train_jax", train_jax)
    with pytest.raises(SystemExit, match="1"):
        load_example("train_jax")
    needs = f"train_jax.py ({package}) needs a package that is not installed: pip install 'tokenmill[jax,examples]'"
    assert capsys.readouterr().err == f"error: {needs}\n"


# Settings


def fail_here(train_jax: ModuleType, home: Path, folder: Path, *changes: str, capsys: Any, monkeypatch: Any) -> str:
    """Return the error of a run that fails before its first step."""
    sets = [part for change in (f"train_config.checkpoint_path={folder}", *changes) for part in ("--set", change)]
    monkeypatch.setattr(sys, "argv", ["train_jax.py", "--config", str(home / "toy.yaml"), *sets])
    with pytest.raises(SystemExit) as ended:
        train_jax.main()
    assert ended.value.code in (1, 2)
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and errors.endswith("\n") and errors.count("\n") == 1
    return str(errors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data_config.loader=grains"], "data_config.loader 'grains' is unknown; expected grain, tf, tokenmill"),
        (
            ["data_config.bach_size=8"],
            "data_config has no 'bach_size'; did you mean batch_size? There are dataset_name,",
        ),
        (["data.batch_size=8"], "--set has no 'data'; did you mean data_config?"),
        (["data_config.batch_size"], "--set data_config.batch_size is not of the form section.key=value"),
        (["data_config.batch_size=0"], "data_config.batch_size 0 cannot be used: Expected `int` >= 1"),
        (["data_config.batch_size=four"], "data_config.batch_size 'four' cannot be used: Expected `int`"),
        (["data_config.worker_count=-1"], "data_config.worker_count -1 cannot be used: Expected `int` >= 0"),
        (["data_config.document_mask=1"], "data_config.document_mask 1 cannot be used: Expected `bool`"),
        (["data_config.packing=tight"], "'tight' is unknown; expected concat, best-fit, pad"),
        (
            ["data_config.dataset_name=[]"],
            "data_config.dataset_name [] cannot be used: Expected `array` of length >= 1",
        ),
        (["data_config.dataset_name=nowhere"], "nowhere does not exist; make a store with: tokenmill tokenize INPUT"),
        (["train_config.learning_rate=fast"], "train_config.learning_rate 'fast' cannot be used: Expected `float`"),
        (["train_config.seed={a"], "is not YAML"),
        (["model_config.width=33"], "model_config.width 33 must be a multiple of twice num_heads, 4"),
        (["model_config.compute_dtype=int8"], "compute_dtype 'int8' is unknown; expected auto, float32, bfloat16"),
        (["model_config.vocab_size=100"], "has a vocabulary of 258 tokens and the model has room for 100"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_a_sentence(
    train_jax: ModuleType, home: Path, tmp_path: Path, capsys: Any, monkeypatch: Any, changes: list[str], message: str
) -> None:
    assert message in fail_here(train_jax, home, tmp_path, *changes, capsys=capsys, monkeypatch=monkeypatch)


def test_a_checkpoint_of_another_model_or_other_data_is_refused(
    train_jax: ModuleType, whole: Trainer, capsys: Any, monkeypatch: Any
) -> None:
    folder = whole.folder / "checkpoint_path"
    for change, message in (
        ("model_config.mlp_width=96", "has a model with mlp_width 64, and this one has 96; make the model as it was"),
        ("data_config.document_mask=false", "has a model with document_mask True, and this one has False"),
        ("data_config.seq_len=32", "rows.seq_len is 64 in the state and 32 here"),
        ("data_config.seed=5", "seed is 0 in the state and 5 here"),
    ):
        assert message in fail_here(train_jax, whole.home, folder, change, capsys=capsys, monkeypatch=monkeypatch)


def test_a_file_of_settings_that_is_none_is_refused(train_jax: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    for text, message in (
        ("data_config: [1]", r"data_config holds \[1\]; expected keys and values, such as dataset_name"),
        ("7", "holds 7; expected keys and values, such as model_config, data_config, train_config"),
        ("dataconfig: {}", "has no 'dataconfig'; did you mean data_config?"),
        ("data_config: {a: [}", "is not YAML"),
    ):
        path.write_text(text)
        with pytest.raises(tm.UsageError, match=message):
            train_jax.read_settings(path, [])
    path.write_bytes(b"\xff")
    for wrong in (path, tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(tm.UsageError, match=f"{wrong} cannot be read: .*; pass --config FILE"):
            train_jax.read_settings(wrong, [])
    path.write_text("data_config:\ntrain_config: {learning_rate: 3e-4}\n")
    read = train_jax.read_settings(path, ["data_config.dataset_name=[a, b]", "data_config.tokenizer_name=null"])
    assert read.train_config.learning_rate == 3e-4
    assert read.data_config.dataset_name == ["a", "b"] and read.data_config.batch_size == 16


def test_the_guide_has_every_key() -> None:
    read = yaml.safe_load((EXAMPLES / "config.yaml").read_text())
    guide = (EXAMPLES.parent / "docs" / "train_jax.md").read_text()
    rows = [line.split("|")[1].strip() for line in guide.splitlines() if line.startswith("| `")]
    named = [name.strip("`") for row in rows for name in row.split(", ") if not name.endswith("_config`")]
    assert sorted(named) == sorted(key for section in read.values() for key in section)


# The model


def make_batch(tokens: list[list[int]], segments: list[list[int]], positions: list[list[int]]) -> dict[str, Any]:
    arrays = {"inputs": tokens, "targets": tokens, "inputs_segmentation": segments, "inputs_position": positions}
    batch = {name: np.array(array, np.int32) for name, array in arrays.items()}
    return {**batch, "targets_segmentation": batch["inputs_segmentation"]}


def test_losses_stay_on_the_device_until_a_line_or_a_checkpoint_is_due(
    trainer: Trainer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[list[int]] = []
    get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda losses: reads.append(list(losses)) or get(losses))
    changes = ("log_every=12", "checkpoint_every=16", "validate_every=0")
    output = trainer.run(capsys, *(f"train_config.{change}" for change in changes))
    ends = [12, 16, 24, 32, 36, 40]
    assert reads == [list(range(start + 1, end + 1)) for start, end in itertools.pairwise([0, *ends])]
    assert f"step 24 of 40: loss {np.mean(trainer.losses[12:24]):.4f}, " in output


@pytest.fixture(scope="module")
def model(train_jax: ModuleType) -> Any:
    """A small model with large weights, so that attention changes the output."""
    defaults = yaml.safe_load((EXAMPLES / "config.yaml").read_text())["model_config"]
    config = SimpleNamespace(**{**defaults, "num_layers": 2, "num_heads": 2, "width": 16, "mlp_width": 32})
    shapes = jax.eval_shape(lambda: train_jax.make_parameters(config, 11, jax.random.key(0)))
    rng = np.random.default_rng(0)
    return config, jax.tree.map(lambda shape: rng.normal(0, 0.2, shape.shape).astype(np.float32), shapes)


@pytest.fixture(scope="module")
def predict(train_jax: ModuleType, model: Any) -> Any:
    """Logits of some tokens, documents and positions, as a NumPy array."""
    config, parameters = model
    compiled = jax.jit(functools.partial(train_jax.predict, config))
    return lambda *batch: np.asarray(compiled(parameters, make_batch(*batch)))


def test_a_token_sees_those_before_it_in_its_document_and_nothing_else(predict: Any) -> None:
    segments, positions = [[1, 1, 1, 2, 2, 2, 0, 0]], [[0, 1, 2, 0, 1, 2, 0, 1]]
    plain = [1, 2, 3, 4, 5, 6, 0, 0]

    def changed_by(place: int) -> list[int]:
        """The places whose logits change with a token."""
        other = [7 if number == place else token for number, token in enumerate(plain)]
        both = [predict([tokens], segments, positions) for tokens in (plain, other)]
        return np.flatnonzero(np.abs(both[0] - both[1]).max(axis=(0, 2)) > 1e-6).tolist()

    assert changed_by(0) == [0, 1, 2]
    assert changed_by(2) == [2]
    assert changed_by(3) == [3, 4, 5]
    # The model treats a document in the middle of a row as if it were alone at the start of one.
    alone = predict([[4, 5, 6, *[0] * 5]], [[1, 1, 1, *[0] * 5]], [[0, 1, 2, *[0] * 5]])[:, :3]
    beside = predict([plain], segments, positions)[:, 3:6]
    assert np.allclose(alone, beside, atol=1e-5)
    # The distance between tokens matters, and their place in the row does not.
    later = predict([plain], segments, [[7, 8, 9, 7, 8, 9, 0, 1]])[:, 3:6]
    spread = predict([plain], segments, [[0, 1, 2, 0, 5, 6, 0, 1]])[:, 3:6]
    assert np.allclose(beside, later, atol=1e-4) and not np.allclose(beside, spread, atol=1e-3)


def test_only_targets_with_a_segment_count(train_jax: ModuleType, model: Any, predict: Any) -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    parts = ([tokens], [[1] * 8], [list(range(8))])
    logits = predict(*parts).astype(np.float64)[0]
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(8), tokens]
    config, parameters = model
    add_up = jax.jit(functools.partial(train_jax.sum_losses, config))
    for mask in ([1] * 8, [0, 2, 0, 1, 1, 1, 0, 0], [0] * 8):
        total, count = add_up(parameters, {**make_batch(*parts), "targets_segmentation": np.array([mask], np.int32)})
        assert count == np.count_nonzero(mask)
        assert np.isclose(total, losses[np.array(mask) > 0].sum(), rtol=1e-5)


@pytest.mark.slow
def test_computing_layers_again_or_in_bfloat16_changes_little(train_jax: ModuleType, model: Any) -> None:
    config, parameters = model
    batch = make_batch([[1, 2, 3, 4]], [[1, 1, 2, 2]], [[0, 1, 0, 1]])

    def gradients(**changes: Any) -> Any:
        chosen = SimpleNamespace(**{**vars(config), **changes})
        loss = jax.grad(lambda some: train_jax.sum_losses(chosen, some, batch)[0])
        found = jax.jit(loss)(parameters)
        return np.concatenate([np.ravel(array) for array in jax.tree.leaves(found)])

    plain = gradients()
    assert np.allclose(gradients(remat=True), plain, rtol=1e-4, atol=1e-5)
    rounded = gradients(compute_dtype="bfloat16")
    assert np.abs(rounded - plain).max() > 0 and np.corrcoef(rounded, plain)[0, 1] > 0.99


def test_arrays_are_cut_along_the_longest_axis_that_can_be_cut(train_jax: ModuleType) -> None:
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    shapes = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in SHAPES.items()}
    for is_sharded, expected in ((True, [(None, "data"), ("data", None), (), (None,)]), (False, [()] * 4)):
        placed = train_jax.place_state(shapes, mesh, is_sharded)
        specs = [tuple(placed[name].sharding.spec) for name in SHAPES]
        assert specs == expected if is_sharded else all(set(spec) <= {None} for spec in specs)


SHAPES: dict[str, tuple[int, ...]] = {"wide": (4, 8), "odd": (8, 258), "scalar": (), "bias": (6,)}


def test_running_out_of_memory_names_the_settings_to_change(
    train_jax: ModuleType, home: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(train_jax, "prepare", lambda _: jax.numpy.zeros(1 << 44).block_until_ready())
    errors = fail_here(train_jax, home, tmp_path, capsys=capsys, monkeypatch=monkeypatch)
    assert errors.startswith("error: out of memory (")
    assert "; lower data_config.batch_size, data_config.seq_len or model_config.width; or set" in errors


def test_both_trainers_see_the_same_rows(whole: Trainer, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    train_torch = load_example("train_torch")
    flags = ["--data", whole.home / "store", "--seq-len", 64, "--batch-size", 4, "--steps", 3, "--validate-every", 0]
    paths = ["--batch-log", tmp_path / "batches", "--checkpoint-path", tmp_path / "checkpoints", "--device", "cpu"]
    train_torch.train(train_torch.parse_flags([str(flag) for flag in (*flags, *paths)]))
    assert read_log(tmp_path / "batches") == {step: whole.read("batch_log")[step] for step in (1, 2, 3)}


@pytest.mark.parametrize(("steps", "warmup_steps"), [(20, 100), (1000, 100), (7, 5), (50, 0), (1, 1)])
def test_the_learning_rate_is_that_of_the_torch_trainer(steps: int, warmup_steps: int, train_jax: ModuleType) -> None:
    config = SimpleNamespace(
        steps=steps, warmup_steps=warmup_steps, learning_rate=0.01, gradient_clip=0, weight_decay=0.0
    )
    optimizer = train_jax.make_optimizer(config)
    weights = {"weight": jax.numpy.ones(1)}

    def update(state: Any, _: Any) -> tuple[Any, Any]:
        # Adam divides a constant gradient by itself, so what is left of an update is the rate.
        updates, state = optimizer.update(weights, state, weights)
        return state, -updates["weight"][0]

    rates = jax.lax.scan(update, optimizer.init(weights), length=steps)[1].tolist()
    num_warmup = min(warmup_steps, steps // 10)
    for step, rate in enumerate(rates, 1):
        done = max(0, step - num_warmup) / max(1, steps - num_warmup)
        assert rate == pytest.approx(
            0.01 * min(step / max(1, num_warmup), 0.55 + 0.45 * math.cos(math.pi * done)), 1e-4
        )
    assert rates[-1] == pytest.approx(0.001, 1e-3)
