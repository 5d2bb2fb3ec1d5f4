"""Preference pairs as TRL's `DPOTrainer` prepares them: ids, cuts and losses must be equal.

    python tests/interop/preferences.py [PAIRS]

PAIRS is how many records to compare with each template (8). Every template that TRL ships is compared with a tokenizer
of `../shared/data` where that is, and a small tokenizer in any case. Prints a tally; a difference is an error.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import zstandard

import tokenmill as tm
from tests.conftest import make_texts
from tests.interop.environments import ROOT, environment
from tests.supervision.test_supervision import make_tokenizer
from tests.support.running import tokenize_here

SHARED = ROOT.parent / "shared" / "data"
PEER = ROOT / "tests" / "interop" / "peers" / "prepare_trl.py"
MODES = ("keep_start", "keep_end")
COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")
Record = dict[str, Any]
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}


def make_plain(count: int) -> list[Record]:
    """Plain pairs with and without a prompt of their own; some prompts end inside of a token."""
    texts = [text for text in make_texts(4 * count, seed=3, longest=40) if text.strip()]
    records: list[Record] = []
    for number in range(count):
        prompt, chosen, rejected = (texts[(3 * number + place) % len(texts)] for place in range(3))
        chosen, rejected = f"{chosen} {number}", f"{rejected} no"
        if number % 3 == 0:
            records.append({"chosen": f"{prompt} {chosen}", "rejected": f"{prompt} {rejected}"})
        else:
            cut = "" if number % 3 == 1 else " a wor"
            records.append({"prompt": prompt + cut, "chosen": f"ld {chosen}", "rejected": f"lds {rejected}"})
    return records


def make_talks(count: int) -> list[Record]:
    """Conversations of several turns, some with a system message, with tools or with a prompt of their own."""
    records: list[Record] = []
    for number, messages in enumerate(_conversations(count)):
        *opening, answer = messages
        said = answer["content"]
        others = f"{said[: len(said) // 2]} I do not know, {number}.", f"No, {said}", " ".join(said.split()[::-1]) + "!"
        other = {**answer, "content": others[number % 3]}
        record: Record = {"chosen": [answer], "rejected": [other], "prompt": opening}
        if number // 2 % 2:
            record = {"chosen": [*opening, answer], "rejected": [*opening, other]}
        if number % 5 == 4:
            record["tools"] = [TOOL]
        if number % 7 == 6:
            more = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
            record["chosen"] = record["chosen"] + more
        records.append(record)
    return records


def _conversations(count: int) -> list[list[Record]]:
    if not SHARED.is_dir():
        texts = [text for text in make_texts(3 * count, seed=5, longest=30) if text.strip()]
        ask, say = ({"role": role} for role in ("user", "assistant"))
        return [[{**ask, "content": texts[n % len(texts)]}, {**say, "content": texts[-n - 1]}] for n in range(count)]
    with (SHARED / "chat.jsonl.zst").open("rb") as file:
        lines = zstandard.ZstdDecompressor().stream_reader(file).read().splitlines()
    talks = [record["messages"] for record in map(json.loads, lines) if "messages" in record]
    return [talk for talk in talks if talk[-1]["role"] == "assistant"][:: max(1, len(talks) // count)][:count]


def our_columns(store: tm.TokenStore, **cut: Any) -> dict[int, Record]:
    """The columns of each record's row by number of the record, which --keep-keys kept, and the padded arrays."""
    found: dict[int, Record] = {}
    try:
        rows = tm.pairs(store, **cut)
    except tm.UsageError as error:
        if "no pair of" not in str(error):
            raise
        return found
    loader = tm.Loader(rows, batch_size=1, epochs=1)
    for batch in loader:
        columns = {name: batch[name][0] for name in COLUMNS}
        arrays = {name: batch[name][0] for name in batch if isinstance(batch[name], np.ndarray)}
        found[int(batch["fields"]["number"][0])] = {**columns, "arrays": arrays}
    return found


