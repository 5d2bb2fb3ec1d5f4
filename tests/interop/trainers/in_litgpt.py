"""litgpt's `pretrain` with a Pythia of two layers: the data module of the recipe, and `LitData` on the export."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import tokenmill as tm
from tests.interop.trainers.common import check_equal, recipe, report, row, run_ranks, together

STEPS, SEQ_LEN, ROWS = 24, 64, 4


def train(folder: str, kind: str) -> None:
    """A run, which continues from the last checkpoint of the folder."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)  # Lightning would take them for a launcher of several processes
    import lightning as L
    from litgpt import Config
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import LitData
    from litgpt.pretrain import setup

    names: dict[str, Any] = {"__name__": "__main__"}  # where data classes look for their module
    exec(recipe("litgpt.md", "litgpt"), names)

    class InputsOnly(names["Batches"]):  # type: ignore[misc]
        """Rows of the export, which are one token longer."""

        def __iter__(self) -> Any:
            return (x for x, _ in self.loader)

    class Rows(names["Tokenmill"]):  # type: ignore[misc]
        """The rows of the export in their order."""

        def train_dataloader(self) -> Any:
            return InputsOnly(tm.load("data/tok", SEQ_LEN + 1, ROWS, split="train", shuffle=False, framework="torch"))

    class Ordered(LitData):
        """`LitData` without its shuffle."""

        def train_dataloader(self) -> Any:
            return self._dataloader(str(Path(self.data_path, "train")), train=False)

    sys.argv = ["pretrain.py", "pythia-14m"]  # it reads them when it saves its settings
    data = {"tokenmill": names["Tokenmill"], "rows": Rows, "export": Ordered}[kind]()
    if kind == "export":
        data.data_path, data.split_names, data.num_workers = Path("data/litdata"), ("train", "val"), 0
    log = L.Fabric.log_dict

    def log_dict(self: Any, metrics: Any, step: Any = None) -> None:
        if "loss" in metrics:
            report(metrics["step"], metrics["loss"])
        log(self, metrics, step)

    L.Fabric.log_dict = log_dict
    size: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": SEQ_LEN, "padded_vocab_size": 258}
    setup(
        "pythia-14m",
        model_config=Config.from_name("pythia-14m", **size, intermediate_size=128),
        out_dir=Path(folder),
        precision="32-true",
        resume="auto",
        data=data,
        devices=1,
        logger_name="csv",
        eval=EvalArgs(interval=1000, max_iters=2, initial_validation=False, final_validation=False),
        train=TrainArgs(
            save_interval=5,
            log_interval=1,
            global_batch_size=ROWS,
            micro_batch_size=ROWS,
            max_tokens=STEPS * ROWS * SEQ_LEN,
            max_seq_length=SEQ_LEN,
            lr_warmup_steps=2,
            min_lr=1e-4,
            max_norm=1.0,
        ),
    )


def main(work: str) -> None:
    os.chdir(work)
    Path("data").unlink()
    Path("data").mkdir()
    Path("data/tok").symlink_to(Path("corpus").resolve().parent / "data" / "tok")
    tm.export("data/tok", "data/litdata", to="litdata", seq_len=SEQ_LEN + 1)
    ready = Path("killed/step-00000010/lit_model.pth")
    whole, rows, export, _ = together(
        lambda: run_ranks([__file__, "train", "whole", "tokenmill"]),
        lambda: run_ranks([__file__, "train", "rows", "rows"]),
        lambda: run_ranks([__file__, "train", "export", "export"]),
        lambda: run_ranks([__file__, "train", "killed", "tokenmill"], kill_after=12, until=ready),
    )
    compared = check_equal(rows, export, "LitData on the export")
    again = run_ranks([__file__, "train", "killed", "tokenmill"])
    check_equal(again, whole, "a run that was not killed")
    row(
        version=version("litgpt"),
        steps=len(whole),
        resume=f"killed at step 12, from step {min(again) - 1}: losses of {len(again)} steps equal",
        **{
            "loss compared with": f"LitData on the export, {compared} steps, equal",
            "its data tests": "not run",
            "needs a GPU": "several ranks (FSDP)",
        },
    )


if __name__ == "__main__":
    train(*sys.argv[2:]) if sys.argv[1] == "train" else main(sys.argv[1])
