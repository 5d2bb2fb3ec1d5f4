"""The PyTorch trainer, at toy size on the CPU: same data on any number of ranks, exact resuming, and clear sentences."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest

import tokenmill as tm
from tests.conftest import make_texts, write_jsonl
from tests.running import tokenize_here, wait_for
from tests.stores import make_store

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "train_torch.py"
TOY = ["--seq-len", "32", "--log-every", "1", "--checkpoint-every", "3", "--device", "cpu", "--validation-batches", "3"]
# Threads that wait for each other are many times slower on a busy machine.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def load_script() -> ModuleType:
    """The trainer as a module, which is how benchmarks use it."""
    spec = importlib.util.spec_from_file_location("train_torch", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_torch"] = module
    spec.loader.exec_module(module)
    return module


trainer = load_script()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A store with a validation split, of documents that are shorter and longer than a row."""
    folder = tmp_path_factory.mktemp("train")
    text = write_jsonl(folder / "text.jsonl", make_texts(400, seed=3))
    tokenize_here(text, folder / "store", tokenizer=str(tiny_tokenizer), val_fraction=0.1)
    return folder / "store"


def command(*flags: str | Path, num_ranks: int = 1) -> list[str]:
    """The trainer as a user starts it; several ranks through torchrun, on the loopback device."""
    started = [sys.executable]
    if num_ranks > 1:
        started += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return [*started, str(SCRIPT), *TOY, *map(str, flags)]


