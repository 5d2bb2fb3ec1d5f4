"""Transformers' `Trainer`, TRL's `SFTTrainer` and its `DPOTrainer`, with a Llama of two layers on a CPU."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, TrainingArguments

import tokenmill as tm
from tests.interop.trainers.common import check_equal, recipe, report, row, run_ranks, together

STEPS, SEQ_LEN, ROWS = 24, 128, 4
PAIRS = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}


class Report(TrainerCallback):
    """Report the loss of each step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            report(state.global_step, logs["loss"])


class ByRow(torch.utils.data.Dataset[Any]):
    """The same rows one by one, for the Trainer's own `DataLoader`."""

    def __init__(self, loader: Any) -> None:
        single = tm.load(loader.rows, batch_size=1, framework="torch", layout="hf")
        self.rows = [
            {name: part[0] for name, part in batch.items()} for batch, _ in zip(single, range(200), strict=False)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return self.rows[number]


def make_model(vocab_size: int = 512) -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, use_cache=False, pad_token_id=0, **size))
    assert model.config._attn_implementation == "sdpa"
    return model


def settings(folder: str, batch_size: int) -> dict[str, Any]:
    """Settings of all trainers."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": batch_size,
        "max_steps": STEPS,
        "save_steps": 5,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "ignore_data_skip": True,
        "train_sampling_strategy": "sequential",
    }


def train(folder: str, kind: str) -> None:
    """One rank of the Trainer, which continues from the last checkpoint of the folder."""
    batch_size = ROWS // int(os.environ["WORLD_SIZE"])
    names: dict[str, Any] = {"__name__": "recipe"}
    text = recipe("huggingface.md", "hf").replace("2048", str(SEQ_LEN)).replace('size": 8', f'size": {batch_size}')
    exec(text, names)
    loader, trainer, callbacks = names["loader"], names["TokenmillTrainer"], [Report(), names["SaveLoader"]()]
    assert (loader.batch_size, loader.rows.seq_len) == (batch_size, SEQ_LEN)
    args = TrainingArguments(**settings(folder, batch_size))
    if kind == "own":
        trainer, callbacks = trainer.__mro__[1], callbacks[:1]
    saved = max(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name[11:]), default=None)
    if saved is not None:
        loader.load_state_dict(json.loads((saved / "loader.json").read_text()))
    data = {"train_dataset": ByRow(loader)} if kind == "own" else {}
    trainer(make_model(), args, callbacks=callbacks, **data).train(resume_from_checkpoint=saved)


def train_sft(folder: str, kind: str) -> None:
    """`SFTTrainer` without padding: on the export, on the loader, or on the texts, which it tokenizes and packs."""
    from datasets import Dataset, load_from_disk
    from trl import SFTConfig, SFTTrainer

    class LoaderTrainer(SFTTrainer):
        def get_train_dataloader(self) -> Any:
            rows = tm.pack(
                tm.open("data/tok").split("train"), seq_len=SEQ_LEN, method="best-fit", long_documents="split"
            )
            return tm.load(rows, batch_size=ROWS, framework="torch", layout="hf-flat", document_mask=True)

    config = SFTConfig(
        **settings(folder, ROWS),
        padding_free=True,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True} if kind == "loader" else {},
    )
    refuse_tokenizing()
    data = Dataset.from_dict({"input_ids": [[1]]}) if kind == "loader" else load_from_disk("data/rows")
    trainer = (LoaderTrainer if kind == "loader" else SFTTrainer)(
        make_model(), config, train_dataset=data, processing_class=make_tokenizer(), callbacks=[Report()]
    )
    trainer.train()


def train_dpo(folder: str, kind: str) -> None:
    """`DPOTrainer` on records, which it tokenizes, and `PairTrainer` on the store."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from tokenmill.loaders.trl import PairTrainer, as_dataset

    args = DPOConfig(**settings(folder, ROWS), max_length=256, truncation_mode="keep_start")
    if kind == "own":
        records = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
        trainer, data = DPOTrainer, Dataset.from_list(records)
    else:
        refuse_tokenizing()
        trainer, data = PairTrainer, as_dataset(tm.pairs(tm.open("data/pairs"), max_length=256))
    saved = max(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name[11:]), default=None)
    args.ignore_data_skip = False
    others = {"processing_class": make_tokenizer(), "callbacks": [Report()]}
    trainer(make_model(), make_model(), args, train_dataset=data, **others).train(resume_from_checkpoint=saved)


