"""nanoGPT's `train.py` with the loader of the recipe in it, and as it is on the export, on the rows of the loader.

Also the readers of llm.c and modded-nanogpt on the export to their format, where copies of them are on this machine.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch

import tokenmill as tm
from tests.interop.environments import checkout
from tests.interop.trainers.common import check_equal, recipe, report, row, run_ranks

STEPS, SEQ_LEN, ROWS = 24, 64, 4
FLAGS = (
    f"--dataset=mine --device=cpu --compile=False --dtype=float32 --block_size={SEQ_LEN} --n_layer=2 --n_head=4 "
    f"--n_embd=64 --max_iters={STEPS} --lr_decay_iters={STEPS} --eval_interval=5 --eval_iters=2 --log_interval=1 "
    "--always_save_checkpoint=True --warmup_iters=2"
)


def replace(text: str, old: str, new: str, count: int = 1) -> str:
    assert text.count(old) == count, f"train.py has {text.count(old)} times {old!r}; expected {count}"
    return text.replace(old, new)


def train(folder: str, kind: str) -> None:
    """One rank of `train.py`, which continues from the checkpoint of the folder."""
    place, num_ranks = Path(os.environ["CHECKOUT"]), int(os.environ["WORLD_SIZE"])
    if num_ranks == 1:
        os.environ.pop("WORLD_SIZE")
        os.environ.pop("RANK")  # by which nanoGPT decides whether there are several
    else:
        os.environ["LOCAL_RANK"] = "0"
    text = (place / "train.py").read_text()
    text = replace(
        text, "        if local_iter_num >= 5:", "        report(iter_num, lossf)\n        if local_iter_num >= 5:"
    )
    text = replace(text, "configurator.py", str(place / "configurator.py"))
    # DDP of a CPU takes no device.
    text = replace(text, "    torch.cuda.set_device(device)\n", "    device = 'cpu'\n")
    text = replace(text, "DDP(model, device_ids=[ddp_local_rank])", "DDP(model)")
    text = replace(text, "torch.cuda.amp.GradScaler(", "torch.amp.GradScaler('cpu', ")
    if kind == "tokenmill":
        text = replace(text, "X, Y = get_batch('train')", "X, Y = next_batch()", 2)
        text = replace(
            text,
            "                    'config': config,\n",
            "                    'config': config, 'data': data_state,\n",
        )
        resume = "    optimizer.load_state_dict(checkpoint['optimizer'])\n"
        text = replace(text, resume, resume + "    loaders['train'].load_state_dict(checkpoint['data'])\n")
        head, tail = text.split("def get_batch(split):\n")
        text = head + recipe("nanogpt.md", "nanogpt") + tail[tail.index("# init these up here") :]
    else:  # the rows of the loader instead of random ones
        rows = tm.pack(tm.open("data/tok").split("train"), seq_len=SEQ_LEN)
        numbers = {batch.inputs.tobytes(): n for n, batch in enumerate(tm.load(rows, batch_size=1, epochs=1))}
        single = tm.load(tm.shuffle(rows, seed=0), batch_size=1)
        order = iter(
            [numbers[batch.inputs.tobytes()] for batch, _ in zip(single, range(ROWS * (STEPS + 2)), strict=False)]
        )
        random = "    ix = torch.randint(len(data) - block_size, (batch_size,))\n"
        text = replace(text, random, "    ix = next_rows()\n")
        text = replace(text, "        losses = estimate_loss()\n", "        losses = {'train': 0, 'val': 0}\n")
    own = {"next_rows": lambda: [SEQ_LEN * next(order) for _ in range(ROWS)], "report": report}
    is_resumed = Path(folder, "ckpt.pt").exists()
    sys.argv = [
        "train.py",
        *FLAGS.split(),
        f"--out_dir={folder}",
        f"--init_from={'resume' if is_resumed else 'scratch'}",
    ]
    sys.argv += [f"--batch_size={ROWS // num_ranks}", f"--gradient_accumulation_steps={num_ranks}", "--backend=gloo"]
    exec(compile(text, "train.py", "exec"), {"__name__": "__main__", **own})


def check_readers() -> str:
    """Read the export to llm.c's format with the loaders of llm.c and modded-nanogpt."""
    tm.export("data/tok", "llmc", to="llmc", split="train")
    (path,) = Path("llmc").glob("*.bin")
    stream = tm.open("data/tok").split("train")
    done = []
    names: dict[str, Any] = {"np": np, "torch": torch, "glob": __import__("glob"), "Path": Path, "print0": print}
    llmc = checkout("karpathy+llm.c", "train_gpt2.py")
    if llmc is not None:
        run_definitions(
            llmc / "train_gpt2.py", ("_peek_data_shard", "_load_data_shard", "DistributedDataLoader"), names
        )
        loaders = [names["DistributedDataLoader"](str(path), ROWS, SEQ_LEN, rank, 2) for rank in range(2)]
        first = stream.read(0, stream.num_tokens)
        first = np.array(read_llmc(first, stream))
        for step in range(50):
            for rank, loader in enumerate(loaders):
                x, y = loader.next_batch()
                start = (2 * step + rank) * ROWS * SEQ_LEN
                assert x.reshape(-1).tolist() == first[start : start + ROWS * SEQ_LEN].tolist()
                assert y.reshape(-1).tolist() == first[start + 1 : start + ROWS * SEQ_LEN + 1].tolist()
        done.append("llm.c")
    modded = checkout("KellerJordan+modded-nanogpt", "train_gpt.py")
    if modded is not None:
        run_definitions(modded / "train_gpt.py", ("_load_data_shard",), names, ("pin_memory=True", "pin_memory=False"))
        found = names["_load_data_shard"](path).numpy()
        assert found.tolist() == read_llmc(stream.read(0, stream.num_tokens), stream)
        done.append("modded-nanogpt")
    return f"readers of {' and '.join(done)}" if done else ""


