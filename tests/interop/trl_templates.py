"""Loss masks compared, token by token, with the tagged chat templates that TRL ships for training.

    python tests/interop/trl_templates.py [FAMILY...]

TRL has pairs of templates: a model's own, and one with `{% generation %}` tags around what the assistant writes. For
every pair and every conversation of `conversations.py`, three templates are tokenized by `tokenmill tokenize`: the
model's own, the tagged one, and the tagged one without its tags, whose turns must then be found. Texts, ids and masks
are those of Transformers, except for these rules (docs/supervised.md), which are counted. Of templates without a tagged
one, the ids are compared.

    white space     after the end of a turn is not trained on
    prompt          the tokens that a turn shares with the generation prompt are not trained on
    stop            the token that hands over to the next speaker is trained on
    no content      calls without a content get an empty one where Transformers cannot render them

Where TRL's tagged template writes another text than the model's own, nothing can be compared for the latter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

import tokenmill as tm
from tests.conftest import make_texts
from tests.interop.conversations import CONVERSATIONS
from tests.interop.environments import environment
from tokenmill.display import Silence

DATE = "2026-01-31"
NAMES = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<pad>", "unk_token": "<unk>"}
MARKERS = re.compile(
    r"<[|｜][^<>\n ]*?[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_(?:turn|utterance)>|\[gMASK\]|<sop>|\[/?INST\]|<image>|</s>"
)
"""What the templates write as special tokens."""
PLAIN_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Tokens that are not special, as in the tokenizers of Qwen and GLM."""
VARIANTS = ("original", "untagged", "tagged")

PEER = """
import datetime, json, re, sys
from importlib.metadata import files
from transformers import PreTrainedTokenizerFast
import transformers.utils.chat_template_utils as chat

class Fixed(datetime.datetime):
    @classmethod
    def now(cls):
        return cls(*map(int, sys.argv[4].split("-")))

chat.datetime = Fixed
conversations, names = json.load(open(sys.argv[1])), json.load(open(sys.argv[2]))
folder = next(f for f in files("trl") if str(f).startswith("trl/chat_templates/")).locate().parent
tags = [(r"\\{%(-?)\\s*generation\\s*(-?)%\\}", r"{%\\1 if true \\2%}"), (r"\\{%(-?)\\s*endgeneration\\s*(-?)%\\}", r"{%\\1 endif \\2%}")]
if sys.argv[3] == "templates":
    found = {}
    for path in sorted(folder.glob("*.jinja")):
        family, training = path.stem, folder / (path.stem + "_training.jinja")
        tagged = untagged = training.read_text() if training.exists() else path.read_text()
        for pattern, plain in tags:
            untagged = re.sub(pattern, plain, untagged)
        if not family.endswith("_training"):
            found[family] = {"original": path.read_text()}
            found[family] |= {"untagged": untagged, "tagged": tagged} if tagged != untagged else {}
    print(json.dumps(found))
    raise SystemExit
templates, tokenizer = json.load(open(sys.argv[5])), PreTrainedTokenizerFast(tokenizer_file=sys.argv[3], **names)
for family, sources in templates.items():
    for name, record in conversations.items():
        row = {"family": family, "name": name}
        asked = lambda count, source: tokenizer.apply_chat_template(
            record["messages"][:count], tools=record.get("tools"), chat_template=source, tokenize=False,
            add_generation_prompt=True)
        for variant, source in sources.items():
            try:
                options = dict(tools=record.get("tools"), chat_template=source)
                text = tokenizer.apply_chat_template(record["messages"], tokenize=False, **options)
                made = tokenizer.apply_chat_template(record["messages"], tokenize=True, return_dict=True,
                    return_assistant_tokens_mask=variant == "tagged", **options)
                row[variant] = {"text": text, "ids": made["input_ids"], "mask": made.get("assistant_masks")}
            except Exception as error:
                row[variant] = {"error": f"{type(error).__name__}: {error}"}
        prompts = []
        for number, message in enumerate(record["messages"]):
            for variant in sources if message["role"] == "assistant" else ():
                try:
                    prompts.append(asked(number, sources[variant]))
                except Exception:
                    pass
        row["prompts"] = prompts
        print(json.dumps(row))
"""


