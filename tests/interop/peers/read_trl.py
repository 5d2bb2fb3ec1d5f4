"""TRL's `SFTTrainer` takes one step on each export; Transformers' `DataCollatorWithFlattening` makes our flat batches.

The loss of the step must be that of the store's own mask: every document by itself, each trained token once.
"""

import json
import sys
import tempfile
from pathlib import Path

import datasets
import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

VOCAB, SEEDS = 320, 3
WORDS = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1, "x": 2}, unk_token="x"))


class Recording(SFTTrainer):
    losses = ()

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.losses += (loss.item(),)
        return loss


def make_model(seed):
    torch.manual_seed(seed)
    size = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=8192, **size)
    model = LlamaForCausalLM(config)
    for weights in model.parameters():
        torch.nn.init.normal_(weights, std=0.3)  # so that attention to other documents would change the loss
    return model


def own_loss(model, sequences):
    """The mean over all trained tokens that have one before them in their document."""
    total, count = 0.0, 0
    with torch.no_grad():
        for ids, mask in sequences:
            chosen = [place for place in range(1, len(ids)) if mask[place]]
            if chosen:
                logits = model(torch.tensor([ids])).logits[0]
                targets = torch.tensor([ids[place] for place in chosen])
                before = torch.tensor([place - 1 for place in chosen])
                total += torch.nn.functional.cross_entropy(logits[before], targets, reduction="sum").item()
                count += len(chosen)
    return total / count, count


def load(case):
    if case["to"] == "hf":
        return datasets.load_from_disk(case["folder"])
    (data,) = datasets.load_dataset(case["folder"], cache_dir=tempfile.mkdtemp()).values()
    return data


def check_steps(case):
    data = load(case)
    for settings in case["configs"]:
        model = make_model(len(data))
        ignores_mask = settings.pop("ignores_mask", False)
        sequences = [(ids, [1] * len(ids)) for ids, _ in case["sequences"]] if ignores_mask else case["sequences"]
        expected, count = own_loss(model, sequences)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=WORDS, pad_token="<pad>", eos_token="</s>")
        config = SFTConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=len(data),
            max_steps=1,
            learning_rate=0.1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            **settings,
        )
        before = model.lm_head.weight.detach().clone()
        trainer = Recording(model, args=config, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        (loss,) = trainer.losses
        assert abs(loss - expected) < 2e-5 * expected, (case["name"], settings, loss, expected)
        assert not torch.equal(before, model.lm_head.weight)
        print(f"trl        {case['name']:<24} {len(data)} rows, {count} trained tokens, loss {loss:.5f} {settings}")


def check_flat(case):
    features = [{"input_ids": ids, "labels": labels} for ids, labels in case["sequences"]]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    for kind in ("pt", "np"):
        expected = collate(features, return_tensors=kind)
        assert list(expected) == list(case["flat"]), (case["name"], list(expected))
        for name, part in expected.items():
            found = case["flat"][name]
            if isinstance(part, int):
                assert found == part, (case["name"], name)
                continue
            values, dtype, shape = found
            assert values == part.tolist(), (case["name"], name)
            assert dtype == (str(part.dtype) if kind == "pt" else f"torch.{np.dtype(part.dtype).name}"), name
            assert shape == list(part.shape), name
    return len(features)


flat = 0
for case in json.loads(Path(sys.argv[1]).read_bytes()):
    if "flat" in case:
        flat += check_flat(case)
    else:
        check_steps(case)
print(f"trl        {flat} sequences flattened as DataCollatorWithFlattening does")