def read_llmc(tokens: Any, documents: Any) -> list[int]:
    """What llm.c's files have: the end-of-text before each document."""
    found: list[int] = []
    for number in range(len(documents)):
        ids = documents.document(number).tolist()
        found += [ids[-1], *ids[:-1]]
    assert len(found) == len(tokens)
    return found


def run_definitions(
    path: Path, wanted: tuple[str, ...], names: dict[str, Any], change: tuple[str, str] = ("", "")
) -> None:
    """Run some functions and classes of a program that needs a GPU as a whole."""
    text = path.read_text()
    found = {node.name: node for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for name in wanted:
        exec((ast.get_source_segment(text, found[name]) or "").replace(*change), names)


def main(work: str) -> None:
    os.chdir(work)
    Path("data").unlink()
    Path("data").mkdir()
    Path("data/tok").symlink_to(Path("corpus").resolve().parent / "data" / "tok")
    tm.export("data/tok", "data/mine", to="nanogpt")
    readers = check_readers()
    whole = run_ranks([__file__, "train", "whole", "tokenmill"])
    compared = check_equal(whole, run_ranks([__file__, "train", "own", "own"]), "nanoGPT's get_batch")
    pair = run_ranks([__file__, "train", "pair", "tokenmill"], 2)
    run_ranks([__file__, "train", "killed", "tokenmill"], 2, kill_after=12, until=Path("killed/ckpt.pt"))
    again = run_ranks([__file__, "train", "killed", "tokenmill"])
    # Rank 0 reports the loss of its own rows, so compare what follows from the weights: two ranks again.
    assert min(again) in (5, 10) and set(again) <= set(pair)
    check_equal(again, whole, "one rank that was not killed", 2e-3)
    row(
        version=f"main {os.environ['CHECKOUT'].rpartition('@')[2]}",
        steps=len(whole),
        resume=f"2 ranks killed at step 12, 1 rank from step {min(again)}: losses of {len(again)} steps equal",
        **{
            "loss compared with": f"its get_batch on the export, same rows, {compared} steps, equal; {readers}, equal",
            "its data tests": "it has none",
            "needs a GPU": "train_gpt.py of modded-nanogpt; llm.c is not built",
        },
    )


if __name__ == "__main__":
    train(*sys.argv[2:]) if sys.argv[1] == "train" else main(sys.argv[1])