class Comparison:
    """The cases for TRL, their stores, and the tally."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self.cases: list[Record] = []
        self._stores: list[tuple[str, tm.TokenStore | None]] = []
        self.tally: Counter[str] = Counter()
        self.differing: list[str] = []

    def add(self, name: str, tokenizer: Path, template: Path | None, records: list[Record], max_length: int) -> None:
        """Tokenize the records of a case, leaving out what cannot be tokenized."""
        place = self._work / f"case-{len(self.cases)}"
        path = place.with_suffix(".jsonl")
        path.write_text("".join(json.dumps({**record, "number": n}) + "\n" for n, record in enumerate(records)))
        prompt = {"prompt_key": "prompt"} if "prompt" in records[0] else {}
        chat = {"chat_template": str(template)} if template is not None else {}
        store = None
        try:
            # Like Transformers, parse special tokens in texts, and leave BOS to the template.
            store = tokenize_here(
                path,
                place,
                tokenizer=str(tokenizer),
                chosen_key="chosen",
                rejected_key="rejected",
                keep_keys=["number"],
                special_tokens="parse",
                on_error="skip",
                bos=False if template is not None else None,
                **prompt,
                **chat,
            )
        except tm.TokenmillError as error:
            if not str(error).startswith("all "):
                raise
        self._stores.append((name, store))
        case = {"tokenizer": str(tokenizer), "template": str(template) if template else None, "records": records}
        self.cases.append({**case, "max_length": max_length})

    def run(self) -> None:
        """Let TRL prepare all cases, and compare."""
        (self._work / "cases.json").write_text(json.dumps(self.cases))
        out = run_peer(self._work / "cases.json", self._work / "prepared.jsonl")
        for (name, store), case, theirs in zip(self._stores, self.cases, out, strict=True):
            self._compare(name, store, case, theirs)

    def _compare(self, name: str, store: tm.TokenStore | None, case: Record, theirs: list[Record]) -> None:
        ours = our_columns(store) if store is not None else {}
        most = case["max_length"]
        cuts = {} if store is None else {m: our_columns(store, max_length=most, long_documents=m) for m in MODES}
        for number, expected in enumerate(theirs):
            found = ours.get(number)
            if found is None or "refused" in expected:
                self._count_refused(f"{name}, record {number}", found is None, expected)
                continue
            equal = all(found[column] == expected[column] for column in COLUMNS)
            if not equal:
                self.differing.append(f"{name}, record {number}: ids differ")
            self.tally["equal ids" if equal else "different ids"] += 1
            for mode, rows in cuts.items():
                self._compare_cut(f"{name}, record {number}, {mode}", rows.get(number), expected["batches"][mode])

    def _count_refused(self, name: str, is_refused: bool, expected: Record) -> None:
        if is_refused and "refused" in expected:
            self.tally["refused by both"] += 1
        elif is_refused and expected["chosen_ids"] == expected["rejected_ids"]:
            # Two templates for images write no content that is a plain string.
            self.tally["refused here, and both answers equal in TRL"] += 1
        else:
            self.tally["refused by one only"] += 1
            self.differing.append(f"{name}: {expected.get('refused', 'prepared')} by TRL")

    def _compare_cut(self, name: str, found: Record | None, batch: Record) -> None:
        """Compare a pair that was cut with TRL's collator; one without a row must be without a difference there."""
        ids = batch["input_ids"]
        if found is None:
            good = ids[0] == ids[1]
            self.tally["left out, as equal once cut" if good else "left out for nothing"] += 1
        else:
            good = ids[0] != ids[1]
            for side, row in (("chosen", 0), ("rejected", 1)):
                length = sum(batch["attention_mask"][row])
                mask = np.array(batch["completion_mask"][row][:length])
                arrays = found["arrays"]
                good &= arrays[f"input_ids_{side}"].tolist()[:length] == ids[row][:length]
                good &= int(arrays[f"attention_mask_{side}"].sum()) == length
                good &= bool(((arrays[f"labels_{side}"][:length] != -100) == mask).all())
            self.tally["equal cuts" if good else "different cuts"] += 1
        if not good:
            self.differing.append(f"{name}: the cut differs")


