"""megatron-core: its `GPTModel` on its `GPTDataset` and `BlendedDataset` of raw shards, and on the loader.

Its own order of documents and rows is replaced by tokenmill's in one run, so that both have the same rows in the same
order. Its training script and its fused kernels need a GPU, so the loop is here.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

import tokenmill as tm
from tests.interop.trainers.common import check_equal, recipe, report, row, run_ranks

STEPS, SEQ_LEN, ROWS = 24, 64, 4


class ByteTokenizer:
    """What Megatron's data sets ask of a tokenizer: names and numbers, never ids of a text."""

    vocab_size, eod, pad, unique_identifiers = 258, 256, -1, {"class": "bytes"}


def make_dataset(prefixes: list[str], weights: list[float] | None = None, cache: str = "cache") -> Any:
    """Megatron's own data sets of pairs of `.bin` and `.idx`."""
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQ_LEN,
        blend=(prefixes, weights),
        split="100,0,0",
        path_to_cache=cache,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=ByteTokenizer(),
        mid_level_dataset_surplus=0.005,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [ROWS * STEPS, 0, 0], lambda: True, config).build()[0]


def shards() -> list[str]:
    """The names of the store's shards without a suffix."""
    store = tm.open("data/tok")
    return [f"data/tok/{shard.name}" for shard in store.manifest.splits["train"].shards]


def own_rows(loader: Any) -> Any:
    """Batches of `GPTDataset` over the raw shard, whose order of documents and rows is replaced by tokenmill's."""
    (prefix,) = shards()
    rows = tm.pack(tm.open("data/tok").split("train"), seq_len=SEQ_LEN)
    single = tm.load(loader.rows, batch_size=1)
    stream = tm.load(rows, batch_size=1, epochs=1)
    places = {batch.inputs.tobytes(): number for number, batch in enumerate(stream)}
    order = [places[batch.inputs.tobytes()] for batch, _ in zip(single, range(ROWS * STEPS), strict=False)]
    gpt_dataset._build_document_index = lambda documents, *_: np.asarray(documents, np.int32)
    gpt_dataset._build_shuffle_index = lambda *_: np.asarray(order, np.uint32)
    dataset = make_dataset([prefix], cache="ordered")
    for first in range(0, ROWS * STEPS, ROWS):
        found = [dataset[number] for number in range(first, first + ROWS)]
        yield {name: torch.stack([row[name] for row in found]) for name in found[0]}


def check_orders(*_: str) -> None:
    """Check Megatron's own order on raw shards, and its blend of two stores, against the store's documents."""
    torch.distributed.init_process_group("gloo")
    documents = tm.open("data/tok").split("train")
    (prefix,) = shards()
    dataset = make_dataset([prefix])
    stream = np.concatenate([documents.document(int(number)) for number in dataset.document_index])
    for number in range(0, len(dataset), 7):
        first = int(dataset.shuffle_index[number]) * SEQ_LEN
        assert dataset[number]["tokens"].tolist() == stream[first : first + SEQ_LEN].tolist(), number
    tm.export("data/tok", "data/merged", to="megatron", split="val")
    blend = make_dataset([prefix, "data/merged/val"], [0.7, 0.3])
    share = np.bincount([int(blend[number]["dataset_id"]) for number in range(len(blend))]) / len(blend)
    assert type(blend).__name__ == "BlendedDataset" and abs(share[0] - 0.7) < 0.02, share
    found = blend[next(n for n in range(len(blend)) if blend[n]["dataset_id"] == 1)]["tokens"].tolist()
    val = tm.open("data/tok").split("val")
    everything = [val.document(number).tolist() for number in range(len(val))]
    pieces = "".join(map(chr, found)).split(chr(256))
    texts = ["".join(map(chr, ids[:-1])) for ids in everything]
    assert all(piece in texts for piece in pieces[1:-1])
    report(len(range(0, len(dataset), 7)), share[0])


def train(folder: str, kind: str) -> None:
    """One rank of a run, which continues from the last checkpoint of the folder."""
    torch.distributed.init_process_group("gloo")
    torch.cuda.current_device = lambda: "cpu"  # where attention puts its scores
    parallel_state.initialize_model_parallel(1, 1)
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # of dropout, which is off
    num_ranks = parallel_state.get_data_parallel_world_size()
    micro_batch_size = ROWS // num_ranks
    names: dict[str, Any] = {"__name__": "recipe", "micro_batch_size": micro_batch_size}
    exec(recipe("megatron.md", "megatron").replace("2048", str(SEQ_LEN)), names)
    loader = names["loader"]
    size: dict[str, Any] = {"hidden_size": 64, "num_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = TransformerConfig(
        **size, use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, masked_softmax_fusion=False
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=512, max_sequence_length=SEQ_LEN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved, first = Path(folder, "model.pt"), 1
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict({**model.state_dict(), **state["model"]})
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(json.loads(Path(folder, "loader.json").read_text()))
        first = state["step"] + 1
    mask = torch.ones(1, 1, SEQ_LEN, SEQ_LEN, dtype=torch.bool).triu(1)
    batches = own_rows(loader) if kind == "own" else loader
    for step, batch in zip(range(first, STEPS + 1), batches, strict=False):
        losses = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
        total = torch.stack([(losses * batch["loss_mask"]).sum(), batch["loss_mask"].sum()])
        count = total.detach().clone()
        torch.distributed.all_reduce(count)
        (total[0] / count[1]).backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if step == 10 and torch.distributed.get_rank() == 0:
            Path(folder).mkdir(exist_ok=True)
            weights = {name: part for name, part in model.state_dict().items() if isinstance(part, torch.Tensor)}
            Path(folder, "loader.json").write_text(json.dumps(loader.state_dict()))
            torch.save({"model": weights, "optimizer": optimizer.state_dict(), "step": step}, saved)
        report(step, count[0] / count[1])


def main(work: str) -> None:
    os.chdir(work)
    Path("data").unlink()
    Path("data").mkdir()
    Path("data/tok").symlink_to(Path("corpus").resolve().parent / "data" / "tok")
    ((num_rows, share),) = run_ranks([__file__, "orders"]).items()
    orders = f"{num_rows} rows in its own order, BlendedDataset {share:.2f} for 0.7"
    whole = run_ranks([__file__, "train", "whole", "tokenmill"])
    compared = check_equal(whole, run_ranks([__file__, "train", "own", "own"]), "GPTDataset")
    pair = run_ranks([__file__, "train", "pair", "tokenmill"], 2)
    run_ranks([__file__, "train", "killed", "tokenmill"], 2, kill_after=11, until=Path("killed/model.pt"))
    again = run_ranks([__file__, "train", "killed", "tokenmill"])
    check_equal(again, pair, "two ranks that were not killed", 1e-4)
    row(
        version=version("megatron-core"),
        steps=len(whole),
        resume=f"2 ranks killed at step 11, 1 rank from step {min(again) - 1}: losses of {len(again)} steps equal",
        **{
            "loss compared with": f"GPTDataset in tokenmill's order, {compared} steps, equal; {orders} equal",
            "its data tests": "not run",
            "needs a GPU": "pretrain_gpt.py, TransformerEngine",
        },
    )


if __name__ == "__main__":
    {"train": train, "orders": check_orders}.get(sys.argv[1], lambda *_: main(sys.argv[1]))(*sys.argv[2:])
