"""The PyTorch trainer, at toy size on the CPU: same data on any number of ranks, exact resuming, and clear sentences."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import itertools
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest

import tokenmill as tm
from tests.conftest import make_texts, write_jsonl
from tests.examples.trainers import EXAMPLES, load_example, read_log
from tests.support.program import Program
from tests.support.running import tokenize_here, wait_for
from tests.support.stores import make_store
from tokenmill.remote.bucket import split_url

torch = pytest.importorskip("torch")
trainer = load_example("train_torch")

TOY = ["--seq-len", "32", "--log-every", "1", "--checkpoint-every", "3", "--device", "cpu", "--validation-batches", "3"]
# Threads that wait for each other are many times slower on a busy machine.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As in the processes that these tests start, so that losses can be compared bit by bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("text") / "text.jsonl", make_texts(400, seed=3))


@pytest.fixture(scope="module")
def store(text: Path, tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A store with a validation split, of documents that are shorter and longer than a row."""
    path = tmp_path_factory.mktemp("train") / "store"
    tokenize_here(text, path, tokenizer=str(tiny_tokenizer), val_fraction=0.1)
    return path


def start(*flags: str | Path, num_ranks: int = 1) -> list[Program[str]]:
    """Start the trainer with the environment that torchrun gives to each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(EXAMPLES / "train_torch.py"), *TOY, *map(str, flags)]
    return [
        Program(
            command,
            env={**ENVIRONMENT, **ranks, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]


def finish(processes: list[Program[str]]) -> str:
    """Wait for all ranks; return the output of the first one, the only one that prints."""
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    assert not any(output for output, _ in outputs[1:])
    return outputs[0][0]


def kill_at(log: Path, num_lines: int, processes: list[Program[str]]) -> None:
    """Kill all ranks without a warning once a log has some lines."""
    try:
        wait_for(lambda: log.exists() and len(log.read_text().splitlines()) >= num_lines, 90)
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=30)
    assert {process.returncode for process in processes} == {-signal.SIGKILL}


class Run(NamedTuple):
    """What is left of a run in this process."""

    losses: dict[int, float]
    clock: tm.StepClock
    output: str


def run_here(*flags: str | Path) -> Run:
    """Run the trainer in this process, which saves the seconds that starting one takes."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        losses, clock = trainer.train(trainer.parse_flags([*TOY, *map(str, flags)]))
    return Run(losses, clock, output.getvalue())


