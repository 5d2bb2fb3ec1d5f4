"""Documents chosen by a condition, by number or by lot: exactly these, in order, in any packing."""

from __future__ import annotations

import itertools
import operator
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.stores import make_documents, make_store, make_two_stores, seal_store
from tokenmill.errors import UsageError
from tokenmill.filling import kernels, located_spans
from tokenmill.store.manifest import SplitInfo
from tokenmill.store.shard import ShardWriter, publish_shard
from tokenmill.tools.trace import trace_document, trace_step

Fields = list[tuple[str | None, str | None]]


def kept_store(folder: Path, fields: Fields, num_shards: int = 3) -> Any:
    """A store whose documents have the kept fields `lang` and `meta.score`; document n has n % 7 tokens, all n + 1."""
    shards, cuts = [], np.linspace(0, len(fields), num_shards + 1).astype(int).tolist()
    for number, (first, last) in enumerate(itertools.pairwise(cuts)):
        if first == last:
            continue
        name, lengths = f"train/shard-00000-{number:04d}", np.arange(first, last) % 7
        writer = ShardWriter(folder, name, dtype="uint16", keep_keys=["lang", "meta.score"], run="x")
        tokens = np.repeat(np.arange(first, last) + 1, lengths).astype(np.uint16)
        places = np.arange(last - first)
        writer.append(
            tokens,
            lengths.astype(np.int32),
            inputs=places.astype(np.int32) * 0,
            positions=places,
            kept=fields[first:last],
        )
        shards.append(writer.finish())
        publish_shard(folder, shards[-1], "x")
    num_tokens = sum(number % 7 for number in range(len(fields)))
    return tm.open(seal_store(folder, {"train": SplitInfo(len(fields), num_tokens, shards)}))


def numbers_of(documents: Any, store: Any) -> list[int]:
    """Which documents of a store were chosen."""
    shards, inner = documents.locate(np.arange(len(documents)))
    before = np.cumsum([0, *store.split().table.num_documents])
    return (before[shards] + inner).tolist()


langs = st.sampled_from([None, "en", "de", "fr", "", "en-GB"])
scores = st.sampled_from([None, "0", "0.5", "1", "1e3", "-2", "nan"])
OPERATORS = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt}

Truth = Any
"""A function from (lang, score, length) to True, False or None, which is what a missing field gives."""


def compare(name: str, symbol: str, value: Any) -> tuple[str, Truth]:
    def holds(lang: Any, score: Any, length: int) -> Any:
        found = {"lang": lang, "meta.score": score, "num_tokens": length}[name]
        if found is None:
            return None
        return OPERATORS[symbol](float(found) if isinstance(value, (int, float)) else found, value)

    return f"{name} {symbol} {value!r}", holds


def negate(inner: tuple[str, Truth]) -> tuple[str, Truth]:
    text, holds = inner

    def opposite(*row: Any) -> Any:
        found = holds(*row)
        return None if found is None else not found

    return f"not ({text})", opposite


def join(word: str, left: tuple[str, Truth], right: tuple[str, Truth]) -> tuple[str, Truth]:
    def both(*row: Any) -> Any:
        values = left[1](*row), right[1](*row)
        decided = word == "or"  # True decides an `or`, False an `and`
        if decided in values:
            return decided
        return None if None in values else not decided

    return f"({left[0]}) {word} ({right[0]})", both


