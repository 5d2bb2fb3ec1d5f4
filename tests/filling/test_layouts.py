"""Layouts: each trainer's own arithmetic on its own keys sees every pair inside a document, and none across."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.stores import collect, make_documents, make_store
from tokenmill.filling.layouts import LAYOUTS

torch = pytest.importorskip("torch")
functional = torch.nn.functional

PACKINGS = ["concat", "best-fit", "pad"]
NUM_DOCUMENTS, SEQ_LEN, BATCH = 120, 24, 4


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    return make_documents(NUM_DOCUMENTS, longest=40)


@pytest.fixture(scope="module")
def store(documents: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tm.open(make_store(tmp_path_factory.mktemp("layouts") / "store", documents, num_shards=4))


class Bigram(torch.nn.Module):  # type: ignore[misc, name-defined]
    """The smallest language model: the logits of a token depend on it alone, so its gradient shows whether it had a loss."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(size, size)

    def forward(self, tokens: Any) -> Any:
        return self.table(tokens)


def loss_of(layout: str, batch: Any, model: Bigram) -> Any:
    """The loss as the trainer of each layout computes it."""
    if layout == "xy":
        x, y = batch
        return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    if layout == "flat":
        return functional.cross_entropy(model(batch["inputs"]), batch["targets"])
    if layout in ("hf", "hf-flat"):
        logits, labels = model(batch["input_ids"]), functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    if layout == "megatron":
        losses = functional.cross_entropy(model(batch["tokens"]).transpose(1, 2), batch["labels"], reduction="none")
        return (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    if layout == "sft":
        losses = functional.cross_entropy(
            model(batch["input_ids"]).transpose(1, 2), batch["target_ids"], reduction="none"
        )
        return (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    if layout == "torchtitan":
        inputs, labels = batch
        return functional.cross_entropy(model(inputs["input"]).flatten(0, 1), labels.flatten())
    if layout == "olmo":
        labels = torch.where(batch["label_mask"], batch["input_ids"], torch.tensor(-100))
        labels = functional.pad(labels[:, 1:], (0, 1), value=-100)
        return functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), labels.flatten())
    logits = model(batch["inputs"]).transpose(1, 2)
    weights = (batch["targets_segmentation"] != 0).float()
    return (functional.cross_entropy(logits, batch["targets"], reduction="none") * weights).sum() / weights.sum()


def tokens_of(layout: str, batch: Any) -> Any:
    names = {
        "hf": "input_ids",
        "hf-flat": "input_ids",
        "sft": "input_ids",
        "megatron": "tokens",
        "olmo": "input_ids",
        "maxtext": "inputs",
    }
    if layout == "torchtitan":
        return batch[0]["input"]
    if layout == "flat":
        return batch["inputs"].reshape(BATCH, SEQ_LEN)
    return batch.inputs if layout == "xy" else batch[names[layout]]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_loss_crosses_a_document(documents: list[list[int]], store: Any, layout: str, packing: Any) -> None:
    next_of = {a: b for document in documents for a, b in itertools.pairwise(document)}
    size = documents[-1][-1] + 1
    loader = tm.load(
        store.path,
        seq_len=SEQ_LEN,
        batch_size=BATCH,
        packing=packing,
        framework="torch",
        layout=layout,
        document_mask=True,
    )
    for batch in collect(loader, 6):
        model = Bigram(size)
        loss_of(layout, batch, model).backward()
        gradient = model.table.weight.grad
        tokens = tokens_of(layout, batch)
        trained = set(torch.nonzero(gradient.abs().sum(1)).flatten().tolist())
        # Only concat rows know the token after the row, and only shifted labels can use it.
        sees_ahead = packing == "concat" and layout in ("xy", "flat", "sft", "megatron", "torchtitan", "maxtext")
        for row in tokens.tolist():
            for place, token in enumerate(row):
                follower = row[place + 1] if place + 1 < len(row) else next_of.get(token) if sees_ahead else None
                has_loss = token != 0 and follower is not None and next_of.get(token) == follower
                assert (token in trained) == has_loss, (token, place)
                if has_loss:
                    # The gradient of the right answer is the only negative one.
                    assert gradient[token].argmin().item() == follower


@pytest.mark.parametrize("packing", PACKINGS)
def test_attention_inside_segments_is_that_of_documents_alone(
    documents: list[list[int]], store: Any, packing: Any
) -> None:
    torch.manual_seed(0)
    table = torch.nn.Embedding(documents[-1][-1] + 1, 16)
    places = torch.nn.Embedding(64, 16)

    def attend(tokens: Any, positions: Any, segments: Any) -> Any:
        hidden = (table(tokens) + places(positions))[None]
        mask = (segments[:, None] == segments[None, :]) & torch.ones(len(tokens), len(tokens)).tril().bool()
        return functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask)[0]

    loader = tm.load(store.path, seq_len=SEQ_LEN, batch_size=BATCH, packing=packing, framework="torch")
    for batch in collect(loader, 4):
        assert batch.cu_seqlens[-1] == BATCH * SEQ_LEN
        lengths = torch.diff(batch.cu_seqlens)
        assert batch.max_seqlen == lengths.max()
        flat = iter(lengths.tolist())
        for row, found in enumerate(batch.documents):
            whole = attend(batch.inputs[row], batch.positions[row], batch.segment_ids[row])
            used = 0
            for number, (document, start, length) in enumerate(found, 1):
                assert next(flat) == length
                part = batch.inputs[row, start : start + length]
                assert set(part.tolist()) <= set(documents[document])
                assert (batch.segment_ids[row, start : start + length] == number).all()
                alone = attend(part, torch.arange(length), torch.zeros(length))
                assert torch.allclose(whole[start : start + length], alone, atol=1e-5)
                used += length
            assert (batch.segment_ids[row, used:] == 0).all()
            assert used == SEQ_LEN or next(flat) == SEQ_LEN - used