def run_peer(cases: Path, out: Path) -> list[Any]:
    """Run TRL in its environment; tokenmill's code is found by its path."""
    command = [str(environment("trl")), str(PEER), str(cases), str(out)]
    variables = {
        "PYTHONPATH": str(ROOT / "src"),
        "PATH": "/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(out.parent),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in out.read_text().splitlines()]


def compare_losses(work: Path, tokenizer: Path, template: Path) -> None:
    """Run real trainers for four steps on records as TRL prepares them, and on the store; losses must be equal."""
    records = [record for record in make_plain(60) if "prompt" in record]
    flags = {"tokenizer": str(tokenizer), "chat_template": str(template), "special_tokens": "parse"}
    flags |= {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected", "keep_keys": ["number"]}

    def make(name: str, records: list[Record]) -> tm.TokenStore:
        path = work / f"{name}.jsonl"
        path.write_text("".join(json.dumps({**record, "number": n}) + "\n" for n, record in enumerate(records)))
        return tokenize_here(path, work / name, **flags)

    # TRL trains on pairs that the cut makes equal, and rows leave them out; compare where there are none.
    most, everything, cases = 60, make("all", records), []
    for mode in MODES:
        kept = our_columns(everything, max_length=most, long_documents=mode)
        some = [records[number] for number in sorted(kept)]
        store = make(mode, some)
        cut = tm.pairs(store, max_length=most, long_documents=mode)
        assert not cut.report.left_out and cut.report.num_truncated_documents > 4, cut
        case = {"tokenizer": str(tokenizer), "template": str(template), "records": some, "store": str(store.path)}
        cases.append({**case, "max_length": most, "truncation_mode": mode})
    (work / "train.json").write_text(json.dumps(cases))
    for case, both in zip(cases, run_peer(work / "train.json", work / "losses.jsonl"), strict=True):
        assert len(both["ours"]) == 4 and np.allclose(both["ours"], both["theirs"], rtol=1e-5), both
        print(f"DPOTrainer, {case['truncation_mode']}: four losses equal, {both['ours']}")


def main() -> None:
    """Compare and print the tally."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    where = "import trl, pathlib; print(pathlib.Path(trl.__file__).parent / 'chat_templates')"
    found = subprocess.run([str(environment("trl")), "-c", where], capture_output=True, text=True, check=True)
    templates = sorted(Path(found.stdout.splitlines()[-1]).glob("*.jinja"))
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        small = make_tokenizer(work / "small")
        names = ["bytebpe8k", "gpt2", "llama2", "llama3", "qwen3"] if SHARED.is_dir() else []
        tokenizers = [small, *(SHARED / "tokenizers" / one for one in names)]
        comparison = Comparison(work)
        for tokenizer in tokenizers:
            plain = make_plain(5 * count)
            for is_asked in (True, False):
                some = [record for record in plain if ("prompt" in record) is is_asked]
                comparison.add(f"{tokenizer.name} plain", tokenizer, None, some, max_length=30)
        talks = make_talks(count)
        for number, shipped in enumerate(templates):
            # A template that writes the date of today has no ids to compare: take the clock away from both sides.
            template = work / shipped.name
            template.write_text(shipped.read_text().replace("strftime_now", "no_clock"))
            tokenizer = tokenizers[number % len(tokenizers)]
            some = [record for record in talks if ("prompt" in record) is (number % 2 == 0)]
            comparison.add(f"{tokenizer.name} {template.stem}", tokenizer, template, some, max_length=200)
        comparison.run()
        for what, times in sorted(comparison.tally.items()):
            print(f"{times:6} {what}")
        for line in comparison.differing:
            print(line)
        compare_losses(work, small, work / "qwen3.jinja")
    sys.exit(bool(comparison.differing))


if __name__ == "__main__":
    main()