leaves = st.one_of(
    st.builds(compare, st.just("lang"), st.sampled_from([*OPERATORS]), st.sampled_from(["en", "de", ""])),
    st.builds(compare, st.just("meta.score"), st.sampled_from([*OPERATORS]), st.sampled_from([0, 0.5, -2, 7])),
    st.builds(compare, st.just("num_tokens"), st.sampled_from([*OPERATORS]), st.integers(0, 6)),
    st.just(("lang in ['en', 'fr']", lambda lang, *_: None if lang is None else lang in ("en", "fr"))),
    st.just(("lang not in ('en',)", lambda lang, *_: None if lang is None else lang != "en")),
    st.just(("'n' in lang", lambda lang, *_: None if lang is None else "n" in lang)),
    st.just(("lang.startswith('en')", lambda lang, *_: None if lang is None else lang.startswith("en"))),
    st.just(("field('lang').endswith('B')", lambda lang, *_: None if lang is None else lang.endswith("B"))),
    st.just(("lang is None", lambda lang, *_: lang is None)),
    st.just(("meta.score is not None", lambda _, score, *__: score is not None)),
    st.just(("0 < meta.score <= 1", lambda _, score, *__: None if score is None else 0 < float(score) <= 1)),
)
conditions = st.recursive(
    leaves,
    lambda inner: st.one_of(st.builds(negate, inner), st.builds(join, st.sampled_from(["and", "or"]), inner, inner)),
    max_leaves=5,
)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(langs, scores), min_size=20, max_size=40), conditions, st.integers(1, 4))
def test_where_chooses_what_python_would(fields: Fields, condition: tuple[str, Truth], num_shards: int) -> None:
    text, holds = condition
    with tempfile.TemporaryDirectory() as folder:
        store = kept_store(Path(folder), fields, num_shards)
        expected = [n for n, row in enumerate(fields) if holds(*row, n % 7) is True]
        if not expected:
            with pytest.raises(UsageError, match="no document is left"):
                tm.where(store, text)
            return
        chosen = tm.where(store, text)
        assert numbers_of(chosen, store) == expected
        assert chosen.num_tokens == sum(n % 7 for n in expected)
        assert chosen.fingerprint == tm.allow(store, expected).fingerprint != store.split().fingerprint
        # Of a part, it chooses the part of the whole.
        assert numbers_of(tm.where(tm.skip(store, expected[0]), text), store) == expected


@pytest.mark.parametrize(
    ("condition", "match"),
    [
        ("__import__('os').system('true')", "is no function of this language"),
        ("score > 0.5", "no kept field 'score'; it has lang, meta.score"),
        ("meta.score >", "cannot be read"),
        ("lang", "is not a condition"),
        ("lang + 'x' == 'y'", "is no field"),
        ("lang == lang", "is not a text, a number"),
        ("lang in 'en'", "is not a list of values"),
        ("lang in ['en', 3]", "has both texts and numbers"),
        ("lang > 3", "not a number where 'lang > 3' compares with one"),
        ("meta.score == 12345678901234567890", "too large to compare as a number"),
        ("lang is 'en'", "is not None"),
        ("[lang for lang in ()]", "is not a condition"),
        ("(lambda: lang)() == 'en'", "is no field"),
        ("lang == b'en'", "is not a text"),
        ("lang.startswith(3)", "does not compare a field with a text"),
        ("not " * 3000 + "lang == 'en'", "is not a condition on documents|cannot be read|nested too deeply"),
        ("not " * 2000 + "lang == 'en'", "cannot be read|nested too deeply"),
        ("lang == 'zz'", "no document is left"),
        ("", "is not a condition on documents"),
        (7, "is not a condition on documents"),
    ],
)
def test_other_conditions_are_refused_in_a_sentence(tmp_path: Path, condition: Any, match: str) -> None:
    store = kept_store(tmp_path, [("en", "1"), ("de", "0.5")] * 5)
    with pytest.raises(UsageError, match=match):
        tm.where(store, condition)


def test_a_store_without_kept_fields_says_so(tmp_path: Path) -> None:
    store = tm.open(make_store(tmp_path, make_documents(30)))
    with pytest.raises(UsageError, match="tokenize with --keep-keys"):
        tm.where(store, "lang == 'en'")
    assert len(tm.where(store, "num_tokens >= 5")) < 30


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ([1, 1], "listed twice"),
        ([30], "document 30 is not in"),
        ([-1], "document -1 is not in"),
        (np.ones(7, bool), "7 values|this is"),
        (np.ones((2, 2), int), "shape"),
        ([0.5], "float64"),
        ("abc", "str"),
        (5, "is not a list"),
        ([], "no document is left"),
    ],
)
def test_numbers_that_are_none_are_refused(tmp_path: Path, numbers: Any, match: str) -> None:
    store = tm.open(make_store(tmp_path, make_documents(30)))
    with pytest.raises(UsageError, match=match):
        tm.allow(store, numbers)