def run_peer(*arguments: str) -> str:
    done = subprocess.run(
        [str(environment("trl_templates")), "-c", PEER, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout


def make_tokenizer(folder: Path, templates: dict[str, dict[str, str]]) -> Path:
    """Train a byte-level tokenizer in which the templates' markers are tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    markers = {
        mark for sources in templates.values() for source in sources.values() for mark in MARKERS.findall(source)
    }
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(make_texts(500, seed=4), trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in sorted(markers | set(NAMES.values()))])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in PLAIN_TOKENS])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMES))
    return folder


def tokenize(work: Path, family: str, variant: str, source: str, tokenizer: Path) -> dict[str, Any]:
    """Return the ids and the mask of each conversation that is in the store, and the reason of each that is not."""
    template, out = work / "template.jinja", work / f"{family}-{variant}"
    template.write_text(source)
    try:
        store = tm.tokenize(
            work / "conversations.jsonl",
            out,
            tokenizer=str(tokenizer),
            messages_key="messages",
            chat_template=str(template),
            template_date=DATE,
            keep_keys=["name"],
            on_error="skip",
            bos=False,
            allow_no_stop=True,
            workers=1,
            display=Silence(),
        )
    except tm.TokenmillError as error:
        return {name: str(error) for name in CONVERSATIONS}
    documents = store.split("train")
    assert documents.mask is not None
    lines = (
        [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
        if (out / "rejects.jsonl").exists()
        else []
    )
    names = list(CONVERSATIONS)
    found: dict[str, Any] = {names[line["line"] - 1]: line["detail"] for line in lines}
    for number, name in enumerate(name for name in names if name not in found):
        found[name] = (documents.document(number).tolist(), documents.mask.document(number).tolist())
    return found


def compare(library: tokenizers.Tokenizer, ours: Any, row: dict[str, Any], variant: str) -> list[str]:
    """Return the rules by which two masks of one conversation differ; what is not a rule begins with `WRONG`."""
    theirs, tagged = row[variant], row.get("tagged")
    if isinstance(ours, str):
        return [
            "both refuse" if "error" in theirs else f"we refuse: {re.sub('message [0-9]+', 'a message', ours)[:80]}"
        ]
    if "error" in theirs:
        if "content" in theirs["error"] and row["name"] == "null content":
            return ["no content"]
        return [f"WRONG only Transformers refuses: {theirs['error']}"]
    ids, mask = ours
    if ids != theirs["ids"]:
        return [f"WRONG ids of {theirs['text']!r}"]
    if tagged is None:
        return ["ids are equal, no tagged template"]
    if "error" in tagged or tagged["ids"] != ids:
        return ["tagged text differs"]
    rules = set()
    number = 0
    while number < len(ids):
        start = number
        while number < len(ids) and mask[number] != tagged["mask"][number] and mask[number] == mask[start]:
            number += 1
        if number > start:
            rules.add(_rule(library, ids, mask, start, number, row["prompts"]))
        number = max(number, start + 1)
    return sorted(rules) or ["equal"]


def _rule(
    library: tokenizers.Tokenizer, ids: list[int], mask: list[int], start: int, stop: int, prompts: list[str]
) -> str:
    """Name the rule by which the masks differ in some tokens."""
    text = library.decode(ids[start:stop], skip_special_tokens=False)
    if mask[start]:
        one_token = stop == start + 1 and library.id_to_token(ids[start]) == text
        return "stop" if one_token else f"WRONG we also train on {text!r}"
    if text.isspace() and start and mask[start - 1]:
        return "white space"
    if any(text in prompt[-len(text) - 40 :] for prompt in prompts):
        return "prompt"
    return f"WRONG we do not train on {text!r}"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        inputs, names = work / "conversations.json", work / "names.json"
        inputs.write_text(json.dumps(CONVERSATIONS))
        names.write_text(json.dumps(NAMES))
        lines = [json.dumps({"name": key, **record}) + "\n" for key, record in CONVERSATIONS.items()]
        (work / "conversations.jsonl").write_text("".join(lines))
        templates = json.loads(run_peer(str(inputs), str(names), "templates", DATE))
        chosen = {family: templates[family] for family in sys.argv[1:]} or templates
        (work / "templates.json").write_text(json.dumps(chosen))
        tokenizer = make_tokenizer(work / "tokenizer", templates)
        library = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        arguments = (str(inputs), str(names), str(tokenizer / "tokenizer.json"), DATE, str(work / "templates.json"))
        theirs = {(row["family"], row["name"]): row for row in map(json.loads, run_peer(*arguments).splitlines())}
        tally: Counter[tuple[str, str]] = Counter()
        wrong = 0
        for family, sources in chosen.items():
            for variant in sources:
                ours = tokenize(work, family, variant, sources[variant], tokenizer)
                for key in CONVERSATIONS:
                    row = theirs[family, key]
                    found = compare(library, ours[key], row, variant)
                    if (
                        variant == "tagged"
                        and found != ["equal"]
                        and not any("refuse" in rule or rule == "no content" for rule in found)
                    ):
                        found = [f"WRONG {found}"]
                    for rule in found:
                        if rule.startswith("WRONG"):
                            wrong += 1
                            print(f"{family}, {variant}, {key}: {rule}")
                    tally[variant, " and ".join(sorted(rule for rule in found))] += 1
    pairs = sum("tagged" in sources for sources in chosen.values())
    print(f"{pairs} tagged templates, {len(chosen) - pairs} others, {len(CONVERSATIONS)} conversations each")
    for (variant, rule), count in sorted(tally.items(), key=lambda item: (VARIANTS.index(item[0][0]), -item[1])):
        print(f"{variant:9} {count:4}  {rule}")
    print(f"trl_templates: {wrong} differences that no rule explains")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