def start(*flags: str | Path, num_ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    done = command(*flags, num_ranks=num_ranks)
    return subprocess.run(done, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


def start_and_kill(log: Path, num_lines: int, *flags: str | Path, num_ranks: int = 1) -> None:
    """Run it until a log has some lines, then kill it and all that it has started, without a warning."""
    with subprocess.Popen(
        command(*flags, num_ranks=num_ranks),
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            wait_for(lambda: log.exists() and len(log.read_text().splitlines()) >= num_lines, 90)
        finally:
            # torchrun gives its ranks sessions of their own, so they are killed one by one.
            ranks = psutil.Process(process.pid).children(recursive=True)
            for member in (process, *ranks):
                member.kill()
        assert process.wait() == -signal.SIGKILL
        assert not psutil.wait_procs(ranks, 30)[1]


def run_here(*flags: str | Path) -> Any:
    """The trainer in this process, without the seconds that starting one takes."""
    return trainer.train(trainer.parse_flags([*TOY, *map(str, flags)]))


def fail_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *flags: str | Path) -> str:
    """The sentence that it ends with."""
    monkeypatch.setattr(sys, "argv", ["train_torch.py", *TOY, *map(str, flags)])
    capsys.readouterr()
    try:
        code = trainer.main()
    except SystemExit as error:
        code = error.code
    assert code in (1, 2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0].removeprefix("error: ")


def read_log(path: Path) -> dict[int, str]:
    """Values by step; what was written twice, before and after a kill, must be the same."""
    values: dict[int, str] = {}
    for line in path.read_text().splitlines():
        step, value = line.split()
        assert values.setdefault(int(step), value) == value, f"step {step} differs"
    return values


def numbers(log: dict[int, str]) -> dict[int, float]:
    return {step: float(value) for step, value in log.items()}


class Whole:
    """A run that nothing disturbs: 1 rank, 12 steps of 2 accumulations of 2 rows."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.flags = ["--data", str(store), "--steps", "12", "--batch-size", "2", "--gradient-accumulation", "2"]
        logs = {"--loss-log": folder / "losses", "--batch-log": folder / "batches"}
        arguments = [str(item) for pair in logs.items() for item in pair]
        self.done = start(*self.flags, *arguments, "--checkpoint-path", folder / "run")
        assert self.done.returncode == 0, self.done.stderr
        self.losses, self.batches = (read_log(path) for path in logs.values())
        self.folder = folder / "run"


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Whole:
    return Whole(tmp_path_factory.mktemp("whole"), store)


# Data and resuming


def test_a_run_learns_and_says_what_it_does(whole: Whole) -> None:
    out = whole.done.stdout
    assert sorted(whole.losses) == sorted(whole.batches) == list(range(1, 13))
    assert float(whole.losses[12]) < float(whole.losses[1]) - 0.3
    assert len(set(whole.batches.values())) == 12
    assert "12 steps of 4 rows of 32 tokens, on 1 rank\n" in out
    assert "pinned memory is off: it needs a CUDA device" in out
    assert "MFU unknown for cpu" in out
    assert "step 12: validation loss " in out
    last = next(line for line in out.splitlines() if line.startswith("step 12/12"))
    assert "tokens/s" in last and "cpu " in last
    assert "steps 11 to 12 of this run; the first 10 are left out as warm-up\nwaits for data " in out
    assert [path.name for path in sorted(whole.folder.iterdir())] == ["step-00000009.pt", "step-00000012.pt"]


def test_the_batch_log_hashes_the_rows_that_the_loader_gives(whole: Whole, store: Path) -> None:
    import hashlib

    loader = tm.load(store, seq_len=32, batch_size=4)
    for step, (inputs, _) in zip(range(1, 13), loader, strict=False):
        assert whole.batches[step] == hashlib.sha256(inputs.astype("<i4").tobytes()).hexdigest()[:16]


def test_a_run_that_is_killed_goes_on_with_the_same_losses_bit_by_bit(whole: Whole, tmp_path: Path) -> None:
    logs = ["--loss-log", tmp_path / "losses", "--batch-log", tmp_path / "batches"]
    flags = [*whole.flags, *logs, "--checkpoint-path", tmp_path / "run"]
    start_and_kill(tmp_path / "losses", 5, *flags)
    left = tmp_path / "run" / "step-00000004.pt.tmp"
    left.write_bytes(b"half a checkpoint")
    done = start(*flags)
    assert done.returncode == 0, done.stderr
    assert "resumed from " in done.stdout
    assert read_log(tmp_path / "losses") == whole.losses
    assert read_log(tmp_path / "batches") == whole.batches
    assert not left.exists()


def test_two_ranks_see_the_same_batches_and_go_on_after_a_kill_on_two_ranks_or_one(
    whole: Whole, tmp_path: Path
) -> None:
    logs = ["--loss-log", tmp_path / "losses", "--batch-log", tmp_path / "batches"]
    flags = [*whole.flags, *logs, "--checkpoint-path", tmp_path / "run"]
    start_and_kill(tmp_path / "losses", 5, *flags, "--gradient-accumulation", "1", num_ranks=2)
    done = start(*flags, "--gradient-accumulation", "1", num_ranks=2)
    assert done.returncode == 0, done.stderr
    assert "resumed from " in done.stdout and "12 steps of 4 rows of 32 tokens, on 2 ranks\n" in done.stdout
    assert read_log(tmp_path / "batches") == whole.batches
    assert numbers(read_log(tmp_path / "losses")) == pytest.approx(numbers(whole.losses), abs=1e-3)
    said = [line for line in (done.stdout + whole.done.stdout).splitlines() if "validation loss" in line]
    assert len(said) == 2
    assert float(said[0].split()[-1]) == pytest.approx(float(said[1].split()[-1]), abs=1e-3)

    (tmp_path / "run" / "step-00000012.pt").unlink()
    resumed = run_here(*whole.flags, *logs[2:], "--checkpoint-path", tmp_path / "run")
    assert resumed.losses == pytest.approx({step: float(whole.losses[step]) for step in (10, 11, 12)}, abs=1e-3)
    assert read_log(tmp_path / "batches") == whole.batches


def test_the_same_command_after_the_end_has_nothing_to_do(
    whole: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole.folder, tmp_path / "run")
    run_here(*whole.flags, "--checkpoint-path", tmp_path / "run")
    assert "nothing to do: all 12 steps are done; pass more --steps or --epochs" in capsys.readouterr().out


def test_epochs_end_where_the_data_does_and_are_resumed(store: Path, tmp_path: Path) -> None:
    def run(name: str, *flags: str) -> Any:
        given = ["--epochs", "0.1", "--gradient-accumulation", "3", "--validate-every", "0", "--batch-size", "4"]
        return run_here("--data", store, *given, "--checkpoint-path", tmp_path / name, *flags)

    num_rows = len(tm.pack(tm.open(store), seq_len=32)) // 10
    first = run("a")
    assert first.step == first.num_steps == -(-num_rows // 12) > 2
    stopped = run("b", "--steps", "2")
    assert stopped.step == 2
    resumed = run("b")
    assert resumed.num_steps == first.num_steps and min(resumed.losses) == 3
    assert resumed.loader.state_dict()["next_row"] == first.loader.state_dict()["next_row"] == num_rows


# Raw text


def test_text_is_tokenized_while_training_and_the_run_goes_on_from_the_cache(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_jsonl(tmp_path / "text.jsonl", make_texts(400, seed=3))
    flags = ["--data", text, "--tokenizer", tiny_tokenizer, "--batch-size", "2", "--checkpoint-path", tmp_path / "run"]
    flags += ["--batch-log", tmp_path / "batches", "--steps"]
    first = run_here(*flags, "6")
    assert "no validation: --val-fraction 0.01" in capsys.readouterr().out
    assert first.config.vocab_size == 600
    assert (tmp_path / "run" / "cache").is_dir()
    (tmp_path / "run" / "step-00000006.pt").unlink()
    resumed = run_here(*flags, "6")
    assert list(resumed.losses) == [4, 5, 6]
    assert all(first.losses[step] == loss for step, loss in resumed.losses.items())
    assert len(read_log(tmp_path / "batches")) == 6


def test_some_of_the_text_is_kept_for_validation(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_jsonl(tmp_path / "text.jsonl", make_texts(400, seed=3))
    flags = ["--data", text, "--tokenizer", tiny_tokenizer, "--batch-size", "2", "--val-fraction", "0.2"]
    run_here(*flags, "--steps", "2", "--validate-every", "1", "--checkpoint-path", tmp_path / "run")
    assert capsys.readouterr().out.count("validation loss") == 2


def test_text_needs_a_number_of_steps(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said = fail_here(capsys, monkeypatch, "--data", "x.jsonl", "--tokenizer", "bytes")
    assert said.startswith("--tokenizer needs --steps and not --epochs: ")


# Checkpoints


def test_a_checkpoint_of_another_model_or_other_data_is_refused(
    whole: Whole, store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = "pass the flags that it was made with, or another --checkpoint-path"
    path = whole.folder / "step-00000012.pt"

    def refuse(*flags: str) -> str:
        return fail_here(capsys, monkeypatch, *whole.flags, "--checkpoint-path", whole.folder, *flags)

    assert refuse("--vocab-size", "5000") == f"{path} is of another run: vocab_size is 600 there and 5000 here; {todo}"
    assert "document_mask is True there and False here" in refuse("--no-document-mask")
    assert refuse("--seed", "1").startswith(f"{path} is of other data: ") and refuse("--seed", "1").endswith(todo)
    assert "seq_len is 32 in the state and 16 here" in refuse("--seq-len", "16")


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    whole: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(whole.folder, tmp_path / "run"))
    newest, before = folder / "step-00000012.pt", folder / "step-00000009.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    resumed = run_here(*whole.flags, "--checkpoint-path", folder)
    said = capsys.readouterr()
    assert f"{newest} cannot be read: " in said.err and f"resumed from {before}, after step 9" in said.out
    assert {step: repr(loss) for step, loss in resumed.losses.items()} == {
        step: whole.losses[step] for step in (10, 11, 12)
    }
    for path in (newest, before):
        torch.save([1, 2, 3], path)
    flags = [*whole.flags, "--checkpoint-path", str(folder)]
    monkeypatch.setattr(sys, "argv", ["train_torch.py", *TOY, *flags])
    assert trainer.main() == 2
    assert f"no checkpoint in {folder} can be read" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    whole: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(whole.folder, tmp_path / "run"))
    (folder / "step-00000012.pt").unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        said = fail_here(capsys, monkeypatch, *whole.flags, "--checkpoint-path", folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said == f"{folder / 'step-00000012.pt'}: File too large"
    assert [path.name for path in folder.iterdir()] == ["step-00000009.pt"]


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "trapped"),)

    torch.save({"identity": {}, "trap": Trap()}, tmp_path / "step-00000001.pt")
    with pytest.raises(tm.UsageError, match="no checkpoint in .* can be read"):
        trainer.load_checkpoint(tmp_path)
    assert not (tmp_path / "trapped").exists()


# The model


def toy_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    return trainer.GPT(trainer.Config(2, 2, 32, 16, 2, 1e-3, vocab_size=100, **changes))


def make_batches(tmp_path: Path, documents: list[list[int]], **settings: Any) -> tm.Loader:
    return tm.load(make_store(tmp_path, documents), framework="torch", shuffle=False, **settings)


CPU = trainer.Machine(torch.device("cpu"))


@pytest.mark.parametrize(("name", "expected"), [("medium", 850e6), ("large", 1.8e9)])
def test_models_have_as_many_parameters_as_they_should(name: str, expected: float) -> None:
    with torch.device("meta"):
        model = trainer.GPT(trainer.CONFIGS[name])
    assert trainer.count_parameters(model) == pytest.approx(expected, rel=0.03)
    assert trainer.CONFIGS[name].seq_len == {"medium": 16_384, "large": 32_768}[name]
    assert model.flops_per_token(1) == pytest.approx(6 * expected, rel=0.12)


def test_the_tiny_model_is_small_besides_its_embeddings() -> None:
    with torch.device("meta"):
        model = trainer.GPT(trainer.CONFIGS["tiny"])
    besides = trainer.count_parameters(model) - 2 * model.embedding.weight.numel()
    assert 1e6 < besides < 4e6


def test_documents_of_a_row_do_not_see_each_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 100, size).tolist() for size in (5, 16, 3, 8)]
    model = toy_model()

    def loss_of(folder: str, some: list[list[int]], seq_len: int) -> float:
        loader = make_batches(
            tmp_path / folder, some, seq_len=seq_len, batch_size=1, packing="best-fit", document_mask=True, epochs=1
        )
        return trainer.validate(model, loader, CPU, 10) * sum(len(document) - 1 for document in some)

    apart = sum(loss_of(f"apart-{number}", [some], 32) for number, some in enumerate(documents))
    assert loss_of("together", documents, 32) == pytest.approx(apart, rel=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_and_the_matrix_mask_are_the_same_rule() -> None:
    torch.manual_seed(0)
    segment_ids = torch.tensor([[1] * 20 + [2] * 30 + [3] * 14, [1] * 50 + [0] * 14], dtype=torch.int32)
    matrix, blocks = (trainer.make_mask(segment_ids, kind) for kind in ("sdpa", "flex"))
    assert matrix.shape == (2, 1, 64, 64)
    expected = [[[q >= k and ids[q] == ids[k] for k in range(64)] for q in range(64)] for ids in segment_ids.tolist()]
    assert matrix[:, 0].tolist() == expected
    query, key, value = torch.randn(3, 2, 2, 64, 16)
    assert torch.allclose(
        trainer.attend(query, key, value, matrix), trainer.attend(query, key, value, blocks), atol=1e-5
    )
    model = toy_model().requires_grad_(False)
    inputs = torch.randint(0, 100, (2, 64))
    losses = [model(inputs, inputs, None, mask) for mask in (matrix, blocks, None)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    assert losses[0].item() != pytest.approx(losses[2].item(), rel=1e-5)


def test_rotation_depends_on_distance_alone() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8)

    def product(at: int, other: int) -> float:
        turned = [
            trainer.rotate(x, trainer.find_rotation(torch.tensor([[place]]), 8))
            for x, place in ((query, at), (key, other))
        ]
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
        settings: dict[str, Any] = {"seq_len": 16, "packing": "pad", "document_mask": True, "shuffle": False}
        loader = tm.load(store, batch_size=batch_size, framework="torch", **settings)
        batches = list(itertools.islice(loader, 8 // batch_size))
        gradients: list[Any] = []
        optimizer.zero_grad = lambda: gradients.extend(p.grad.clone() for p in model.parameters())
        loss = trainer.train_step(model, optimizer, batches, CPU, trainer.StepClock())
        return loss.item(), gradients

    (loss, gradients), (accumulated_loss, accumulated) = step(8), step(2)
    assert accumulated_loss == pytest.approx(loss, rel=1e-5)
    for one, other in zip(gradients, accumulated, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_recomputing_changes_nothing(store: Path, tmp_path: Path) -> None:
    flags = ["--data", store, "--batch-size", "2", "--steps", "2", "--validate-every", "0", "--checkpoint-path"]
    plain, again = run_here(*flags, tmp_path / "a"), run_here(*flags, tmp_path / "b", "--recompute")
    assert again.core.recompute and plain.losses == again.losses


def test_bfloat16_on_the_cpu_is_close_and_not_equal(whole: Whole, tmp_path: Path) -> None:
    mixed = run_here(*whole.flags, "--mixed-precision", "bf16", "--steps", "3", "--checkpoint-path", tmp_path)
    assert mixed.machine.is_mixed
    assert mixed.losses[1] == pytest.approx(float(whole.losses[1]), abs=0.05)
    assert mixed.losses[1] != float(whole.losses[1])
    assert mixed.core.embedding.weight.dtype == torch.float32


# Speed, and what the machine can do


def test_known_devices_have_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA H200": 989,
        "NVIDIA B200": 2250,
        "NVIDIA L40S": 362,
        "NVIDIA GeForce RTX 4090": 165,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA L40": None,
        "NVIDIA RTX A4000": None,
        "cpu": None,
    }
    for name, peak in names.items():
        monkeypatch.setattr(trainer, "name_device", lambda device, name=name: name)
        found = trainer.find_peak_flops(torch.device("cpu"))
        assert found == (None if peak is None else peak * 1e12), name


def test_the_8bit_optimizer_says_that_it_is_off_without_cuda(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data", store, "--steps", "1", "--batch-size", "1", "--verbose", "--checkpoint-path", tmp_path]
    run = run_here(*flags, "--use-8bit-optim")
    out = capsys.readouterr().out
    assert "the 8-bit optimizer is off: it needs a CUDA device; this is AdamW with 32 bits" in out
    assert type(run.optimizer).__name__ == "AdamW"
    assert "TorchLoader(1 x 32, rank 0 of 1, at row 0)\nshuffle, seed 0" in out


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is here")
def test_the_8bit_optimizer_names_the_package_that_it_needs() -> None:
    flags = trainer.parse_flags(["--data", "x", "--use-8bit-optim"])
    machine = dataclasses.replace(CPU, device=torch.device("cuda"))
    with pytest.raises(
        tm.UsageError, match="--use-8bit-optim needs a package: pip install bitsandbytes, or leave it out"
    ):
        trainer.make_optimizer(toy_model(), flags, machine)


def test_worker_processes_give_the_same_batches(whole: Whole, tmp_path: Path) -> None:
    flags = ["--num-workers", "2", "--steps", "3", "--checkpoint-path", tmp_path, "--batch-log", tmp_path / "batches"]
    run_here(*whole.flags, *flags)
    assert read_log(tmp_path / "batches") == {step: whole.batches[step] for step in (1, 2, 3)}


def test_the_loss_is_read_every_so_many_steps_and_at_the_end(store: Path, tmp_path: Path) -> None:
    flags = ["--data", store, "--batch-size", "1", "--steps", "8", "--log-every", "3", "--validate-every", "0"]
    run = run_here(*flags, "--checkpoint-every", "100", "--checkpoint-path", tmp_path)
    assert list(run.losses) == [3, 6, 8]


# Sentences


def test_running_out_of_memory_names_the_flags_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "store", [list(range(30_000))])
    flags = ["--seq-len", "20000", "--batch-size", "8", "--steps", "1", "--checkpoint-path", tmp_path]
    limits = resource.getrlimit(resource.RLIMIT_AS)
    # Room for the model, and not for a mask of 8 x 20,000 x 20,000 bytes.
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (2 << 30), limits[1]))
    try:
        said = fail_here(capsys, monkeypatch, "--data", store, *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert said.startswith("out of memory (") and "can't allocate memory" in said
    for flag in ("--batch-size", "--gradient-accumulation", "--seq-len", "--recompute", "--mixed-precision bf16"):
        assert flag in said


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"):
        trainer.explain_memory(RuntimeError("shapes differ"))
    assert "out of memory (CUDA out of memory)" in trainer.explain_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert "out of memory (MemoryError)" in trainer.explain_memory(MemoryError())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--data is missing; pass a store, or text with --tokenizer"),
        (
            ["--data", "nowhere"],
            "no store found at nowhere; run `tokenmill tokenize TEXT -o nowhere --tokenizer T` first, or pass text "
            "with --tokenizer T",
        ),
        (["--data", "x", "--batch-size", "0"], "--batch-size 0 must be a whole number, at least 1"),
        (["--data", "x", "--steps", "0"], "--steps 0 must be a whole number, at least 1"),
        (["--data", "x", "--epochs", "-1"], "--epochs -1.0 must be a number above 0"),
        (["--data", "x", "--seq-len", "many"], "argument --seq-len: invalid int value: 'many'; --help lists the flags"),
        (["--data", "x", "--stpes", "3"], "unrecognized arguments: --stpes 3; --help lists the flags"),
        (
            ["--data", "x", "--attention", "flex"],
            "--attention flex cannot train on cpu: it has no backward pass there; use sdpa",
        ),
    ],
)
def test_mistakes_are_sentences(
    flags: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fail_here(capsys, monkeypatch, *flags) == said


def test_compiling_without_a_compiler_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.shutil, "which", lambda name: None)
    said = fail_here(capsys, monkeypatch, "--data", "x", "--compile")
    assert said == "--compile needs a C++ compiler, and there is none; install g++, or leave it out"


def test_text_without_a_tokenizer_says_what_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_jsonl(tmp_path / "text.jsonl", ["a"])
    said = fail_here(capsys, monkeypatch, "--data", text)
    assert said == (
        f"{text} is text and no store; run `tokenmill tokenize {text} -o data/tok --tokenizer T` first, or pass "
        "--tokenizer T here"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = fail_here(capsys, monkeypatch, "--data", "x", "--device", "cuda")
    assert said.startswith("--device cuda cannot be used: ") and said.endswith("leave it out, or pass --device cpu")


def test_data_that_does_not_know_its_vocabulary_needs_to_be_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.arange(1000, dtype="uint16").tofile(tmp_path / "train.bin")
    flags = ["--data", tmp_path / "train.bin", "--steps", "1", "--batch-size", "1", "--checkpoint-path", tmp_path]
    said = fail_here(capsys, monkeypatch, *flags)
    assert said == f"{tmp_path / 'train.bin'} does not say how many ids there are; pass --vocab-size"
    assert run_here(*flags, "--vocab-size", "1000").step == 1


def test_without_torch_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError(name='torch')")
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--test"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr == (
        "error: train_torch.py (torch) needs a package that is not installed: pip install 'tokenmill[torch]'\n"
    )


# Minutes: make test-train


@pytest.mark.slow
def test_the_trainer_checks_itself_in_two_minutes() -> None:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, SCRIPT, "--test", "--device", "cpu"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - started < 120
    assert sum(line.startswith("ok  ") for line in done.stdout.splitlines()) == 5


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_a_compiled_run_has_the_losses_of_one_that_is_not(whole: Whole, tmp_path: Path) -> None:
    flags = ["--compile", "--loss-log", tmp_path / "losses", "--checkpoint-path", tmp_path / "run"]
    done = start(*whole.flags, *flags)
    assert done.returncode == 0, done.stderr
    assert numbers(read_log(tmp_path / "losses")) == pytest.approx(numbers(whole.losses), abs=1e-3)


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
    plain = [model(inputs, inputs, None, trainer.make_mask(ids, "sdpa")).item() for inputs, ids in batches]
    model.compile_parts()
    before = counters["stats"]["unique_graphs"]
    blocks = [model(inputs, inputs, None, trainer.make_mask(ids, "flex")).item() for inputs, ids in batches]
    assert blocks == pytest.approx(plain, rel=1e-5)
    assert counters["stats"]["unique_graphs"] - before == 3, "a mask, a block and the head, once for all batches"


@pytest.mark.slow
def test_steps_from_a_store_wait_for_data_less_than_a_hundredth_of_their_time(store: Path, tmp_path: Path) -> None:
    run = run_here(
        "--data", store, "--steps", "40", "--seq-len", "256", "--checkpoint-path", tmp_path, "--log-every", "10"
    )
    assert run.clock.shares()["data"] < 0.01
