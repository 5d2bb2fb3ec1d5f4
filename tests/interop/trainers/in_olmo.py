"""OLMo-core's `Trainer` on its composable sources: the raw shard, the export, and tokenmill's rows."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

import tokenmill as tm
from tests.interop.trainers.common import check_equal, recipe, report, row, run_ranks

STEPS, SEQ_LEN, ROWS = 24, 64, 4


def make_sources(store: str, work_dir: str) -> dict[str, Any]:
    """Run the recipe and return its names."""
    from olmo_core.data import TokenizerConfig

    tokenizer = TokenizerConfig(vocab_size=258, eos_token_id=256, pad_token_id=257)
    names = {"__name__": "recipe", "tokenizer": tokenizer, "work_dir": work_dir, "sequence_length": SEQ_LEN}
    exec(recipe("olmo.md", "olmo").replace("data/tok", store), names)
    return names


def train(folder: str, kind: str) -> None:
    """One rank of a run, which continues from the last checkpoint of the folder."""
    from olmo_core.data.composable import ComposableDataLoaderConfig, InstanceFilterConfig
    from olmo_core.distributed.parallel import DataParallelType
    from olmo_core.nn.attention import AttentionBackendName
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import AdamWConfig
    from olmo_core.train import Duration, TrainerConfig, prepare_training_environment
    from olmo_core.train.callbacks import Callback, CheckpointerCallback
    from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig

    class Report(Callback):
        """Report the loss of each step."""

        def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
            if "train/CE loss" in metrics:
                report(step, metrics["train/CE loss"])

    prepare_training_environment(seed=0, backend="gloo")
    names = make_sources("data/tok", "work")
    if kind == "concat":  # the rows of `chunks`, as tokenmill cuts them
        rows = tm.pack(tm.open("data/tok").split("train"), seq_len=SEQ_LEN)
        source = names["Rows"](rows, "work")
        source.rows._document_mask = False
    elif kind == "export":
        settings = {"dtype": np.uint16, "tokenizer": names["tokenizer"], "work_dir": "work"}
        documents = names["NumpyDocumentSource"](source_paths=["data/olmo/train.npy"], **settings)
        source = names["ConcatAndChunkInstanceSource"](documents, sequence_length=SEQ_LEN, work_dir="work")
    else:
        source = names[kind]
    num_ranks = int(os.environ["WORLD_SIZE"])
    loader = ComposableDataLoaderConfig(
        tokenizer=names["tokenizer"],
        global_batch_size=ROWS * SEQ_LEN,
        seed=0,
        instance_filter_config=InstanceFilterConfig(),
        display_source_visualization=False,
    ).build(source, work_dir=f"{folder}-order")
    size = {"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 384}
    model = TransformerConfig.llama_like(**size, attn_backend=AttentionBackendName.torch).build(init_device="cpu")
    parallel = TransformerDataParallelConfig(name=DataParallelType.ddp) if num_ranks > 1 else None
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=SEQ_LEN, max_sequence_length=SEQ_LEN, optim=AdamWConfig(lr=1e-3), dp_config=parallel
    ).build(model)
    config = TrainerConfig(
        save_folder=folder,
        work_dir=f"{folder}-work",
        max_duration=Duration.steps(STEPS),
        metrics_collect_interval=1,
        save_overwrite=True,
        callbacks={"report": Report(), "checkpointer": CheckpointerCallback(save_interval=5, save_async=False)},
    )
    config.build(module, loader).fit()


def check_masks() -> str:
    """Check that a mask beside a raw shard is OLMo-core's label mask."""
    from tests.support.exports import add_mask

    tm.tokenize("corpus/*.jsonl", "masked", tokenizer="bytes")
    store = tm.open("masked")
    add_mask(Path("masked"), np.random.default_rng(0).integers(0, 2, store.num_tokens, np.uint8))
    chunks = make_sources("masked", "work")["chunks"]
    documents = tm.open("masked").split()
    for number in range(0, len(chunks), 97):
        some = number * SEQ_LEN, (number + 1) * SEQ_LEN
        assert np.asarray(chunks[number]["input_ids"]).tolist() == documents.read(*some).tolist()
        assert np.asarray(chunks[number]["label_mask"]).tolist() == documents.mask.read(*some).astype(bool).tolist()
    return f"label masks of {len(range(0, len(chunks), 97))} rows equal"


def main(work: str) -> None:
    os.chdir(work)
    Path("data").unlink()
    Path("data").mkdir()
    Path("data/tok").symlink_to(Path("corpus").resolve().parent / "data" / "tok")
    tm.export("data/tok", "data/olmo", to="olmo", split="train")
    masks = check_masks()
    raw = run_ranks([__file__, "train", "raw", "chunks"])
    compared = check_equal(raw, run_ranks([__file__, "train", "concat", "concat"]), "tokenmill's rows")
    check_equal(raw, run_ranks([__file__, "train", "export", "export"]), "the export")
    pair = run_ranks([__file__, "train", "pair", "rows"], 2)
    run_ranks([__file__, "train", "killed", "rows"], 2, kill_after=11, until=Path("killed/step10/.metadata.json"))
    again = run_ranks([__file__, "train", "killed", "rows"])
    check_equal(again, pair, "two ranks that were not killed", 1e-3)
    row(
        version=version("ai2-olmo-core"),
        steps=len(raw),
        resume=f"2 ranks killed at step 11, 1 rank from step {min(again) - 1}: losses of {len(again)} steps equal",
        **{
            "loss compared with": f"NumpyDocumentSource on raw shard and export, {compared} steps, equal; {masks}",
            "its data tests": "not run",
            "needs a GPU": "FlashAttention",
        },
    )


if __name__ == "__main__":
    train(*sys.argv[2:]) if sys.argv[1] == "train" else main(sys.argv[1])
