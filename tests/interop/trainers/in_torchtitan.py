"""torchtitan's `Trainer` with its `llama3_debugmodel`, on tokenmill's loader and on loaders of its own.

Replaced is what needs a GPU: there is no memory monitor, no barrier on a device, and attention is dense, with
torchtitan's own block mask, because FlexAttention has no backward pass on a CPU.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from tests.interop.trainers.common import check_equal, recipe, report, row, run_ranks, run_tests, together

STEPS, SEQ_LEN, ROWS = 24, 128, 4
CHECKOUT = os.environ.get("CHECKOUT")


def use_cpu() -> None:
    """Replace what needs a GPU in torchtitan, before its other modules are imported."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu
    from torchtitan.components import metrics
    from torchtitan.distributed import utils as distributed
    from torchtitan.models.common import attention

    class NoMonitor:
        device_name = "cpu"

        def get_peak_stats(self) -> Any:
            return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

        def reset_peak_stats(self) -> None:
            pass

    metrics.build_device_memory_monitor = NoMonitor
    distributed.set_pg_timeouts = lambda **_: None
    log = metrics.MetricsProcessor.log

    def log_loss(self: Any, step: int, average: Any, *others: Any, **more: Any) -> None:
        report(step, average)
        log(self, step, average, *others, **more)

    metrics.MetricsProcessor.log = log_loss

    def attend(q: Any, k: Any, v: Any, *, block_mask: Any, **_: Any) -> Any:
        number, rows = torch.arange(q.shape[-2]), torch.arange(q.shape[0])[:, None, None]
        mask = block_mask.mask_mod(rows, number[:1], number[:, None], number)
        mask = mask.expand(len(rows), len(number), len(number))[:, None]
        is_grouped = k.shape[1] != q.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=is_grouped), None

    attention.FlexAttention.compiled_flex_attn = staticmethod(attend)
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_of_sums(self: Any, factor: float) -> None:
        # Gloo has no reduction that multiplies.
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor_of_sums


def train(folder: str, loader: str) -> None:
    """One rank of a run, which continues from the last checkpoint of the folder."""
    use_cpu()
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(recipe("torchtitan.md", "torchtitan"), names)
    config = names["config"]
    if loader == "graph":
        exec(recipe("torchtitan.md", "torchtitan-main"), names)
    elif loader == "rows":
        config.dataloader = own_loader()
    else:
        config.validator.enable, config.validator.freq, config.validator.steps = True, 10, 2
    config.dump_folder, config.hf_assets_path = folder, "assets"
    training, num_ranks = config.training, int(os.environ["WORLD_SIZE"])
    training.steps, training.disable_cuda_graphs, training.mixed_precision_param = STEPS, True, "float32"
    if hasattr(training, "seq_len"):
        training.seq_len, training.local_batch_size, training.global_batch_size = SEQ_LEN, ROWS // num_ranks, ROWS
    else:
        training.max_context_length = SEQ_LEN
        training.num_tokens_per_microbatch_per_dp_rank = SEQ_LEN * ROWS // num_ranks
    config.checkpoint.enable, config.checkpoint.interval = True, 4
    config.debug.seed, config.debug.deterministic, config.debug.save_config_file = 0, True, "config.json"
    config.compile.enable, config.activation_checkpoint = False, None
    # Its default needs an FSDP that is newer than this torch.
    config.parallelism.spmd_backend = "partial_dtensor"
    config.build().train()


def own_loader() -> Any:
    """torchtitan 0.3's own loader, `ParallelAwareDataloader`, on rows that are cut out of the store one by one."""
    from torchtitan.components.dataloader import ParallelAwareDataloader

    import tokenmill as tm

    class Rows(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            documents = tm.open("data/tok").split("train")
            rows = tm.shuffle(tm.pack(documents, seq_len=SEQ_LEN, method="best-fit"), seed=0)
            for number in range(len(rows)):
                ((packed, _, index),) = rows.resolve(np.array([number]))
                inputs, labels, positions = np.zeros(SEQ_LEN, np.int64), np.full(SEQ_LEN, -100), np.zeros(SEQ_LEN, int)
                place = 0
                for first, length in zip(packed.spans(index).starts, packed.segments(index).lengths, strict=True):
                    tokens = documents.read(int(first), int(first + length))
                    inputs[place : place + length], labels[place : place + length - 1] = tokens, tokens[1:]
                    positions[place : place + length] = np.arange(length)
                    place += length
                yield {"input": torch.tensor(inputs), "positions": torch.tensor(positions)}, torch.tensor(labels)

    class Config(ParallelAwareDataloader.Config):
        def build(self, *, dp_rank: int, dp_world_size: int, local_batch_size: int, **_: Any) -> Any:
            return ParallelAwareDataloader(Rows(), dp_rank, dp_world_size, batch_size=local_batch_size)

    return Config()


def main(work: str) -> None:
    os.chdir(work)
    write_tokenizer(Path("assets"))
    own = "graph" if CHECKOUT else "rows"
    ready = Path("killed/checkpoint/step-8/.metadata")
    whole, theirs, pair, killed = together(
        lambda: run_ranks([__file__, "train", "whole", "tokenmill"]),
        lambda: run_ranks([__file__, "train", own, own]),
        lambda: run_ranks([__file__, "train", "pair", "tokenmill"], 2),
        lambda: run_ranks([__file__, "train", "killed", "tokenmill"], 2, kill_after=9, until=ready),
    )
    num_compared = check_equal(whole, theirs, "torchtitan's own loader")
    check_equal(killed, pair, "before the kill")
    again = run_ranks([__file__, "train", "killed", "tokenmill"], 1)
    assert min(again) in (9, 13), sorted(again)
    check_equal(again, pair, "two ranks that were not killed", 1e-3)
    tests = "0.3 has none"
    if CHECKOUT:
        tests = run_tests("tests/unit_tests/components/data/test_grain_data.py", "titan_rows")
    row(
        version=f"main {CHECKOUT.rpartition('@')[2]}" if CHECKOUT else version("torchtitan"),
        steps=len(whole),
        resume=f"2 ranks killed at step 9, 1 rank from step {min(again) - 1}: losses of {len(again)} steps equal",
        **{
            "loss compared with": f"{'its Grain graph on RowSource' if CHECKOUT else 'its ParallelAwareDataloader'}, "
            f"{num_compared} steps, equal",
            "its data tests": tests,
            "needs a GPU": "FlexAttention, CUDA graphs",
        },
    )


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that the trainer builds and nothing uses."""
    from tokenizers import Tokenizer, models

    folder.mkdir()
    Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


if __name__ == "__main__":
    train(*sys.argv[2:]) if sys.argv[1] == "train" else main(sys.argv[1])
