"""Preference pairs as TRL's own trainer prepares them, and a few steps of DPO on both preparations.

    python prepare_trl.py CASES.json OUT.jsonl

For each record of a case: the columns of `DPOTrainer._prepare_dataset`, or why TRL cannot prepare it. For a case with
`store`, the losses of a tiny random model on TRL's columns and on the store's, record by record in the same order.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset, disable_progress_bars
from datasets.utils.logging import set_verbosity_error
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")


def load_tokenizer(case):
    folder = Path(case["tokenizer"])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    names = {
        n: (t["content"] if isinstance(t, dict) else t)
        for n, t in config.items()
        if n in ("bos_token", "eos_token") and t
    }
    template = Path(case["template"]).read_text() if case["template"] else None
    file = str(folder / "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=file, chat_template=template, **names)


def prepare(records, tokenizer):
    """TRL's columns for each record, or why it has none; one by one if it cannot prepare them together."""
    args = DPOConfig(output_dir="unused", report_to=[], bf16=False, use_cpu=True, max_length=None)
    try:
        trainer = SimpleNamespace(_tokenizer=tokenizer)
        return list(DPOTrainer._prepare_dataset(trainer, Dataset.from_list(records), tokenizer, args, "train"))
    except Exception as error:
        if len(records) == 1:
            return [{"refused": f"{type(error).__name__}: {error}"[:200]}]
        return [prepare([record], tokenizer)[0] for record in records]


def prepare_case(records, tokenizer):
    """TRL's columns for each record; a table of all records would add nulls to the tools, so these go one by one."""
    plain = iter(prepare([record for record in records if "tools" not in record], tokenizer))
    return [prepare([record], tokenizer)[0] if "tools" in record else next(plain) for record in records]


def cut(prepared, max_length, mode):
    collator = DataCollatorForPreference(pad_token_id=0, max_length=max_length, truncation_mode=mode)
    return {name: value.tolist() for name, value in collator([prepared]).items()}


def losses(trainer_class, dataset, tokenizer, folder, case):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=512, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    torch.manual_seed(1)
    reference = GPT2LMHeadModel(config)
    args = DPOConfig(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        bf16=False,
        max_steps=4,
        per_device_train_batch_size=4,
        logging_steps=1,
        learning_rate=1e-2,
        seed=7,
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        max_length=case["max_length"],
        truncation_mode=case["truncation_mode"],
    )
    trainer = trainer_class(
        model=model, ref_model=reference, args=args, train_dataset=dataset, processing_class=tokenizer
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(case, tokenizer, folder):
    import tokenmill as tm
    from tokenmill.loaders.trl import PairTrainer, as_dataset

    rows = tm.pairs(tm.open(case["store"]), max_length=case["max_length"], long_documents=case["truncation_mode"])
    theirs = losses(DPOTrainer, Dataset.from_list(case["records"]), tokenizer, folder / "theirs", case)
    ours = losses(PairTrainer, as_dataset(rows), tokenizer, folder / "ours", case)
    return {"theirs": theirs, "ours": ours}


def main():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bars()
    set_verbosity_error()
    cases = json.loads(Path(sys.argv[1]).read_text())
    with open(sys.argv[2], "w") as out:
        for case in cases:
            tokenizer = load_tokenizer(case)
            if case.get("store"):
                print(json.dumps(train(case, tokenizer, Path(sys.argv[2]).parent)), file=out)
                continue
            found = []
            for whole in prepare_case(case["records"], tokenizer):
                if "refused" not in whole:
                    modes = ("keep_start", "keep_end")
                    batches = {mode: cut(whole, case["max_length"], mode) for mode in modes}
                    whole = {**{name: whole[name] for name in COLUMNS}, "batches": batches}
                found.append(whole)
            print(json.dumps(found), file=out)


main()