def make_tokenizer() -> Any:
    return PreTrainedTokenizerFast(tokenizer_file="tokenizer/tokenizer.json", eos_token="</s>", pad_token="</s>")


def refuse_tokenizing() -> None:
    """Fail if anything is tokenized from here on."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("the trainer tokenized again")

    PreTrainedTokenizerFast._encode_plus = fail
    PreTrainedTokenizerFast.__call__ = fail


def write_data() -> None:
    """Write a tokenizer, a store of pairs of it, and rows of the store of the recipes as `SFTTrainer` reads them."""
    from tests.conftest import make_texts
    from tests.supervision.test_supervision import make_tokenizer as make_small

    make_small(Path("tokenizer"))
    texts = [" ".join(text.split()[:12]) for text in make_texts(900, seed=3) if len(text.split()) > 3]
    lines = [
        {"prompt": a + " ", "chosen": b, "rejected": c} for a, b, c in zip(*[iter(texts)] * 3, strict=False) if b != c
    ]
    Path("pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:200]))
    tm.tokenize("pairs.jsonl", "data/pairs", tokenizer="tokenizer", special_tokens="parse", **PAIRS)
    # The export has the rows of the loader without a shuffle.
    tm.export("data/tok", "data/rows", to="hf", seq_len=SEQ_LEN, packing="best-fit", split="train")


def main(work: str) -> None:
    os.chdir(work)
    Path("data").unlink()
    Path("data").mkdir()
    Path("data/tok").symlink_to(Path("corpus").resolve().parent / "data" / "tok")
    write_data()

    def run(mode: str, folder: str, kind: str, world_size: int = 1, **kill: Any) -> Any:
        return run_ranks([__file__, mode, folder, kind], world_size, **kill)

    ready, ready_dpo = Path("killed/checkpoint-10/loader.json"), Path("dpo-killed/checkpoint-10/trainer_state.json")
    whole, own, pair, killed = together(
        lambda: run("train", "whole", "tokenmill"),
        lambda: run("train", "own", "own"),
        lambda: run("train", "pair", "tokenmill", 2),
        lambda: run("train", "killed", "tokenmill", 2, kill_after=11, until=ready),
    )
    num_compared = check_equal(whole, own, "Trainer's own DataLoader")
    check_equal(killed, pair, "before the kill")
    assert len(whole) == STEPS
    sft, sft_loader, dpo, dpo_own, _ = together(
        lambda: run("sft", "sft-export", "export"),
        lambda: run("sft", "sft-loader", "loader"),
        lambda: run("dpo", "dpo", "tokenmill"),
        lambda: run("dpo", "dpo-own", "own"),
        lambda: run("dpo", "dpo-killed", "tokenmill", kill_after=11, until=ready_dpo),
    )
    num_sft = check_equal(sft, sft_loader, "SFTTrainer on the export", 1e-5)
    num_dpo = check_equal(dpo, dpo_own, "DPOTrainer", 1e-5)
    again, dpo_again = together(
        lambda: run("train", "killed", "tokenmill"), lambda: run("dpo", "dpo-killed", "tokenmill")
    )
    check_equal(again, pair, "two ranks that were not killed", 1e-3)
    check_equal(dpo_again, dpo, "DPO that was not killed", 1e-5)
    row(
        version=f"transformers {version('transformers')}, trl {version('trl')}",
        steps=f"{len(whole)}; SFT {len(sft)}; DPO {len(dpo)}",
        resume=f"2 ranks killed at step 11, 1 rank from step {min(again) - 1}: losses of {len(again)} steps equal; "
        "DPO 1 rank, equal",
        **{
            "loss compared with": f"Trainer's own DataLoader, {num_compared} steps; SFT: export and loader, {num_sft}; "
            f"DPOTrainer on texts, {num_dpo}; all equal",
            "its data tests": "tests/interop/preferences.py, trl_templates.py",
            "needs a GPU": "FlashAttention",
        },
    )


if __name__ == "__main__":
    {"train": train, "sft": train_sft, "dpo": train_dpo}.get(sys.argv[1], lambda *_: main(sys.argv[1]))(*sys.argv[2:])
