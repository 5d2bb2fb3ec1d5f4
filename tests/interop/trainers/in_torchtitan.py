"""torchtitan's `Trainer` with its `llama3_debugmodel`, on tokenmill's loader and on torchtitan's own graph of Grain.

    python in_torchtitan.py WORK

What needs a GPU is replaced: the device is the CPU, and there is no memory monitor. FlexAttention has no backward pass
on a CPU, so attention is dense, with torchtitan's own block mask.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from tests.interop.trainers.common import check_equal, recipe, report, row, run_ranks

STEPS, SEQ_LEN, ROWS = 24, 128, 4


def use_cpu() -> None:
    """Replace what needs a GPU in torchtitan, before its modules are imported."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu
    from torchtitan.components import metrics
    from torchtitan.distributed import utils as utils_of_ranks
    from torchtitan.models.common import attention

    class NoMonitor:
        device_name = "cpu"

        def get_peak_stats(self) -> Any:
            return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

        def reset_peak_stats(self) -> None:
            pass

    metrics.build_device_memory_monitor = NoMonitor
    utils_of_ranks.set_pg_timeouts = lambda **_: None  # its barrier names a GPU
    log = metrics.MetricsProcessor.log

    def log_loss(self: Any, step: int, average: Any, *others: Any, **more: Any) -> None:
        report(step, average)
        log(self, step, average, *others, **more)

    metrics.MetricsProcessor.log = log_loss

    def dense(q: Any, k: Any, v: Any, *, block_mask: Any, **_: Any) -> Any:
        number = torch.arange(q.shape[-2])
        rows = torch.arange(q.shape[0])[:, None, None]
        mask = block_mask.mask_mod(rows, number[:1], number[:, None], number)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask[:, None], enable_gqa=k.shape[1] != q.shape[1]
        )
        return out, None

    attention.FlexAttention.compiled_flex_attn = staticmethod(dense)


def train(folder: str, loader: str) -> None:
    """One rank of a run, which continues from the last checkpoint of the folder."""
    use_cpu()
    names: dict[str, Any] = {}
    exec(recipe("torchtitan.md", "torchtitan"), names)
    config = names["config"]
    config.dump_folder = folder
    config.training.steps = STEPS
    config.training.disable_cuda_graphs = True
    config.hf_assets_path = str(Path("titan_tokenizer").resolve())
    if hasattr(config.training, "seq_len"):
        config.training.seq_len, config.training.local_batch_size = SEQ_LEN, ROWS // world_size()
        config.training.global_batch_size = ROWS
    else:
        config.training.max_context_length = SEQ_LEN
        config.training.num_tokens_per_microbatch_per_dp_rank = SEQ_LEN * ROWS // world_size()
    config.checkpoint.enable, config.checkpoint.interval = True, 4
    config.debug.seed, config.debug.deterministic = 0, True
    config.compile.enable = False
    config.activation_checkpoint = None
    config.validator.enable, config.validator.freq, config.validator.steps = True, 10, 2
    config.build().train()


def world_size() -> int:
    import os

    return int(os.environ["WORLD_SIZE"])


def main(work: str) -> None:
    import os

    os.chdir(work)
    print(run_ranks([__file__, "train", "whole", "tokenmill"], 1))


if __name__ == "__main__":
    train(*sys.argv[2:]) if sys.argv[1] == "train" else main(sys.argv[1])