@pytest.mark.parametrize("in_c", [True, False])
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.booleans(), min_size=60, max_size=60).filter(lambda chosen: sum(chosen) > 20),
    st.sampled_from(["concat", "best-fit", "pad"]),
    st.integers(1, 12),
    st.booleans(),
)
def test_batches_of_chosen_documents_are_those_of_a_store_of_them(
    in_c: bool, chosen: list[bool], method: Any, seq_len: int, document_mask: bool
) -> None:
    documents = make_documents(60, seed=sum(chosen), shortest=0, longest=9)
    kept = [document for document, is_kept in zip(documents, chosen, strict=True) if is_kept]
    if sum(map(len, kept)) <= seq_len:
        return
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not in_c:
            patch.setattr(kernels, "compiled", None)
        patch.setattr(located_spans, "ROWS_PER_RUN", 1 << 20)
        whole = tm.open(make_store(Path(folder) / "whole", documents))
        alone = tm.open(make_store(Path(folder) / "kept", kept, num_shards=1))
        ours = tm.pack(tm.allow(whole, np.array(chosen)), seq_len=seq_len, method=method)
        theirs = tm.pack(alone, seq_len=seq_len, method=method)
        assert len(ours) == len(theirs) and ours.num_tokens == theirs.num_tokens
        settings: dict[str, Any] = {"batch_size": 3, "epochs": 1.7, "document_mask": document_mask}
        # In a mixture, the rows of one packing are only some of those that are filled together.
        for make in (lambda rows: tm.shuffle(rows, seed=2), lambda rows: tm.mix([(rows, 1), (tm.shuffle(rows), 2)])):
            for a, b in zip(tm.Loader(make(ours), **settings), tm.Loader(make(theirs), **settings), strict=True):
                assert np.array_equal(a.inputs, b.inputs) and np.array_equal(a.targets, b.targets)
                assert np.array_equal(a.positions, b.positions) and a.documents == b.documents


def test_trace_answers_both_ways_for_chosen_documents(tmp_path: Path) -> None:
    store = make_two_stores(tmp_path)[0]
    rows = tm.shuffle(tm.pack(tm.sample(store, 0.3), seq_len=16), seed=1)
    for document in (0, 40, 200):
        for sighting in trace_document(rows, document, batch_size=4):
            row = trace_step(rows, sighting.step, batch_size=4).rows[sighting.place]
            assert (document, sighting.start) in [(part.document, part.start) for part in row.documents]


def test_a_sample_is_a_share_and_a_smaller_one_is_a_part_of_it(tmp_path: Path) -> None:
    store = tm.open(make_store(tmp_path, make_documents(5000, longest=12)))
    large, small = tm.sample(store, 0.5), tm.sample(store, 0.1)
    assert 2300 < len(large) < 2700 and 400 < len(small) < 600
    assert set(numbers_of(small, store)) < set(numbers_of(large, store))
    assert numbers_of(tm.sample(store, 0.5, seed=1), store) != numbers_of(large, store)
    assert len(tm.sample(store, 1)) == 5000
    # The order of choices does not matter.
    long = tm.where(store, "num_tokens > 3")
    both = set(numbers_of(long, store)) & set(numbers_of(small, store))
    assert (
        numbers_of(tm.sample(long, 0.1), store) == sorted(both) == numbers_of(tm.where(small, "num_tokens > 3"), store)
    )


@pytest.mark.parametrize("share", [0, -1, 1.5, "all", None, True])
def test_a_share_that_is_none_is_refused(tmp_path: Path, share: Any) -> None:
    with pytest.raises(UsageError, match="share"):
        tm.sample(tm.open(make_store(tmp_path, make_documents(30))), share)
