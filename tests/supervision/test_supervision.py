"""Supervised data: which tokens are trained on, from record to batch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill as tm
from tests.conftest import make_texts, write_jsonl
from tests.supervision.test_chat import CHATML, SPECIALS, talk
from tests.support.running import tokenize_here, tokenmill
from tokenmill.errors import DataError, TokenmillError, UsageError
from tokenmill.tools.verify import verify


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with special tokens and a chat template."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizers") / "chat")


def make_tokenizer(folder: Path, *, template: str = CHATML, normalizer: Any = None) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(make_texts(300, seed=9), trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
    return path


def make_records(count: int) -> list[dict[str, Any]]:
    """Conversations and pairs in turn, of many scripts."""
    texts = [text for text in make_texts(count * 5, seed=2, longest=20) if text.strip()]
    records: list[dict[str, Any]] = []
    for number in range(count):
        a, b, c, d = (texts[(4 * number + k) % len(texts)] for k in range(4))
        if number % 2:
            records.append({"messages": talk(a, b, c, d, system="s" if number % 3 else None)})
        else:
            records.append({"prompt": a, "response": b})
    return records


FLAGS: dict[str, Any] = {"messages_key": "messages", "prompt_key": "prompt", "response_key": "response", "workers": 1}


def expected_of(folder: Path, record: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Ids and mask by the reference library's own offsets, character by character."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text, inside = "", []
    if "messages" in record:
        for message in record["messages"]:
            for part, trained in (
                (f"<|im_start|>{message['role']}\n", False),
                (f"{message['content']}<|im_end|>", message["role"] == "assistant"),
                ("\n", False),
            ):
                text += part
                inside += [trained] * len(part)
    else:
        text = record["prompt"] + "\n" + record["response"]
        inside = [False] * (len(record["prompt"]) + 1) + [True] * len(record["response"])
    encoding = library.encode(text, add_special_tokens=False)
    mask = [int(any(inside[start:stop])) for start, stop in encoding.offsets]
    if "messages" in record:
        return encoding.ids, mask
    return [*encoding.ids, library.token_to_id("</s>")], [*mask, 1]


def check_store(store: tm.TokenStore, folder: Path, records: list[dict[str, Any]]) -> None:
    documents = store.split("train")
    assert documents.mask is not None
    assert len(documents) == len(records)
    for number, record in enumerate(records):
        ids, mask = expected_of(folder, record)
        assert documents.document(number).tolist() == ids
        assert documents.mask.document(number).tolist() == mask


def test_ids_and_masks_are_the_reference_librarys(tmp_path: Path, chat_tokenizer: Path) -> None:
    records = make_records(120)
    path = write_records(tmp_path / "a.jsonl", records)
    store = tm.tokenize(path, tmp_path / "store", tokenizer=str(chat_tokenizer), task_bytes=8_000, **FLAGS)
    assert len(store.manifest.splits["train"].shards) > 2
    check_store(store, chat_tokenizer, records)
    assert verify(store.path, against=[str(path)], every=True).problems == []


@pytest.mark.parametrize("normalizer", ["NFC", "Lowercase", "Prepend"])
def test_masks_are_right_where_a_normalizer_changes_the_text(tmp_path: Path, normalizer: str) -> None:
    from tokenizers import normalizers

    made = {"NFC": normalizers.NFC(), "Lowercase": normalizers.Lowercase(), "Prepend": normalizers.Prepend(" ")}
    folder = make_tokenizer(tmp_path / "tokenizer", normalizer=made[normalizer])
    records = [
        *make_records(30),
        {"prompt": "e\u0301 A\u030a İ", "response": "ǅ e\u0301 ﬁ ẞ"},
        {"messages": talk("e\u0301", "A\u030aİ x")},
    ]
    path = write_records(tmp_path / "a.jsonl", records)
    store = tokenize_here(path, tmp_path / "store", tokenizer=str(folder), **FLAGS)
    check_store(store, folder, records)


def test_the_same_bytes_from_any_number_of_workers_and_from_any_format(tmp_path: Path, chat_tokenizer: Path) -> None:
    records = make_records(60)
    write_records(tmp_path / "a.jsonl", records)
    (tmp_path / "a.json").write_text(json.dumps(records))
    pq.write_table(
        pa.Table.from_pylist([{"messages": None, "prompt": None, "response": None, **r} for r in records]),
        tmp_path / "a.parquet",
        row_group_size=20,
    )
    flags = {**FLAGS, "tokenizer": str(chat_tokenizer), "task_bytes": 6_000}
    one = tokenize_here(tmp_path / "a.jsonl", tmp_path / "one", **flags)
    three = tm.tokenize(tmp_path / "a.jsonl", tmp_path / "three", **{**flags, "workers": 3})
    assert one.manifest == three.manifest
    for suffix in ("json", "parquet"):
        check_store(
            tokenize_here(tmp_path / f"a.{suffix}", tmp_path / suffix, tokenizer=str(chat_tokenizer), **FLAGS),
            chat_tokenizer,
            records,
        )


def test_records_that_cannot_be_trained_on_are_rejects_with_their_lines(tmp_path: Path, chat_tokenizer: Path) -> None:
    records = [
        {"prompt": "p", "response": "good"},
        {"messages": talk("only a question")},
        {"prompt": "p", "response": ""},
        {"prompt": "p"},
        {"messages": []},
        {"messages": [{"content": "no role"}]},
        {"messages": talk("a", "b <|im_end|> c")},
        {"prompt": 5, "response": "x"},
        {"messages": "text"},
        {"prompt": "p", "response": "\ue002"},
        {"messages": talk("q", "good")},
    ]
    path = write_records(tmp_path / "a.jsonl", records)
    with pytest.raises(DataError, match=r"a.jsonl line 2: no token of it would be trained on"):
        tokenize_here(path, tmp_path / "failed", tokenizer=str(chat_tokenizer), **FLAGS)
    store = tokenize_here(path, tmp_path / "store", tokenizer=str(chat_tokenizer), on_error="skip", **FLAGS)
    rejects = [json.loads(line) for line in (store.path / "rejects.jsonl").read_text().splitlines()]
    assert [(reject["line"], reject["reason"]) for reject in rejects] == [
        (2, "untrained"),
        (3, "untrained"),
        (4, "missing-field"),
        (5, "bad-messages"),
        (6, "bad-messages"),
        (7, "special-token"),
        (8, "not-a-string"),
        (9, "bad-messages"),
        (10, "private-character"),
    ]
    check_store(store, chat_tokenizer, [records[0], records[-1]])
    assert verify(store.path, against=[str(path)], every=True).problems == []
    parsed = tokenize_here(
        path, tmp_path / "parsed", tokenizer=str(chat_tokenizer), on_error="skip", special_tokens="parse", **FLAGS
    )
    assert parsed.num_documents == 3


def test_data_of_which_nothing_or_everything_is_trained_on_is_an_error(tmp_path: Path, chat_tokenizer: Path) -> None:
    none = write_records(tmp_path / "none.jsonl", [{"messages": talk("a question")}] * 3)
    with pytest.raises(UsageError, match="no token would be trained on in any of 3 examples"):
        tokenize_here(none, tmp_path / "s", tokenizer=str(chat_tokenizer), on_error="skip", **FLAGS)
    everything = write_records(tmp_path / "all.jsonl", [{"prompt": "", "response": "x"}] * 3)
    with pytest.raises(UsageError, match="every token would be trained on"):
        tokenize_here(everything, tmp_path / "t", tokenizer=str(chat_tokenizer), template="{prompt}{response}", **FLAGS)


def test_exactly_one_bos(tmp_path: Path) -> None:
    writes_bos = make_tokenizer(tmp_path / "tokenizer", template="{{ bos_token }}" + CHATML)
    path = write_records(tmp_path / "a.jsonl", [{"messages": talk("a", "b")}, {"prompt": "p", "response": "r"}])
    store = tokenize_here(path, tmp_path / "store", tokenizer=str(writes_bos), bos=True, **FLAGS)
    bos = store.manifest.special_tokens.bos_id
    for number in range(2):
        ids = store.document(number).tolist()
        assert ids[0] == bos and ids.count(bos) == 1
    assert verify(store.path).problems == []


def test_weights_of_records_responses_and_messages(tmp_path: Path, chat_tokenizer: Path) -> None:
    first, last = talk("a", "b", "c", "d")[1::2]
    records = [
        {"prompt": "p", "response": "abc", "weight": 0.5},
        {"prompt": "p", "response": "a b c d", "weight": [[2, 3, 0], [4, 5, 3]]},
        {"messages": [*talk("a"), {**first, "weight": 0}, *talk("c"), {**last, "weight": 2}], "weight": 0.25},
        {"prompt": "p", "response": "x"},
    ]
    path = write_records(tmp_path / "a.jsonl", records)
    flags = {**FLAGS, "weight_key": "weight"}
    store = tokenize_here(path, tmp_path / "store", tokenizer=str(chat_tokenizer), **flags)
    documents = store.split("train")
    assert documents.weight is not None and documents.mask is not None
    decoded = [
        [(store.decode(ids[i : i + 1]), float(weight)) for i, weight in enumerate(weights) if weight > 0]
        for ids, weights in ((documents.document(n), documents.weight.document(n)) for n in range(4))
    ]
    assert "".join(text for text, _ in decoded[0]) == "abc</s>"
    assert {weight for _, weight in decoded[0]} == {0.5}
    assert ("a", 1.0) in decoded[1]
    assert ("c", 3.0) in decoded[1] and "b" not in dict(decoded[1])
    assert decoded[2] == [("d", 0.5), ("<|im_end|>", 0.5)]
    assert decoded[3] == [("x", 1.0), ("</s>", 1.0)]
    batch = next(iter(tm.load(store, seq_len=32, batch_size=4, packing="pad", shuffle=False)))
    assert np.unique(batch.loss_weights[0]).tolist() == [0, 0.5]
    assert ((batch.loss_weights > 0) == (batch.targets != -100)).all()
    assert verify(store.path, against=[str(path)], every=True).problems == []
    bad = write_records(tmp_path / "bad.jsonl", [{"prompt": "p", "response": "x", "weight": "much"}, *records])
    with pytest.raises(DataError, match=r"line 1: field 'weight' is 'much'; expected a number"):
        tokenize_here(bad, tmp_path / "bad", tokenizer=str(chat_tokenizer), **flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"prompt_key": "p"}, "--response-key is missing"),
        ({"messages_key": "m", "chat_template": "nowhere.jinja"}, "--chat-template nowhere.jinja cannot be read"),
        ({"messages_key": "m", "special_tokens": "as-text"}, "would read the special tokens of the template as text"),
        ({"template": "{prompt}{response}"}, "--template is for supervised data"),
        ({"prompt_key": "p", "response_key": "r", "template": "{prompt}"}, "{response} exactly once"),
        ({"prompt_key": "p", "response_key": "p"}, "one field cannot have two roles"),
        ({"messages_key": "m", "format": "text"}, "plain text has no field 'm'"),
    ],
)
def test_mistakes_are_sentences(tmp_path: Path, chat_tokenizer: Path, flags: dict[str, Any], said: str) -> None:
    path = write_records(tmp_path / "a.jsonl", make_records(4))
    with pytest.raises((UsageError, DataError)) as caught:
        tm.tokenize(path, tmp_path / "store", tokenizer=str(chat_tokenizer), **flags)
    assert said in str(caught.value)


def test_messages_need_a_template(tmp_path: Path, tiny_tokenizer: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", [{"messages": talk("a", "b")}])
    with pytest.raises(UsageError, match="has no chat template; pass one with --chat-template FILE"):
        tm.tokenize(path, tmp_path / "store", tokenizer=str(tiny_tokenizer), messages_key="messages")


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory, chat_tokenizer: Path) -> tm.TokenStore:
    folder = tmp_path_factory.mktemp("supervised")
    path = write_records(folder / "a.jsonl", make_records(80))
    return tokenize_here(path, folder / "store", tokenizer=str(chat_tokenizer), task_bytes=5_000, **FLAGS)


def test_verify_finds_a_flipped_bit_in_a_mask(tmp_path: Path, supervised: tm.TokenStore) -> None:
    store = shutil.copytree(supervised.path, tmp_path / "store")
    mask = sorted(store.glob("train/*.mask"))[0]
    data = bytearray(mask.read_bytes())
    data[3] ^= 1
    mask.write_bytes(data)
    assert any(".mask is damaged" in problem for problem in verify(store).problems)


@pytest.mark.parametrize("packing", ["pad", "best-fit", "concat"])
@pytest.mark.parametrize("document_mask", [True, False])
def test_batches_have_targets_only_where_tokens_are_trained_on(
    supervised: tm.TokenStore, packing: str, document_mask: bool
) -> None:
    documents = supervised.split("train")
    assert documents.mask is not None
    loader = tm.load(supervised, seq_len=64, batch_size=5, packing=packing, document_mask=document_mask, seed=3)
    stream, masks = documents.read(0, documents.num_tokens), documents.mask.read(0, documents.num_tokens)
    for _, batch in zip(range(30), loader, strict=False):
        for row, found in enumerate(batch.documents):
            expected = np.full(64, -100)
            for document, start, length in found:
                first = _find(documents, document, batch.inputs[row, start : start + length])
                last = first + length
                following = np.append(stream[first + 1 : last + 1], -1)[:length].astype(np.int64)
                trained = np.append(masks[first + 1 : last + 1], 0)[:length]
                ends = int(documents.bounds(np.array([document]))[1][0]) == last
                if ends and (document_mask or packing != "concat"):
                    trained = np.append(trained[: length - 1], 0)
                if packing != "concat":
                    trained[length - 1] = 0
                expected[start : start + length] = np.where(trained == 1, following, -100)
            if packing == "concat" and not document_mask:
                continue
            assert batch.targets[row].tolist() == expected.tolist()
        assert ((batch.targets != -100) == (batch.loss_mask == 1)).all()


def _find(documents: Any, document: int, tokens: Any) -> int:
    """Where in the split a piece of a document begins."""
    starts, _ = documents.bounds(np.array([document]))
    ids = documents.document(document)
    for at in range(len(ids) - len(tokens) + 1):
        if np.array_equal(ids[at : at + len(tokens)], tokens):
            return int(starts[0]) + at
    raise AssertionError("not in its document")


def test_padded_batches_in_the_form_of_supervised_trainers(supervised: tm.TokenStore) -> None:
    loader = tm.load(supervised, seq_len=128, batch_size=4, packing="pad", layout="sft", framework="torch")
    batch = next(iter(loader))
    assert {name: tuple(value.shape) for name, value in batch.items()} == dict.fromkeys(
        ("input_ids", "target_ids", "attention_mask", "loss_mask"), (4, 128)
    )
    assert (batch["attention_mask"].sum(1) <= 128).all()
    assert ((batch["loss_mask"] > 0) <= (batch["attention_mask"] > 0)).all()
    plain = next(iter(tm.load(supervised, seq_len=128, batch_size=4, packing="pad")))
    assert plain.input_ids is plain.inputs and plain.target_ids is plain.targets
    labels = next(iter(tm.load(supervised, seq_len=128, batch_size=4, packing="best-fit", layout="hf")))["labels"]
    assert (labels != -100).any() and (labels == -100).any()


def test_supervised_rows_mix_with_plain_ones(supervised: tm.TokenStore, chat_tokenizer: Path, tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "plain.jsonl", make_texts(300))
    plain = tm.pack(tokenize_here(text, tmp_path / "plain", tokenizer=str(chat_tokenizer)), seq_len=32)
    rows = tm.mix([(plain, 0.5), (tm.pack(supervised, seq_len=32), 0.5)], seed=1)
    batch = next(iter(tm.Loader(rows, batch_size=200)))
    shares = (batch.targets != -100).mean(1)
    assert 0.3 < (shares == 1).mean() < 0.9


def test_a_slice_and_a_copy_for_another_process_keep_the_mask(supervised: tm.TokenStore) -> None:
    import pickle

    documents = supervised.split("train")
    some = documents.slice(10, 20)
    assert some.mask is not None and documents.mask is not None
    assert some.mask.document(0).tolist() == documents.mask.document(10).tolist()
    again = pickle.loads(pickle.dumps(documents))
    assert again.mask.document(10).tolist() == documents.mask.document(10).tolist()


def test_the_command_line(tmp_path: Path, chat_tokenizer: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", make_records(20))
    keys = ["--messages-key", "messages", "--prompt-key", "prompt", "--response-key", "response"]
    command = ["tokenize", path, "-o", tmp_path / "s", "--tokenizer", chat_tokenizer, *keys, "--val-fraction", "0.2"]
    done = tokenmill(*command, "--template", r"{prompt}\n\n{response}")
    assert done.returncode == 0, done.stderr
    store = tm.open(tmp_path / "s")
    assert set(store.splits) == {"train", "val"} and store.split("val").mask is not None
    assert "of the tokens of train have a loss" in tokenmill("inspect", tmp_path / "s").stdout
    assert "║" in tokenmill("inspect", tmp_path / "s", "--document", "0").stdout
    # The template is part of what was asked for: another one is refused.
    other = {**FLAGS, "template": "{prompt} {response}", "val_fraction": 0.2}
    with pytest.raises(TokenmillError, match="template"):
        tm.tokenize(path, store.path, tokenizer=str(chat_tokenizer), **other)


def test_choices_of_conversations_are_kept_in_the_manifest_and_verified(tmp_path: Path, chat_tokenizer: Path) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%d %b') }}{{ '!' if shouts }}" + CHATML)
    path = write_records(tmp_path / "a.jsonl", [{"messages": talk("a", "b", "c", "d")}] * 3)
    command = ["tokenize", path, "-o", tmp_path / "s", "--tokenizer", chat_tokenizer, "--messages-key", "messages"]
    command += ["--chat-template", template, "--train-on", "last", "--train-roles", "assistant,user"]
    undated = tokenmill(*command)
    assert undated.returncode and "--template-date 2026-01-31" in undated.stderr
    done = tokenmill(*command, "--template-date", "2026-02-03", "--template-values", '{"shouts": true}')
    assert done.returncode == 0, done.stderr
    assert "trained    ║d<|im_end|>║\nstop       what ends a turn is trained on in 3 of 3 turns" in done.stderr
    store = tm.open(tmp_path / "s")
    flags = store.manifest.settings
    assert (flags["template-date"], flags["template-values"]) == ("2026-02-03", {"shouts": True})
    assert (flags["train-on"], flags["train-roles"]) == ("last", ["assistant", "user"])
    assert "mask-reasoning" not in flags
    assert store.decode(store.document(0)).startswith("03 Feb!")
    assert verify(store.path, against=[str(path)], every=True).problems == []
    other = tokenmill(*command, "--template-date", "2026-02-04", "--template-values", '{"shouts": true}')
    assert other.returncode and "template-date" in other.stderr


def test_data_in_which_nothing_stops_the_model_is_refused(tmp_path: Path, chat_tokenizer: Path) -> None:
    template = tmp_path / "endless.jinja"
    template.write_text("{% for m in messages %}{{ '<' + m.role + '>' + m.content + '\n' }}{% endfor %}")
    path = write_records(tmp_path / "a.jsonl", [{"messages": talk("a", "b", "c", "d")}])
    flags = {"tokenizer": str(chat_tokenizer), "messages_key": "messages", "chat_template": str(template)}
    with pytest.raises(UsageError, match=r"no turn of 2 in the sample is trained to stop: .* --allow-no-stop"):
        tokenize_here(path, tmp_path / "refused", **flags)
    allowed = tokenize_here(path, tmp_path / "allowed", **flags, allow_no_stop=True)
    assert allowed.manifest.settings["allow-no-stop"] is True
    ended = tokenize_here(path, tmp_path / "ended", **flags, eos=True).split("train")
    assert ended.mask is not None and ended.mask.document(0)[-1] == 1


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": [{"type": "image", "url": "x"}, {"type": "text", "text": "b"}]}, "a part of type 'image'"),
        ({"content": "b", "tool_calls": [{"name": "add"}]}, "writes nothing of the tool_calls of message 2"),
    ],
)
def test_what_a_template_cannot_write_is_a_reject(
    tmp_path: Path, chat_tokenizer: Path, message: dict[str, Any], reason: str
) -> None:
    bad = {"messages": [*talk("a"), {"role": "assistant", **message}]}
    path = write_records(tmp_path / "a.jsonl", [bad, {"messages": talk("a", "b")}])
    store = tokenize_here(path, tmp_path / "s", tokenizer=str(chat_tokenizer), messages_key="messages", on_error="skip")
    assert len(store.split("train")) == 1
    assert reason in json.loads((tmp_path / "s" / "rejects.jsonl").read_text())["detail"]


def test_reasoning_inside_a_content_cannot_be_masked(tmp_path: Path, chat_tokenizer: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", [{"messages": talk("a", "<think>r</think>b")}])
    with pytest.raises(DataError, match="message 2 has </think> in its content; --mask-reasoning"):
        tokenize_here(path, tmp_path / "s", tokenizer=str(chat_tokenizer), messages_key="messages", mask_reasoning=True)


@pytest.mark.parametrize("normalizer", [None, "NFC"])
def test_batches_in_which_all_records_are_bad_are_rejects(tmp_path: Path, normalizer: str | None) -> None:
    from tokenizers import normalizers

    folder = make_tokenizer(tmp_path / "tok", normalizer=normalizers.NFC() if normalizer else None)
    good = [{"messages": talk(f"q {number} é", "ä")} for number in range(100)]
    bad = [{"messages": talk(f"q {number} é, which nobody answers")} for number in range(150)]
    path = write_records(tmp_path / "a.jsonl", [*good, *bad, *good])
    flags = {"tokenizer": str(folder), "messages_key": "messages", "task_bytes": "4kB", "workers": 1}
    store = tokenize_here(path, tmp_path / "s", **flags, on_error="skip")
    assert len(store.split("train")) == 200
    assert store.manifest.rejects == {"untrained": 150}
    with pytest.raises(DataError, match="line 101: no token of it would be trained on"):
        tokenize_here(path, tmp_path / "failed", **flags)


def test_a_record_without_the_messages_is_told_with_its_fields(tmp_path: Path, chat_tokenizer: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", [{"conversations": [], "id": number} for number in range(20)])
    flags = {"tokenizer": str(chat_tokenizer), "messages_key": "messages"}
    said = "no field 'messages', or it is null; the record has 'conversations', 'id'"
    with pytest.raises(DataError, match=f"line 1: {said}"):
        tokenize_here(path, tmp_path / "failed", **flags)
    with pytest.raises(DataError, match=f"no record that was read has the text: {said}"):
        tokenize_here(path, tmp_path / "skipped", **flags, on_error="skip")


def test_the_first_screen_says_that_a_template_leaves_out_calls_of_tools(tmp_path: Path, chat_tokenizer: Path) -> None:
    calling = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    records = [{"messages": [*talk("a"), calling]}, {"messages": talk("a", "b")}]
    path = write_records(tmp_path / "a.jsonl", records)
    flags = ["--tokenizer", chat_tokenizer, "--messages-key", "messages", "--on-error", "skip"]
    shown = tokenmill("tokenize", path, "-o", tmp_path / "s", *flags).stderr
    said = "1 of 2 records of the sample are rejects: the chat template writes nothing of the tool_calls of message 2"
    assert said in " ".join(shown.split())


TOOL = {"type": "function", "function": {"name": "f", "description": "d"}}
WRITES_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"tools": [{"name": "</s>"}]}, "special-token"),
        ({"tools": [{"</s>": 1}]}, "special-token"),
        ({"tools": "no JSON"}, "bad-tools"),
        ({"tools": ["f"]}, "bad-tools"),
        ({"tools": {"name": "f"}}, "bad-tools"),
        ({"messages": [*talk("a", "b"), {"role": "</s>", "content": "x"}]}, "special-token"),
        ({"messages": [*talk("a", "b"), {"role": "\ue0001\ue001", "content": "x"}]}, "private-character"),
    ],
)
def test_strings_in_tools_and_roles_are_checked(tmp_path: Path, record: dict[str, Any], reason: str) -> None:
    folder = make_tokenizer(tmp_path / "tok", template=WRITES_TOOLS)
    good = {"messages": talk("a", "b"), "tools": [TOOL]}
    path = write_records(tmp_path / "a.jsonl", [{**good, **record}, good, {**good, "tools": json.dumps([TOOL])}])
    flags = {"tokenizer": str(folder), "messages_key": "messages", "special_tokens": "error"}
    store = tokenize_here(path, tmp_path / "s", **flags, on_error="skip")
    assert store.manifest.rejects == {reason: 1}
    documents = store.split("train")
    # Tools may be the text of JSON, as TRL takes them.
    assert documents.document(0).tolist() == documents.document(1).tolist()


def test_a_record_without_its_prompt_names_the_fields_that_it_has(chat_tokenizer: Path, tmp_path: Path) -> None:
    records = [{"question": "a", "response": "b", "id": 3}, {"prompt": "c", "response": "d", "id": 4}]
    path = write_records(tmp_path / "a.jsonl", records)
    flags = {"tokenizer": str(chat_tokenizer), "prompt_key": "prompt", "response_key": "response"}
    said = "a.jsonl line 1: no field 'prompt', or it is null; the record has 'question', 'response', 'id'"
    with pytest.raises(DataError, match=said):
        tokenize_here(path, tmp_path / "failed", **flags)
    store = tokenize_here(path, tmp_path / "store", on_error="skip", **flags)
    assert store.num_documents == 1 and store.manifest.rejects == {"missing-field": 1}


@pytest.mark.parametrize("special_tokens", [None, "as-text", "parse"])
def test_special_tokens_of_a_template_that_a_library_reads_as_text_are_refused_once(
    tmp_path: Path, special_tokens: str | None
) -> None:
    """Neither value of --special-tokens would help, so the sentence names none."""
    path = write_records(tmp_path / "a.jsonl", [{"prompt": "a", "response": "b"}])
    flags = {"prompt_key": "prompt", "response_key": "response", "template": "{prompt}<eos>{response}"}
    with pytest.raises(UsageError, match="the template writes special tokens, and bytes reads their strings as text"):
        tokenize_here(path, tmp_path / "out", tokenizer="bytes", special_tokens=special_tokens, **flags)