def test_keys_are_those_of_the_trainers(store: Any) -> None:
    keys = {
        "hf": {
            "input_ids",
            "labels",
            "position_ids",
            "seq_idx",
            "cu_seq_lens_q",
            "cu_seq_lens_k",
            "max_length_q",
            "max_length_k",
        },
        "megatron": {"tokens", "labels", "loss_mask", "position_ids"},
        "olmo": {"input_ids", "doc_lens", "max_doc_lens", "label_mask"},
        "maxtext": {
            "inputs",
            "targets",
            "inputs_segmentation",
            "inputs_position",
            "targets_segmentation",
            "targets_position",
        },
    }
    for layout, expected in keys.items():
        settings: dict[str, Any] = {"seq_len": SEQ_LEN, "batch_size": 2, "layout": layout}
        (batch,) = collect(tm.load(store.path, document_mask=True, **settings), 1)
        assert set(batch) == expected
        (whole,) = collect(tm.load(store.path, **settings), 1)
        plain = {name for name in expected if not name.startswith(("seq_idx", "cu_seq", "max_length"))}
        assert set(whole) == (plain | {"attention_mask"} if layout == "hf" else plain)
        for name in ("position_ids", "inputs_position"):
            assert name not in whole or (whole[name] == np.arange(SEQ_LEN)).all()
        assert "inputs_segmentation" not in whole or (whole["inputs_segmentation"] == 1).all()
    ((inputs, labels),) = collect(tm.load(store.path, seq_len=SEQ_LEN, batch_size=2, layout="torchtitan"), 1)
    assert set(inputs) == {"input", "positions"}
    assert labels.shape == (2, SEQ_LEN)


def test_without_a_document_mask_every_token_of_a_concat_row_has_a_target(store: Any) -> None:
    for batch in collect(tm.load(store.path, seq_len=SEQ_LEN, batch_size=2), 5):
        assert (batch.targets >= 0).all()
        assert (batch.loss_mask == 1).all()
        assert (batch.targets[:, :-1] == batch.inputs[:, 1:]).all()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 25), min_size=3, max_size=40).filter(lambda n: sum(n) > 50),
    st.integers(1, 16),
    st.integers(1, 4),
    st.sampled_from(PACKINGS),
)
def test_all_derived_fields_agree_with_each_other(
    lengths: list[int], seq_len: int, batch_size: int, packing: Any
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        edges = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        texts = [list(range(1 + a, 1 + b)) for a, b in itertools.pairwise(edges)]
        make_store(Path(folder), texts, num_shards=2)
        owner = {token: number for number, text in enumerate(texts) for token in text}
        loader = tm.load(
            folder, seq_len=seq_len, batch_size=batch_size, packing=packing, document_mask=True, epochs=1, seed=1
        )
        seen = 0
        for batch in loader:
            starts = []
            for row in range(batch_size):
                tokens = batch.inputs[row].tolist()
                seen += sum(token > 0 for token in tokens)
                for place, token in enumerate(tokens):
                    same = place > 0 and owner.get(tokens[place - 1]) == owner.get(token)
                    starts += [] if same else [row * seq_len + place]
                    assert batch.positions[row, place] == (batch.positions[row, place - 1] + 1 if same else 0)
                    assert (batch.segment_ids[row, place] == 0) == (token == 0)
                    target, is_last = batch.targets[row, place], token == 0 or token == texts[owner[token]][-1]
                    if is_last or (packing != "concat" and place == seq_len - 1):
                        assert target == -100
                    else:
                        assert target == token + 1
                    assert batch.loss_mask[row, place] == (target != -100)
            assert batch.cu_seqlens.tolist() == [*starts, batch_size * seq_len]
            assert batch.max_seqlen == np.diff(batch.cu_seqlens).max()
        rows = loader.rows
        assert seen == rows.num_tokens


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("document_mask", [True, False])
def test_olmo_lengths_add_up_to_rows_with_their_padding(store: Any, packing: Any, document_mask: bool) -> None:
    loader = tm.load(
        store.path,
        seq_len=SEQ_LEN,
        batch_size=BATCH,
        packing=packing,
        layout="olmo",
        document_mask=document_mask,
        epochs=1,
    )
    plain = tm.load(
        store.path, seq_len=SEQ_LEN, batch_size=BATCH, packing=packing, document_mask=document_mask, epochs=1
    )
    for batch, other in zip(loader, plain, strict=True):
        assert (batch["doc_lens"].sum(1) == SEQ_LEN).all()
        if document_mask:
            lengths = batch["doc_lens"][batch["doc_lens"] > 0]
            assert np.cumsum(lengths).tolist() == other.cu_seqlens[1:].tolist()
