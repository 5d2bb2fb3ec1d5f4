"""nanochat's `base_train.py` with the loader of the recipe, and with its own on the same documents.

Every document has as many tokens as a row. Its own loader then puts one into each row, crops every other document to
the BOS that is the last label, and leaves the rest of that one out; so the store has every other document.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import tokenmill as tm
from tests.interop.trainers.common import check_equal, recipe, report, row, run_ranks

STEPS, SEQ_LEN, ROWS = 24, 64, 4
FLAGS = (
    f"--depth=2 --aspect-ratio=32 --head-dim=32 --max-seq-len={SEQ_LEN} --device-batch-size={ROWS} --warmup-steps=2 "
    f"--total-batch-size={ROWS * SEQ_LEN} --num-iterations={STEPS} --eval-every=-1 --core-metric-every=-1 "
    "--sample-every=-1 --save-every=10 --device-type=cpu --window-pattern=L"
)
IMPORT = (
    "from nanochat.dataloader import tokenizing_distributed_data_loader_bos_bestfit, "
    "tokenizing_distributed_data_loader_with_state_bos_bestfit\n"
)


def write_data() -> None:
    """Write nanochat's tokenizer and Parquet files, and the store of every other document."""
    import tiktoken
    from nanochat.tokenizer import SPECIAL_TOKENS, SPLIT_PATTERN

    ranks = {bytes([byte]): byte for byte in range(256)}
    specials = {name: 256 + number for number, name in enumerate(SPECIAL_TOKENS)}
    encoding = tiktoken.Encoding("rustbpe", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
    Path("base/tokenizer").mkdir(parents=True)
    Path("base/tokenizer/tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    torch.save(torch.ones(265, dtype=torch.int64), "base/tokenizer/token_bytes.pt")
    definition = {"name": "own", "pattern": SPLIT_PATTERN, "special_tokens": specials}
    Path("tiktoken.json").write_text(json.dumps(definition))
    Path("own.tiktoken").write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % n for token, n in ranks.items()))
    letters = np.random.default_rng(0).integers(97, 123, (300, SEQ_LEN - 1), np.uint8)
    texts = [letters[number].tobytes().decode() for number in range(300)]
    folder = Path("base/base_data_climbmix")
    folder.mkdir()
    for name in ("shard_00000", "shard_00001"):
        pq.write_table(pa.table({"text": texts}), folder / f"{name}.parquet", row_group_size=50)
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[::2]))
    tm.tokenize("texts.jsonl", "data/tok", tokenizer="own.tiktoken", bos=True, bos_token="<|bos|>", eos=False)


def train(folder: str, kind: str, *resume: str) -> None:
    """A run of `base_train.py`."""
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    os.environ.update(NANOCHAT_BASE_DIR=str(Path("base").resolve()), TORCHDYNAMO_DISABLE="1")
    text = (Path(os.environ["CHECKOUT"]) / "scripts" / "base_train.py").read_text()
    logged = "    train_loss_f = train_loss.item() # .item() is a CPU-GPU sync point\n"
    assert text.count(IMPORT) == 1 and text.count(logged) == 1, "base_train.py has changed"
    text = text.replace(logged, logged + "    report(step + 1, train_loss_f)\n")
    if kind == "tokenmill":
        glue = recipe("nanochat.md", "nanochat")
        packing = '"packing": "best-fit", "long_documents": "truncate"'
        assert packing in glue
        glue = glue.replace(packing, '"packing": "concat", "shuffle": False')
        text = text.replace(IMPORT, glue)
    sys.argv = ["base_train.py", *FLAGS.split(), f"--model-tag={folder}", *resume]
    exec(compile(text, "base_train.py", "exec"), {"__name__": "__main__", "report": report})


def main(work: str) -> None:
    os.chdir(work)
    Path("data").unlink()
    Path("data").mkdir()
    write_data()
    whole = run_ranks([__file__, "train", "whole", "tokenmill"])
    compared = check_equal(whole, run_ranks([__file__, "train", "own", "own"]), "nanochat's own loader")
    ready = Path("base/base_checkpoints/killed/meta_000010.json")
    run_ranks([__file__, "train", "killed", "tokenmill"], kill_after=13, until=ready)
    again = run_ranks([__file__, "train", "killed", "tokenmill", "--resume-from-step=10"])
    check_equal(again, whole, "a run that was not killed")
    row(
        version=f"main {os.environ['CHECKOUT'].rpartition('@')[2]}",
        steps=len(whole),
        resume=f"killed at step 13, from step {min(again) - 1}: losses of {len(again)} steps equal",
        **{
            "loss compared with": f"its own loader, {compared} steps, equal",
            "its data tests": "it has none",
            "needs a GPU": "FlashAttention 3, FP8",
        },
    )


if __name__ == "__main__":
    train(*sys.argv[2:]) if sys.argv[1] == "train" else main(sys.argv[1])
