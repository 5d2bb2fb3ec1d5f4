"""Preference pairs and prompts alone, from records to stores: ids, masks, rejects, splits, ranks, checks."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.supervision.test_supervision import chat_tokenizer, make_tokenizer, write_records
from tests.support.in_process import tokenmill_here
from tests.support.running import tokenize_here
from tests.support.stores import count_shared
from tokenmill.errors import DataError, StoreError, UsageError
from tokenmill.tools.status import read_status
from tokenmill.tools.verify import verify

__all__ = ["chat_tokenizer"]

Record = dict[str, Any]
KEYS: Record = {"chosen_key": "chosen", "rejected_key": "rejected"}
ASKED: Record = {"prompt_key": "prompt", **KEYS}


def ask(content: str) -> Record:
    return {"role": "user", "content": content}


def say(content: str) -> Record:
    return {"role": "assistant", "content": content}


def texts_of(store: tm.TokenStore, number: int, split: str = "train") -> tuple[str, str]:
    """The text of a document that is not trained on, and the one that is."""
    documents = store.split(split)
    assert documents.mask is not None
    ids, mask = documents.document(number), documents.mask.document(number)
    assert (np.diff(mask.astype(int)) >= 0).all()
    return store.decode(ids[mask == 0]), store.decode(ids[mask == 1])


def make_store(tmp_path: Path, tokenizer: Path, records: list[Record], **flags: Any) -> tm.TokenStore:
    path = write_records(tmp_path / "in.jsonl", records)
    return tokenize_here(path, tmp_path / "out", tokenizer=str(tokenizer), **flags)


def test_plain_answers_follow_their_prompt_and_end_with_eos(tmp_path: Path, chat_tokenizer: Path) -> None:
    records = [{"prompt": "Two and two?", "chosen": " Four.", "rejected": " Five, ähm."}]
    store = make_store(tmp_path, chat_tokenizer, records, **ASKED, bos=True)
    assert texts_of(store, 0) == ("<s>Two and two?", " Four.</s>")
    assert texts_of(store, 1) == ("<s>Two and two?", " Five, ähm.</s>")
    assert store.manifest.holds == "pairs" and store.manifest.num_documents_in == 1
    assert (tmp_path / "out" / "manifest.json").read_text().rstrip().endswith('"holds": "pairs"\n}')


def test_a_template_is_split_before_its_response(tmp_path: Path, chat_tokenizer: Path) -> None:
    records = [{"prompt": "one", "chosen": "two", "rejected": "three"}]
    template = "Question: {prompt}\\nAnswer: {response}."
    store = make_store(tmp_path, chat_tokenizer, records, **ASKED, template=template)
    assert texts_of(store, 0) == ("Question: one\nAnswer: ", "two.</s>")


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Q: why? Because.", "Q: why? No idea.", "Q: why?"),
        ("Q: why? Because.", "Q: why? Because. It is.", "Q: why? Because"),
        ("ab", "ac", "a"),
    ],
)
def test_answers_without_a_prompt_share_their_beginning(
    tmp_path: Path, chat_tokenizer: Path, chosen: str, rejected: str, prompt: str
) -> None:
    store = make_store(tmp_path, chat_tokenizer, [{"chosen": chosen, "rejected": rejected}], **KEYS)
    found = [texts_of(store, number) for number in (0, 1)]
    assert [asked + answer for asked, answer in found] == [f"{chosen}</s>", f"{rejected}</s>"]
    # The prompt ends where the tokens of all three texts end; a token across its end belongs to the answers.
    assert found[0][0] == found[1][0] and prompt.startswith(found[0][0])


def test_conversations_share_their_first_messages_or_have_a_prompt(tmp_path: Path, chat_tokenizer: Path) -> None:
    opening = [{"role": "system", "content": "Be brief."}, ask("Up?"), say("Yes."), ask("Down?")]
    whole = {"chosen": [*opening, say("No.")], "rejected": [*opening, say("Yes."), ask("Sure?"), say("No.")]}
    apart = {"prompt": opening, "chosen": [say("No.")], "rejected": whole["rejected"][4:]}
    first = make_store(tmp_path / "a", chat_tokenizer, [whole], **KEYS) if (tmp_path / "a").mkdir() is None else None
    (tmp_path / "b").mkdir()
    second = make_store(tmp_path / "b", chat_tokenizer, [apart], **ASKED)
    assert first is not None
    asked, answer = texts_of(first, 1)
    assert asked.endswith("<|im_start|>assistant\n") and "Down?" in asked
    # As TRL does, everything after the prompt is trained on, later questions too.
    assert answer.startswith("Yes.<|im_end|>") and "Sure?" in answer
    for number in (0, 1):
        assert texts_of(first, number) == texts_of(second, number)


BAD: list[tuple[Record, str]] = [
    ({"prompt": "a", "chosen": "b"}, "missing-field"),
    ({"prompt": None, "chosen": "b", "rejected": "c"}, "missing-field"),
    ({"prompt": "a", "chosen": 3, "rejected": "c"}, "not-a-string"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "equal-answers"),
    ({"prompt": "a", "chosen": "", "rejected": "b"}, "no-answer"),
    ({"prompt": "a", "chosen": [say("b")], "rejected": [say("c")]}, "mixed-types"),
    ({"prompt": "a", "chosen": "b", "rejected": [say("c")]}, "mixed-types"),
    ({"prompt": [ask("a")], "chosen": [], "rejected": [say("c")]}, "no-answer"),
    ({"prompt": [], "chosen": [say("b")], "rejected": [say("c")]}, "bad-messages"),
    ({"prompt": [ask("a")], "chosen": [ask("x"), say("b")], "rejected": [say("c")]}, "different-prompts"),
    (
        {"prompt": [ask("a")], "chosen": [ask("a"), say("b")], "rejected": [ask("a"), say("c")]},
        "repeated-prompt",
    ),
    ({"prompt": [{"from": "human", "value": "a"}], "chosen": [say("b")], "rejected": [say("c")]}, "bad-messages"),
    ({"prompt": "a<|im_end|>", "chosen": "b", "rejected": "c"}, "special-token"),
    ({"prompt": [ask("a")], "chosen": [say("b")], "rejected": [say("c")], "tools": "{"}, "bad-tools"),
]


@pytest.mark.parametrize(
    ("record", "reason"), BAD, ids=[f"{number} {reason}" for number, (_, reason) in enumerate(BAD)]
)
def test_a_bad_side_rejects_the_pair_and_counts_once(
    tmp_path: Path, chat_tokenizer: Path, record: Record, reason: str
) -> None:
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    store = make_store(tmp_path, chat_tokenizer, [good, record, good], **ASKED, on_error="skip", keep_keys=["prompt"])
    assert store.manifest.rejects == {reason: 1} and len(store.split()) == 4
    assert store.manifest.num_documents_in == 3 and store.manifest.num_records == 2
    (line,) = (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()
    assert json.loads(line)["line"] == 2 and json.loads(line)["reason"] == reason
    result = verify(tmp_path / "out", against=[str(tmp_path / "in.jsonl")], every=True)
    assert result.is_sound, result.problems
    with pytest.raises(DataError, match="line 2: "):
        make_store(tmp_path / "out", chat_tokenizer, [good, record], **ASKED, overwrite=True)


def test_different_prompts_without_a_prompt_field_are_rejects(tmp_path: Path, chat_tokenizer: Path) -> None:
    records = [
        {"chosen": [ask("a"), say("b")], "rejected": [ask("x"), say("b")]},
        {"chosen": [say("b")], "rejected": [say("c")]},
        {"chosen": "yes", "rejected": "no"},
        {"chosen": "yes, sir", "rejected": "yes"},
    ]
    store = make_store(tmp_path, chat_tokenizer, records, **KEYS, on_error="skip")
    assert store.manifest.rejects == {"different-prompts": 3} and store.manifest.num_records == 1


def test_answers_that_a_normalizer_makes_equal_are_rejects(tmp_path: Path) -> None:
    from tokenizers import normalizers

    tokenizer = make_tokenizer(tmp_path / "tokenizer", normalizer=normalizers.Lowercase())
    records = [
        {"prompt": "a ", "chosen": "Yes", "rejected": "yes"},
        {"prompt": "a ", "chosen": "No", "rejected": "yes"},
    ]
    store = make_store(tmp_path, tokenizer, records, **ASKED, on_error="skip")
    assert store.manifest.rejects == {"equal-tokens": 1} and len(store.split()) == 2
    assert verify(tmp_path / "out", against=[str(tmp_path / "in.jsonl")], every=True).is_sound


def test_conversations_need_a_chat_template(tmp_path: Path, chat_tokenizer: Path) -> None:
    config = json.loads((chat_tokenizer / "tokenizer_config.json").read_text())
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer.json").write_bytes((chat_tokenizer / "tokenizer.json").read_bytes())
    (bare / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    with pytest.raises(DataError, match="pass one with --chat-template FILE"):
        make_store(tmp_path, bare, [{"chosen": [ask("a"), say("b")], "rejected": [ask("a"), say("c")]}], **KEYS)


def many(count: int) -> list[Record]:
    return [
        {"prompt": f"Question {number // 3}?", "chosen": f" Yes, {number}.", "rejected": f" No, {number}.", "n": number}
        for number in range(count)
    ]


def digest(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("run.json", "progress.json")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_pairs_stay_together_in_every_split_and_task(tmp_path: Path, chat_tokenizer: Path) -> None:
    flags: Record = {**ASKED, "val_fraction": 0.3, "task_bytes": 700, "keep_keys": ["n"]}
    store = make_store(tmp_path, chat_tokenizer, many(90), **flags)
    assert len(store.manifest.splits["train"].shards) > 3
    seen: dict[str, set[str]] = {}
    numbers = []
    for split in ("train", "val"):
        for batch in tm.Loader(tm.pairs(store.split(split)), batch_size=1, epochs=1):
            (number,) = batch["fields"]["n"]
            assert store.decode(batch["chosen_ids"][0]) == f" Yes, {number}.</s>"
            assert store.decode(batch["rejected_ids"][0]) == f" No, {number}.</s>"
            seen.setdefault(store.decode(batch["prompt_ids"][0]), set()).add(split)
            numbers.append(int(number))
    assert sorted(numbers) == list(range(90))
    assert all(len(splits) == 1 for splits in seen.values()), "pairs with one prompt are in one split"
    result = verify(tmp_path / "out", against=[str(tmp_path / "in.jsonl")])
    assert result.is_sound and result.num_compared == 180


def test_workers_and_ranks_make_the_same_bytes(tmp_path: Path, chat_tokenizer: Path) -> None:
    flags: Record = {**ASKED, "val_fraction": 0.3, "task_bytes": 700, "tokenizer": str(chat_tokenizer)}
    path = write_records(tmp_path / "in.jsonl", many(60))
    tokenize_here(path, tmp_path / "whole", **flags)
    for rank in (1, 0):
        tm.tokenize(path, tmp_path / "ranks", rank=rank, world_size=2, workers=1, **flags)
    assert digest(tmp_path / "whole") == digest(tmp_path / "ranks")


def test_a_run_that_stopped_resumes_to_the_same_bytes(tmp_path: Path, chat_tokenizer: Path) -> None:
    bad = {"prompt": "a", "chosen": "same", "rejected": "same"}
    path = write_records(tmp_path / "in.jsonl", [*many(60), bad])
    flags: Record = {**ASKED, "val_fraction": 0.3, "task_bytes": 700, "tokenizer": str(chat_tokenizer)}
    with pytest.raises(DataError, match="line 61: the chosen and the rejected answer are the same"):
        tokenize_here(path, tmp_path / "stopped", **flags)
    assert list((tmp_path / "stopped" / ".tasks").glob("00000-*.json"))
    assert read_status(tmp_path / "stopped").records_name == "pairs"
    for name in ("stopped", "whole"):
        tokenize_here(path, tmp_path / name, **flags, on_error="skip")
    assert digest(tmp_path / "stopped") == digest(tmp_path / "whole")


TEXT = st.text("ab é</s>", min_size=1, max_size=12)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=20), st.booleans())
def test_an_answer_begins_where_tokens_differ(
    chat_tokenizer: Path, records: list[tuple[str, str, str]], has_bos: bool
) -> None:
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(chat_tokenizer / "tokenizer.json"))

    with tempfile.TemporaryDirectory() as folder:
        bos, eos = (library.token_to_id(string) for string in ("<s>", "</s>"))
        rows = [{"prompt": p, "chosen": a, "rejected": b} for p, a, b in records if a != b]
        rows.append({"prompt": "a", "chosen": "b", "rejected": "c"})
        flags: Record = {**ASKED, "bos": has_bos, "special_tokens": "parse", "on_error": "skip"}
        store = make_store(Path(folder), chat_tokenizer, rows, **flags)
        found = store.split()
        assert found.mask is not None
        number = 0
        for row in rows:
            prompt, *both = (
                library.encode(text, add_special_tokens=False).ids
                for text in (row["prompt"], row["prompt"] + row["chosen"], row["prompt"] + row["rejected"])
            )
            # A text that begins with a BOS gets no second one.
            prompt, *both = ([bos] * (has_bos and ids[:1] != [bos]) + ids for ids in (prompt, *both))
            both = [ids if ids[-1] == eos else [*ids, eos] for ids in both]
            shared = min(count_shared(prompt, ids) for ids in both)
            if both[0] == both[1] or shared == min(map(len, both)):
                continue
            for ids in both:
                assert found.document(number).tolist() == ids
                assert found.mask.document(number).tolist() == [int(at >= shared) for at in range(len(ids))]
                number += 1
        assert number == len(found) and len(rows) == number // 2 + store.manifest.num_rejects


def test_tasks_without_a_good_pair_are_counted(tmp_path: Path, chat_tokenizer: Path) -> None:
    bad = [{"prompt": f"Question {number}?", "chosen": "same", "rejected": "same"} for number in range(30)]
    store = make_store(tmp_path, chat_tokenizer, [*bad, *many(1)], **ASKED, on_error="skip", task_bytes=300)
    assert store.manifest.rejects == {"equal-answers": 30} and store.manifest.num_records == 1
    assert verify(tmp_path / "out", against=[str(tmp_path / "in.jsonl")], every=True).is_sound


def test_tasks_without_a_good_conversation_are_counted_after_a_normalizer(tmp_path: Path) -> None:
    from tokenizers import normalizers

    tokenizer = make_tokenizer(tmp_path / "tokenizer", normalizer=normalizers.Lowercase())
    records: list[Record] = [{"messages": [ask("Up?"), say("Yes.")]}, *([{"messages": [ask("Up?")]}] * 30)]
    store = make_store(tmp_path, tokenizer, records, messages_key="messages", on_error="skip", task_bytes=100)
    assert store.manifest.rejects == {"untrained": 30} and len(store.split()) == 1


def test_a_limit_counts_records(tmp_path: Path, chat_tokenizer: Path) -> None:
    store = make_store(tmp_path, chat_tokenizer, many(20), **ASKED, limit=7)
    assert store.manifest.num_documents_in == store.manifest.num_records == 7 and len(store.split()) == 14


def test_verify_finds_another_mask(tmp_path: Path, chat_tokenizer: Path) -> None:
    path = write_records(tmp_path / "in.jsonl", many(5))
    tokenize_here(path, tmp_path / "out", tokenizer=str(chat_tokenizer), **ASKED)
    (mask,) = (tmp_path / "out").rglob("*.mask")
    data = bytearray(mask.read_bytes())
    data[data.index(1)] = 0
    mask.write_bytes(data)
    assert not verify(tmp_path / "out").is_sound


def test_a_store_that_holds_something_unknown_is_refused(tmp_path: Path, chat_tokenizer: Path) -> None:
    from tokenmill.store.manifest import encode_sealed

    store = make_store(tmp_path, chat_tokenizer, many(3), **ASKED)
    changed = msgspec.structs.replace(store.manifest, holds="triples")
    (tmp_path / "out" / "manifest.json").write_bytes(encode_sealed(changed))
    with pytest.raises(StoreError, match="holds 'triples'; this tokenmill reads pairs and prompts"):
        tm.open(tmp_path / "out")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"chosen_key": "a"}, "--rejected-key is missing"),
        ({"rejected_key": "a"}, "--chosen-key is missing"),
        ({**KEYS, "messages_key": "m"}, "--messages-key has no meaning with --chosen-key"),
        ({**KEYS, "prompt_key": "p", "response_key": "r"}, "--response-key has no meaning with --chosen-key"),
        ({**KEYS, "weight_key": "w"}, "--weight-key has no meaning with --chosen-key"),
        (
            {**KEYS, "template": "{prompt}{response}"},
            "--template has no meaning with --chosen-key without --prompt-key",
        ),
        ({**ASKED, "template": "{response}{prompt}"}, "must have {prompt} before {response} only"),
        ({"chosen_key": "a", "rejected_key": "a"}, "one field cannot have two roles"),
        ({**KEYS, "prompts_only": True}, "--prompts-only has no meaning with --chosen-key"),
        ({"prompts_only": True}, "pass --prompt-key or --messages-key"),
        ({"prompt_key": "p"}, "prompts without a response are stored with --prompts-only"),
        ({"prompt_key": "p", "prompts_only": True, "eos": True}, "--eos would end prompts"),
        (
            {"prompt_key": "p", "prompts_only": True, "response_key": "r"},
            "--response-key has no meaning with --prompts-only",
        ),
    ],
)
def test_contradicting_flags_are_refused(
    tmp_path: Path, chat_tokenizer: Path, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as error:
        make_store(tmp_path, chat_tokenizer, many(2), **flags)
    assert message in str(error.value)


def test_commands_say_pair(tmp_path: Path, chat_tokenizer: Path) -> None:
    make_store(tmp_path, chat_tokenizer, many(12), **ASKED)
    out = tmp_path / "out"

    def run(*arguments: str) -> str:
        done = tokenmill_here(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "12; documents 2i and 2i + 1 are the chosen and the rejected answer" in run("inspect", str(out))
    assert "2, the rejected answer with its prompt" in run("inspect", str(out), "--document", "5")
    assert "12 pairs, " in run("status", str(out))
    row = ["--packing", "pairs", "--seq-len", "24"]
    assert "2 rows, 4 documents" in run("trace", str(out), "--step", "0", "--batch-size", "2", *row)
    assert "pairs of at most 24 tokens each" in run("inspect", str(out), "--row", "0", *row)
    run("report", str(out), "-o", str(tmp_path / "r.html"), "--seq-len", "6")
    assert "pairs left out: " in (tmp_path / "r.html").read_text()


PROMPTS: list[Record] = [
    {"prompt": "Two and two?", "answer": "4"},
    {"prompt": [ask("Up?"), say("Yes."), ask("Down?")], "answer": {"is": "no"}},
    {"prompt": "Three and three?", "answer": None},
]


def test_prompts_end_where_an_answer_begins(tmp_path: Path, chat_tokenizer: Path) -> None:
    flags: Record = {"prompt_key": "prompt", "prompts_only": True, "keep_keys": ["answer"]}
    store = make_store(tmp_path, chat_tokenizer, PROMPTS, **flags)
    texts = [store.decode(store.document(number)) for number in range(3)]
    assert store.manifest.holds == "prompts" and texts[0] == "Two and two?"
    assert texts[1].endswith("Down?<|im_end|>\n<|im_start|>assistant\n")
    mask = store.split().mask
    assert mask is not None and not mask.read(0, mask.num_tokens).any()
    longest = max(len(store.document(number)) for number in range(3))
    (batch,) = tm.load(store, seq_len=longest, batch_size=3, packing="prompts", shuffle=False, epochs=1)
    assert batch["fields"] == {"answer": ["4", '{"is":"no"}', None]}
    for row in range(3):
        ids = store.document(row).tolist()
        blank = [0] * (longest - len(ids))
        assert batch["prompt_ids"][row] == ids
        assert batch["input_ids"][row].tolist() == blank + ids
        assert batch["attention_mask"][row].tolist() == blank + [1] * len(ids)
        assert batch["position_ids"][row].tolist() == blank + list(range(len(ids)))
    assert verify(tmp_path / "out", against=[str(tmp_path / "in.jsonl")]).is_sound


def test_long_prompts_are_dropped_and_counted_or_an_error(tmp_path: Path, chat_tokenizer: Path) -> None:
    store = make_store(tmp_path, chat_tokenizer, PROMPTS, prompt_key="prompt", prompts_only=True)
    lengths = [len(store.document(number)) for number in range(3)]
    rows = tm.prompts(store, max_length=min(lengths))
    assert len(rows) == 1 and rows.report.num_dropped_documents == 2 and "2 documents dropped" in str(rows)
    with pytest.raises(UsageError, match=f"2 prompts .* the longest {max(lengths)}; raise the length"):
        tm.prompts(store, max_length=min(lengths), long_documents="error")
    with pytest.raises(UsageError, match="holds prompts, in which nothing is trained on"):
        tm.pack(store, seq_len=4)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"answer": "4"}, "missing-field"),
        ({"messages": "Up?"}, "not-a-string"),
        ({"messages": [ask("Up?"), say("Yes.")]}, "has-answer"),
        ({"messages": []}, "bad-messages"),
        ({"messages": [{"from": "human", "value": "a"}]}, "bad-messages"),
    ],
)
def test_bad_prompts_are_rejects(tmp_path: Path, chat_tokenizer: Path, record: Record, reason: str) -> None:
    records = [{"messages": [ask("Up?")]}, record]
    store = make_store(tmp_path, chat_tokenizer, records, messages_key="messages", prompts_only=True, on_error="skip")
    assert store.manifest.rejects == {reason: 1} and len(store.split()) == 1


def test_pairs_and_prompts_are_not_streamed(tmp_path: Path, chat_tokenizer: Path) -> None:
    path = write_records(tmp_path / "in.jsonl", many(3))
    with pytest.raises(UsageError, match="are not streamed; make a store"):
        tm.load(path, 8, 1, tokenizer=str(chat_tokenizer), cache=tmp_path / "cache", **ASKED)