def fail_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *flags: str | Path) -> str:
    """Return the sentence that the trainer ends with."""
    monkeypatch.setattr(sys, "argv", ["train_torch.py", *TOY, *map(str, flags)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        trainer.main()
    assert ended.value.code in (1, 2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0].removeprefix("error: ")


def numbers(log: dict[int, str]) -> dict[int, float]:
    return {step: float(value) for step, value in log.items()}


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Read the newest checkpoint."""
    return dict(torch.load(max(folder.glob("step-*.pt")), weights_only=True))


class Whole:
    """An undisturbed run: 1 rank, 12 steps of 2 accumulations of 2 rows."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.flags = ["--data", str(store), "--steps", "12", "--batch-size", "2", "--gradient-accumulation", "2"]
        self.folder = folder / "run"
        logs = {"--loss-log": folder / "losses", "--batch-log": folder / "batches"}
        arguments = [item for pair in logs.items() for item in pair]
        self.output = run_here(*self.flags, *arguments, "--checkpoint-path", self.folder).output
        self.losses, self.batches = (read_log(path) for path in logs.values())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Whole:
    return Whole(tmp_path_factory.mktemp("whole"), store)


# Data and resuming


def test_a_run_learns_and_says_what_it_does(whole: Whole) -> None:
    out = whole.output
    assert sorted(whole.losses) == sorted(whole.batches) == list(range(1, 13))
    assert float(whole.losses[12]) < float(whole.losses[1]) - 0.3
    assert len(set(whole.batches.values())) == 12
    assert "12 steps of 4 rows of 32 tokens, on 1 rank\n" in out
    assert "pinned memory, MFU and the 8-bit optimizer are off: they need a CUDA device" in out
    assert "step 12: validation loss " in out
    last = next(line for line in out.splitlines() if line.startswith("step 12/12"))
    assert "tokens/s" in last and "cpu " in last
    assert "steps 11 to 12 of this run; the first 10 are left out as warm-up\nwaits for data " in out
    assert [path.name for path in sorted(whole.folder.iterdir())] == ["step-00000009.pt", "step-00000012.pt"]


def test_the_batch_log_hashes_the_rows_that_the_loader_gives(whole: Whole, store: Path) -> None:
    loader = tm.load(store, seq_len=32, batch_size=4)
    for step, (inputs, _) in zip(range(1, 13), loader, strict=False):
        assert whole.batches[step] == hashlib.sha256(inputs.astype("<i4").tobytes()).hexdigest()[:16]


def test_a_run_that_is_killed_resumes_with_the_same_losses_bit_by_bit(whole: Whole, tmp_path: Path) -> None:
    logs = ["--loss-log", tmp_path / "losses", "--batch-log", tmp_path / "batches"]
    flags = [*whole.flags, *logs, "--checkpoint-path", tmp_path / "run"]
    kill_at(tmp_path / "losses", 5, start(*flags))
    left = tmp_path / "run" / "step-00000004.pt.tmp"
    left.write_bytes(b"half a checkpoint")
    resumed = run_here(*flags)
    assert "resumed from " in resumed.output and 1 not in resumed.losses
    assert read_log(tmp_path / "losses") == whole.losses
    assert read_log(tmp_path / "batches") == whole.batches
    assert not left.exists()


def test_two_ranks_see_the_same_batches_and_resume_after_a_kill_on_two_ranks_or_one(
    whole: Whole, tmp_path: Path
) -> None:
    logs = ["--loss-log", tmp_path / "losses", "--batch-log", tmp_path / "batches"]
    flags = [*whole.flags, *logs, "--checkpoint-path", tmp_path / "run"]
    kill_at(tmp_path / "losses", 5, start(*flags, "--gradient-accumulation", "1", num_ranks=2))
    output = finish(start(*flags, "--gradient-accumulation", "1", num_ranks=2))
    assert "resumed from " in output and "12 steps of 4 rows of 32 tokens, on 2 ranks\n" in output
    assert read_log(tmp_path / "batches") == whole.batches
    assert numbers(read_log(tmp_path / "losses")) == pytest.approx(numbers(whole.losses), abs=1e-3)
    printed = [line for line in (output + whole.output).splitlines() if "validation loss" in line]
    assert len(printed) == 2
    assert float(printed[0].split()[-1]) == pytest.approx(float(printed[1].split()[-1]), abs=1e-3)

    (tmp_path / "run" / "step-00000012.pt").unlink()
    resumed = run_here(*whole.flags, *logs[2:], "--checkpoint-path", tmp_path / "run")
    assert resumed.losses == pytest.approx({step: float(whole.losses[step]) for step in (10, 11, 12)}, abs=1e-3)
    assert read_log(tmp_path / "batches") == whole.batches


def test_the_same_command_after_the_end_has_nothing_to_do(whole: Whole, tmp_path: Path) -> None:
    shutil.copytree(whole.folder, tmp_path / "run")
    output = run_here(*whole.flags, "--checkpoint-path", tmp_path / "run").output
    assert "nothing to do: all 12 steps are done; pass more --steps or --epochs" in output


def test_epochs_end_where_the_data_does_and_are_resumed(store: Path, tmp_path: Path) -> None:
    def run(name: str, *flags: str) -> tuple[list[int], int]:
        """Return the steps that were done, and the row after the last."""
        given = ["--epochs", "0.1", "--gradient-accumulation", "3", "--validate-every", "0", "--batch-size", "8"]
        done = run_here("--data", store, *given, "--checkpoint-path", tmp_path / name, *flags)
        return list(done.losses), read_checkpoint(tmp_path / name)["data"]["next_row"]

    num_rows = len(tm.pack(tm.open(store), seq_len=32)) // 10
    num_steps = -(-num_rows // 24)
    assert num_steps > 2
    assert run("a") == (list(range(1, num_steps + 1)), num_rows)
    assert run("b", "--steps", "2")[0] == [1, 2]
    assert run("b") == (list(range(3, num_steps + 1)), num_rows)


# Raw text


def test_text_is_tokenized_while_training_and_the_run_resumes_from_the_cache(
    text: Path, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    flags = ["--data", text, "--tokenizer", tiny_tokenizer, "--batch-size", "2", "--checkpoint-path", tmp_path / "run"]
    flags += ["--batch-log", tmp_path / "batches", "--steps", "6"]
    first = run_here(*flags)
    assert "no validation: the data has no split 'val'; tokenize it with --val-fraction 0.01" in first.output
    assert read_checkpoint(tmp_path / "run")["identity"]["vocab_size"] == 600
    assert (tmp_path / "run" / "cache").is_dir()
    (tmp_path / "run" / "step-00000006.pt").unlink()
    resumed = run_here(*flags)
    assert resumed.losses == {step: first.losses[step] for step in (4, 5, 6)}
    assert len(read_log(tmp_path / "batches")) == 6


def test_some_of_the_text_is_kept_for_validation(text: Path, tmp_path: Path, tiny_tokenizer: Path) -> None:
    flags = ["--data", text, "--tokenizer", tiny_tokenizer, "--batch-size", "2", "--val-fraction", "0.2"]
    run = run_here(*flags, "--steps", "2", "--validate-every", "1", "--checkpoint-path", tmp_path / "run")
    assert run.output.count("validation loss") == 2


def test_text_needs_a_number_of_steps(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = fail_here(capsys, monkeypatch, "--data", "x.jsonl", "--tokenizer", "bytes")
    assert sentence.startswith("--tokenizer needs --steps and not --epochs: ")


# Checkpoints


def test_a_checkpoint_of_another_model_or_other_data_is_refused(
    whole: Whole, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remedy = "use the settings that it was made with, or another folder"
    path = whole.folder / "step-00000012.pt"

    def refuse(*flags: str) -> str:
        return fail_here(capsys, monkeypatch, *whole.flags, "--checkpoint-path", whole.folder, *flags)

    assert (
        refuse("--vocab-size", "5000") == f"{path} is of another run: vocab_size is 600 there and 5000 here; {remedy}"
    )
    assert "document_mask is True there and False here" in refuse("--no-document-mask")
    sentence = refuse("--seed", "1")
    assert sentence.startswith(f"{path} has other data: ") and sentence.endswith(remedy)
    assert "seq_len is 32 in the state and 16 here" in refuse("--seq-len", "16")


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    whole: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(whole.folder, tmp_path / "run"))
    newest, before = folder / "step-00000012.pt", folder / "step-00000009.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    resumed = run_here(*whole.flags, "--checkpoint-path", folder)
    assert f"{newest} cannot be read: " in capsys.readouterr().err
    assert f"resumed from {before}, after step 9" in resumed.output
    assert {step: repr(loss) for step, loss in resumed.losses.items()} == {
        step: whole.losses[step] for step in (10, 11, 12)
    }
    for path in (newest, before):
        torch.save([1, 2, 3], path)
    monkeypatch.setattr(sys, "argv", ["train_torch.py", *TOY, *whole.flags, "--checkpoint-path", str(folder)])
    with pytest.raises(SystemExit, match="2"):
        trainer.main()
    assert f"no checkpoint in {folder} can be read" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    whole: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(whole.folder, tmp_path / "run"))
    (folder / "step-00000012.pt").unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        sentence = fail_here(capsys, monkeypatch, *whole.flags, "--checkpoint-path", folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sentence == f"{folder / 'step-00000012.pt'}: File too large"
    assert [path.name for path in folder.iterdir()] == ["step-00000009.pt"]


def test_a_checkpoint_cannot_run_code(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "trapped"),)

    torch.save({"identity": {}, "trap": Trap()}, tmp_path / "step-00000001.pt")
    monkeypatch.setattr(sys, "argv", ["train_torch.py", *TOY, "--data", str(store), "--checkpoint-path", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        trainer.main()
    assert f"no checkpoint in {tmp_path} can be read" in capsys.readouterr().err
    assert not (tmp_path / "trapped").exists()


# The model


def toy_model() -> Any:
    torch.manual_seed(0)
    return trainer.GPT(num_layers=2, num_heads=2, width=32, vocab_size=100)


@pytest.mark.parametrize(
    ("name", "expected", "seq_len"), [("medium", 850e6, 16_384), ("large", 1.8e9, 32_768), ("tiny", 29e6, 256)]
)
def test_models_have_as_many_parameters_as_they_should(name: str, expected: float, seq_len: int) -> None:
    flags = trainer.parse_flags(["--data", "x", "--config", name])
    with torch.device("meta"):
        model = trainer.GPT(flags.num_layers, flags.num_heads, flags.width, vocab_size=50_257)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(expected, rel=0.03)
    assert flags.seq_len == seq_len


def test_documents_of_a_row_do_not_see_each_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 100, size).tolist() for size in (5, 16, 3, 8)]
    model = toy_model()

    def loss_of(folder: str, some: list[list[int]]) -> float:
        settings: dict[str, Any] = {"packing": "best-fit", "document_mask": True, "shuffle": False, "epochs": 1}
        loader = tm.load(make_store(tmp_path / folder, some), 32, 1, framework="torch", **settings)
        return float(trainer.validate(model, loader, 10)) * sum(len(document) - 1 for document in some)

    apart = sum(loss_of(f"apart-{number}", [some]) for number, some in enumerate(documents))
    assert loss_of("together", documents) == pytest.approx(apart, rel=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_and_the_matrix_mask_are_the_same_rule() -> None:
    segment_ids = torch.tensor([[1] * 20 + [2] * 30 + [3] * 14, [1] * 50 + [0] * 14], dtype=torch.int32)
    matrix = trainer.make_mask(segment_ids, "sdpa")
    assert matrix.shape == (2, 1, 64, 64)
    expected = [[[q >= k and ids[q] == ids[k] for k in range(64)] for q in range(64)] for ids in segment_ids.tolist()]
    assert matrix[:, 0].tolist() == expected
    model = toy_model().requires_grad_(False)
    inputs = torch.randint(0, 100, (2, 64))
    masked = model(inputs, inputs, None, segment_ids).item()
    assert masked != pytest.approx(model(inputs, inputs).item(), rel=1e-5)
    model.attention = "flex"
    assert masked == pytest.approx(model(inputs, inputs, None, segment_ids).item(), rel=1e-5)


def test_rotation_depends_on_distance_alone() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8)

    def product(at: int, other: int) -> float:
        angles = [place * 10_000.0 ** (-torch.arange(0, 8, 2) / 8) for place in (at, other)]
        turned = [trainer.rotate(x, angle.cos(), angle.sin()) for x, angle in zip((query, key), angles, strict=True)]
        return float((turned[0] * turned[1]).sum())

    assert product(5, 2) == pytest.approx(product(105, 102), abs=1e-4)
    assert product(5, 2) != pytest.approx(product(5, 3), abs=1e-4)


def test_accumulated_batches_weigh_by_their_trained_tokens(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    # Long documents and very short ones: padded rows have 15 or 1 tokens to train on.
    documents = [rng.integers(0, 100, size).tolist() for size in (16, 2, 2, 16, 16, 16, 2, 2)]
    store = make_store(tmp_path, documents)

    def step(batch_size: int) -> tuple[float, list[Any]]:
        model = toy_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        settings: dict[str, Any] = {"packing": "pad", "document_mask": True, "shuffle": False}
        loader = tm.load(store, 16, batch_size, framework="torch", **settings)
        batches = list(itertools.islice(loader, 8 // batch_size))
        gradients: list[Any] = []
        optimizer.zero_grad = lambda: gradients.extend(p.grad.clone() for p in model.parameters())
        loss = trainer.train_step(model, optimizer, batches, tm.StepClock())
        return loss.item(), gradients

    (loss, gradients), (accumulated_loss, accumulated) = step(8), step(2)
    assert accumulated_loss == pytest.approx(loss, rel=1e-5)
    for one, other in zip(gradients, accumulated, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_recomputing_changes_nothing(whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    checkpoint = trainer.checkpoint
    monkeypatch.setattr(trainer, "checkpoint", lambda *given, **more: calls.append(1) or checkpoint(*given, **more))
    run = run_here(*whole.flags, "--steps", "12", "--epochs", "0.01", "--recompute", "--checkpoint-path", tmp_path)
    assert calls and run.losses[1] == float(whole.losses[1])


def test_bfloat16_on_the_cpu_is_close_and_not_equal(whole: Whole, tmp_path: Path) -> None:
    mixed = run_here(*whole.flags, "--mixed-precision", "bf16", "--steps", "1", "--checkpoint-path", tmp_path)
    assert "bfloat16 autocast" in mixed.output
    assert mixed.losses[1] == pytest.approx(float(whole.losses[1]), abs=0.05)
    assert mixed.losses[1] != float(whole.losses[1])
    assert {tensor.dtype for tensor in read_checkpoint(tmp_path)["model"].values()} == {torch.float32}


# What the machine can do


def test_the_8bit_optimizer_is_off_without_cuda(store: Path, tmp_path: Path) -> None:
    flags = ["--data", store, "--steps", "1", "--batch-size", "1", "--verbose", "--checkpoint-path", tmp_path]
    output = run_here(*flags, "--use-8bit-optim").output
    assert "the 8-bit optimizer are off: they need a CUDA device" in output
    assert read_checkpoint(tmp_path)["identity"]["optimizer"] == "AdamW"
    assert "TorchLoader(1 x 32, rank 0 of 1, at row 0)\nshuffle, seed 0" in output


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is here")
def test_the_8bit_optimizer_names_the_package_that_it_needs() -> None:
    flags = trainer.parse_flags(["--data", "x", "--use-8bit-optim"])
    with pytest.raises(
        tm.UsageError, match="--use-8bit-optim needs a package: pip install bitsandbytes, or leave it out"
    ):
        trainer.make_optimizer(toy_model(), flags, is_cuda=True)


def test_worker_processes_give_the_same_batches(whole: Whole, tmp_path: Path) -> None:
    flags = ["--num-workers", "2", "--steps", "3", "--checkpoint-path", tmp_path, "--batch-log", tmp_path / "batches"]
    run_here(*whole.flags, *flags)
    assert read_log(tmp_path / "batches") == {step: whole.batches[step] for step in (1, 2, 3)}


def test_the_loss_is_read_every_n_steps_and_at_the_end(store: Path, tmp_path: Path) -> None:
    flags = ["--data", store, "--batch-size", "1", "--steps", "8", "--log-every", "3", "--validate-every", "0"]
    run = run_here(*flags, "--checkpoint-every", "100", "--checkpoint-path", tmp_path)
    assert list(run.losses) == [3, 6, 8]


# Sentences


def test_running_out_of_memory_names_the_flags_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "store", [list(range(20_001))] * 9)
    flags = ["--seq-len", "20000", "--batch-size", "8", "--steps", "1", "--checkpoint-path", tmp_path]
    limits = resource.getrlimit(resource.RLIMIT_AS)
    # Room for the model, and not for a mask of 8 x 20,000 x 20,000 bytes.
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (2 << 30), limits[1]))
    try:
        sentence = fail_here(capsys, monkeypatch, "--data", store, *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert sentence.startswith("out of memory (") and "can't allocate memory" in sentence
    for flag in ("--batch-size", "--gradient-accumulation", "--seq-len", "--recompute", "--mixed-precision bf16"):
        assert flag in sentence


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "--data is missing; pass a store, or text with --tokenizer"),
        (
            ["--data", "nowhere"],
            "nowhere does not exist; make a store with: tokenmill tokenize INPUT -o {here}/nowhere",
        ),
        (["--data", "x", "--batch-size", "0"], "--batch-size 0 must be a whole number, at least 1"),
        (["--data", "x", "--steps", "0"], "--steps 0 must be a whole number, at least 1"),
        (["--data", "x", "--epochs", "-1"], "--epochs -1.0 must be a number above 0"),
        (["--data", "x", "--seq-len", "many"], "argument --seq-len: invalid int value: 'many'; --help lists the flags"),
        (["--data", "x", "--stpes", "3"], "unrecognized arguments: --stpes 3; --help lists the flags"),
        (["--data", "x", "--val-fraction", "0.1"], "--val-fraction is for text with --tokenizer; "),
        (
            ["--data", "x", "--attention", "flex"],
            "--attention flex cannot train on cpu: it has no backward pass there; use sdpa",
        ),
        (["--data", "x", "--device", "warp"], "device 'warp' is unknown to torch: "),
    ],
)
def test_wrong_arguments_are_one_sentence(
    flags: list[str],
    sentence: str,
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "--device" in flags:
        flags[flags.index("x")] = str(store)
    assert sentence.format(here=tmp_path) in fail_here(capsys, monkeypatch, *flags)


def test_compiling_without_a_compiler_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.shutil, "which", lambda name: None)
    sentence = fail_here(capsys, monkeypatch, "--data", "x", "--compile")
    assert sentence == "--compile needs a C++ compiler, and there is none; install g++, or leave it out"


def test_text_without_a_tokenizer_says_what_to_pass(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = fail_here(capsys, monkeypatch, "--data", text)
    assert sentence.startswith(f"{text} is neither a store nor a file of tokens in a format that tokenmill reads")
    assert sentence.endswith("; tokenize text first, or pass a tokenizer")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_does_not_exist_is_refused(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = fail_here(capsys, monkeypatch, "--data", store, "--device", "cuda")
    assert sentence.startswith("device 'cuda:0' is not available: ")


def test_data_without_a_vocabulary_size_needs_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.arange(1000, dtype="uint16").tofile(tmp_path / "train.bin")
    flags = ["--data", tmp_path / "train.bin", "--steps", "1", "--batch-size", "1", "--checkpoint-path", tmp_path]
    sentence = fail_here(capsys, monkeypatch, *flags)
    assert sentence == f"{tmp_path / 'train.bin'} does not record how many ids there are; pass --vocab-size"
    assert list(run_here(*flags, "--vocab-size", "1000").losses) == [1]


def test_without_torch_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError(name='torch')")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(EXAMPLES / "train_torch.py"), "--test"]
    environment = {**ENVIRONMENT, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        "error: train_torch.py (torch) needs a package that is not installed: pip install 'tokenmill[torch]'\n"
    )


# Minutes: make test-train


@pytest.mark.slow
def test_the_trainer_checks_itself_in_two_minutes() -> None:
    started = time.monotonic()
    command = [sys.executable, str(EXAMPLES / "train_torch.py"), "--test", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - started < 120
    assert sum(line.startswith("ok  ") for line in done.stdout.splitlines()) == 3


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_a_compiled_run_has_the_losses_of_one_that_is_not(whole: Whole, tmp_path: Path) -> None:
    flags = ["--compile", "--loss-log", tmp_path / "losses", "--checkpoint-path", tmp_path / "run"]
    finish(start(*whole.flags, *flags))
    assert numbers(read_log(tmp_path / "losses")) == pytest.approx(numbers(whole.losses), abs=1e-3)


@pytest.mark.filterwarnings("default::DeprecationWarning:torch")  # its compiler uses its own deprecated functions
@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_compiled_blocks_with_flex_attention_give_the_loss_of_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(trainer, "create_block_mask", torch.compile(trainer.create_block_mask))
    model = toy_model().requires_grad_(False)
    torch.manual_seed(0)
    batches = [
        (torch.randint(0, 100, (2, 128)), torch.sort(torch.randint(1, 6, (2, 128)), dim=1).values) for _ in range(4)
    ]
    plain = [model(inputs, inputs, None, ids).item() for inputs, ids in batches]
    model.attention, model.loss = "flex", torch.compile(model.loss)
    for block in model.blocks:
        block.compile()
    before = counters["stats"]["unique_graphs"]
    compiled = [model(inputs, inputs, None, ids).item() for inputs, ids in batches]
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert counters["stats"]["unique_graphs"] - before == 3, "a mask, a block and the loss, once for all batches"


@pytest.mark.slow
def test_steps_from_a_store_wait_for_data_less_than_a_hundredth_of_their_time(store: Path, tmp_path: Path) -> None:
    flags = ["--steps", "40", "--seq-len", "256", "--checkpoint-path", tmp_path, "--log-every", "10"]
    assert run_here("--data", store, *flags).clock.shares()["data"] < 0.01


def test_a_store_in_a_bucket_is_trained_on(store: Path, s3: str, tmp_path: Path) -> None:
    url = f"{s3}/train/tok"
    bucket, prefix = split_url(url)
    for path in sorted(path for path in store.rglob("*") if path.is_file()):
        bucket.put(f"{prefix}/{path.relative_to(store)}", path.read_bytes())
    given = ["--steps", "3", "--batch-size", "2", "--validate-every", "0", "--checkpoint-path"]
    there = run_here("--data", url, *given, tmp_path / "there")
    here = run_here("--data", store, *given, tmp_path / "here")
    assert there.losses
    assert there.losses == here.losses
