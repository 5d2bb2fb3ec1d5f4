"""Conversations as Transformers renders them: texts, ids and, for templates with generation tags, masks must be equal.

    python tests/interop/chat.py [CHAT_TOKENIZER...]

Uses the real tokenizers and conversations of `../shared/data` where they are, and small ones of its own in any case.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zstandard

import tokenmill as tm
from tests.interop.environments import environment
from tests.supervision.test_chat import ALTERNATES, ALWAYS_PROMPTS, CHATML, TAGS, THINKS
from tests.supervision.test_supervision import make_records, make_tokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"

PEER = """
import json, sys
from transformers import PreTrainedTokenizerFast
folder, records = sys.argv[1], [json.loads(line) for line in open(sys.argv[2])]
config = json.load(open(folder + "/tokenizer_config.json"))
names = {n: (t["content"] if isinstance(t, dict) else t) for n, t in config.items() if n in ("bos_token", "eos_token") and t}
tokenizer = PreTrainedTokenizerFast(tokenizer_file=folder + "/tokenizer.json", chat_template=config["chat_template"], **names)
for record in records:
    got = tokenizer.apply_chat_template(record["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    text = tokenizer.apply_chat_template(record["messages"], tokenize=False)
    print(json.dumps({"text": text, "ids": got["input_ids"], "mask": got["assistant_masks"]}))
"""


def compare(folder: Path, records: list[dict[str, Any]], work: Path) -> int:
    """Tokenize with tokenmill, render with Transformers; return the number of conversations that were equal."""
    path = work / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    theirs = subprocess.run(
        [str(environment("transformers")), "-c", PEER, str(folder), str(path)],
        check=True,
        capture_output=True,
        text=True,
    )
    store = tm.tokenize(path, work / "store", tokenizer=str(folder), messages_key="messages", overwrite=True, bos=False)
    documents = store.split("train")
    has_tags = "{% generation %}" in (store.tokenizer.chat_template or "")
    assert documents.mask is not None and len(documents) == len(records)
    for number, line in enumerate(theirs.stdout.splitlines()):
        expected = json.loads(line)
        assert documents.document(number).tolist() == expected["ids"], (folder.name, number)
        if has_tags:
            assert documents.mask.document(number).tolist() == expected["mask"], (folder.name, number)
    return len(records)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        templates = {
            "chatml": CHATML,
            "always": ALWAYS_PROMPTS,
            "thinks": THINKS,
            "alternates": ALTERNATES,
            "tags": TAGS,
        }
        folders = {key: make_tokenizer(work / key, template=source) for key, source in templates.items()}
        records = [record for record in make_records(300) if "messages" in record]
        for key, folder in folders.items():
            masks = ", masks too" if key == "tags" else ""
            print(f"{key}: {compare(folder, records, work)} conversations equal{masks}")
        if SHARED.is_dir():
            with (SHARED / "chat.jsonl.zst").open("rb") as file:
                lines = zstandard.ZstdDecompressor().stream_reader(file).read().splitlines()
            real = [record for record in map(json.loads, lines) if "messages" in record]
            for key in sys.argv[1:] or ["qwen3", "llama3"]:
                print(f"{key}: {compare(SHARED / 'tokenizers' / key, real, work)} real conversations equal")


if __name__ == "__main__":
    main()
