"""Preference pairs: two answers to one prompt, as two documents that follow each other.

The answer begins where the tokens of the prompt alone and of the prompt with an answer first differ, in either of the
two. That is TRL's rule, and like TRL this encodes three texts for it: no rule about characters gives the same places
where a token crosses the end of the prompt, or where a template writes the prompt differently once an answer follows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.supervision.chat import Message
from tokenmill.supervision.masks import Weights, assemble
from tokenmill.supervision.record_messages import clean_messages, collect_strings, read_tools
from tokenmill.supervision.renderer import Renderer
from tokenmill.text_batch import IntArray, Refusal, Reject, TextBatch, TokenBatch, Trained

__all__ = [
    "LATE_REASONS",
    "NO_TEMPLATE",
    "AssembledPairs",
    "PairRenderer",
    "assemble_pairs",
    "reject_empty_pairs",
]

Texts = tuple[str, str, str, bool]
"""The prompt alone, the prompt with the chosen and with the rejected answer, and whether an EOS follows."""
ASKING = {"user", "system", "developer"}
"""Roles that do not answer: a difference in such a message is a difference between prompts."""


_WITHOUT_KEY = "; if the answers hold the prompt too, leave --prompt-key out"
_EQUAL = Refusal("equal-answers", "the chosen and the rejected answer are the same")
_NO_ANSWER = Refusal("no-answer", "the chosen or the rejected answer is empty")
_DIFFERENT = Refusal(
    "different-prompts",
    "the chosen and the rejected answer do not begin with one prompt; pass --prompt-key, or correct it",
)
_REPEATED = Refusal(
    "repeated-prompt",
    "both answers begin with the messages of the prompt; leave --prompt-key out, or remove them there",
)
_EQUAL_TOKENS = Refusal("equal-tokens", "the chosen and the rejected answer have the same tokens")
_NO_TOKENS = Refusal("no-answer-tokens", "the chosen or the rejected answer adds no token to the prompt")
LATE_REASONS = (_EQUAL_TOKENS.reason, _NO_TOKENS.reason)
"""Reasons of rejects that only the tokens show."""
NO_TEMPLATE = Refusal(
    "no-chat-template", "it has messages, and the tokenizer has no chat template; pass one with --chat-template FILE"
)


class PairRenderer(Renderer):
    """Renders records with two answers to two texts each, one after the other."""

    def render(self, batch: TextBatch) -> TextBatch:
        """Replace the records of a batch by the texts of their answers; both texts of a bad record are left out."""
        if batch.records is None:
            return batch
        rendered = [self._render_texts(record) for record in batch.records]
        good = [number for number, texts in enumerate(rendered) if not isinstance(texts, Refusal)]
        lines = batch.lines if batch.lines is not None else np.full(len(rendered), -1)
        for number, refusal in enumerate(rendered):
            if isinstance(refusal, Refusal):
                batch.rejects.append(Reject(int(batch.positions[number]), int(lines[number]), *refusal))
        twice = np.repeat(np.array(good, np.int64), 2)
        texts: list[str] = []
        batch.trained = []
        for prompt, chosen, rejected, ends in (rendered[number] for number in good):  # type: ignore[misc]
            texts += [chosen, rejected]
            batch.trained += [Trained([(0, len(text), 1.0)], ends, prompt) for text in (chosen, rejected)]
        batch.texts, batch.records, batch.per_record = texts, None, 2
        batch.positions, batch.lines = batch.positions[twice], lines[twice]
        if batch.kept is not None:
            batch.kept = [batch.kept[number] for number in twice.tolist()]
        return batch

    def _render_texts(self, record: tuple[Any, ...]) -> Texts | Refusal:
        _, tools, prompt, _, _, chosen, rejected = self._pick((*record, None))
        options = self._options
        values = {options.chosen_key: chosen, options.rejected_key: rejected}
        if options.prompt_key is not None:
            values = {options.prompt_key: prompt, **values}
        for key, value in values.items():
            if value is None:
                return Refusal("missing-field", f"field {key!r} is missing or null")
            if not isinstance(value, (str, list)):
                kind = type(value).__name__
                return Refusal("not-a-string", f"field {key!r} is {kind}; expected a string or a list of messages")
        if len({type(value) for value in values.values()}) > 1:
            kinds = ", ".join(
                f"{key!r} is {'text' if isinstance(value, str) else 'messages'}" for key, value in values.items()
            )
            hint = "" if isinstance(prompt, list) or type(chosen) is not type(rejected) else _WITHOUT_KEY
            return Refusal("mixed-types", f"{kinds}; all must be text, or all messages{hint}")
        if isinstance(chosen, str):
            found = self._render_plain(prompt, chosen, rejected)
        else:
            found = self._render_conversations(prompt, chosen, rejected, tools)
        if isinstance(found, Refusal) or 4 * max(map(len, found[1:3])) <= self._max_bytes:
            return found
        if max(len(text.encode()) for text in found[1:3]) > self._max_bytes:
            return Refusal("too-long", f"its text has more bytes than --max-document-bytes {self._max_bytes:,}")
        return found

    def _render_plain(self, prompt: str | None, chosen: str, rejected: str) -> Texts | Refusal:
        strings = [text for text in (prompt, chosen, rejected) if text is not None]
        if refusal := self._refuse_strings(strings):
            return refusal
        if chosen == rejected:
            return _EQUAL
        if prompt is not None:
            before = "".join(
                prompt if piece == "prompt" else piece for piece in self._pieces[: _answer_at(self._pieces)]
            )
            after = "".join(self._pieces[_answer_at(self._pieces) + 1 :])
        else:
            shared = _shared_text(chosen, rejected)
            before, chosen, rejected, after = chosen[:shared], chosen[shared:], rejected[shared:], ""
            if not before:
                return _DIFFERENT
        if not chosen or not rejected:
            return _NO_ANSWER
        return before, before + chosen + after, before + rejected + after, True

    def _render_conversations(self, prompt: Any, chosen: Any, rejected: Any, tools: Any) -> Texts | Refusal:
        if self._chat is None:
            return NO_TEMPLATE
        if not chosen or not rejected:
            return _NO_ANSWER
        known = read_tools(tools)
        if isinstance(known, Refusal):
            return known
        sides = [clean_messages(messages, fills_content=self._chat.needs_content) for messages in (chosen, rejected)]
        opening = clean_messages(prompt, fills_content=self._chat.needs_content) if prompt is not None else []
        for messages in (opening, *sides):
            if isinstance(messages, Refusal):
                return messages
            if refusal := self._refuse_strings(collect_strings([messages, known])):
                return refusal
        better, worse = sides
        assert isinstance(better, list)
        assert isinstance(worse, list)
        assert isinstance(opening, list)
        if better == worse:
            return _EQUAL
        if prompt is None:
            shared = _shared_messages(better, worse)
            opening, better, worse = better[:shared], better[shared:], worse[shared:]
        elif better[: len(opening)] == worse[: len(opening)] == opening:
            return _REPEATED
        if not opening or {better[0]["role"], worse[0]["role"]} & ASKING:
            return _DIFFERENT
        texts = [
            self._chat.render_text(messages, known, prompt=is_alone)
            for messages, is_alone in ((opening, True), (opening + better, False), (opening + worse, False))
        ]
        bad = next((text for text in texts if isinstance(text, Refusal)), None)
        return bad or (texts[0], texts[1], texts[2], self._options.ends_messages)  # type: ignore[return-value]


def _answer_at(pieces: list[str]) -> int:
    """Return the place of the answer among the pieces of a template."""
    return next(number for number, piece in enumerate(pieces) if number % 2 and piece == "response")


def _shared_text(chosen: str, rejected: str) -> int:
    """Return the length of the shared beginning, without the space before the answers, and shorter than both texts."""
    shortest = min(len(chosen), len(rejected))
    shared = next((at for at in range(shortest) if chosen[at] != rejected[at]), None)
    if shared is None:
        return max(0, shortest - 1)
    return shared - 1 if shared and chosen[shared - 1] == " " else shared


def _shared_messages(chosen: list[Message], rejected: list[Message]) -> int:
    """Return how many messages both begin with, without the last one of either."""
    most = min(len(chosen), len(rejected)) - 1
    return next((at for at in range(most) if chosen[at] != rejected[at]), most)


class AssembledPairs(NamedTuple):
    """Pairs of documents as they are stored, and three lengths of each pair.

    `shared` has a row for each document, the same for both of a pair: the tokens of the prompt, and how many tokens
    the two documents share at their start and at their end. With these, a loader knows which pairs a maximum length
    makes equal, without reading their tokens.
    """

    tokens: IntArray
    lengths: npt.NDArray[np.int32]
    weights: Weights
    shared: npt.NDArray[np.int32]


def assemble_pairs(
    texts: list[str],
    trained: list[Trained],
    encode: Callable[[list[str]], TokenBatch],
    *,
    bos_id: int | None,
    eos_id: int | None,
    dtype: npt.DTypeLike,
) -> AssembledPairs:
    """Encode the texts of pairs, and find where the answers begin."""

    def surround(
        texts: list[str], trained: list[Trained], eos_id: int | None
    ) -> tuple[IntArray, npt.NDArray[np.int64]]:
        encoded = encode(texts)
        blank = np.zeros(len(encoded.ids), np.float32)
        made = assemble(encoded, blank, trained, bos_id=bos_id, eos_id=eos_id, dtype=dtype)
        return made.tokens, np.concatenate([[0], np.cumsum(made.lengths, dtype=np.int64)])

    prompts = [str(some.prompt) for some in trained[::2]]
    tokens, edges = surround(texts, trained, eos_id)
    alone, prompt_edges = surround(prompts, [Trained([], False)] * len(prompts), None)
    shared = np.empty((len(prompts), 3), np.int32)
    for pair, (start, stop) in enumerate(pairwise(prompt_edges.tolist())):
        first, middle, last = edges[2 * pair : 2 * pair + 3].tolist()
        prompt, chosen, rejected = alone[start:stop], tokens[first:middle], tokens[middle:last]
        num_prompt = min(_count_shared(prompt, chosen), _count_shared(prompt, rejected))
        shared[pair] = num_prompt, _count_shared(chosen, rejected), _count_shared(chosen[::-1], rejected[::-1])
    shared, lengths = np.repeat(shared, 2, axis=0), np.diff(edges)
    places = np.arange(len(tokens)) - np.repeat(edges[:-1], lengths)
    weights = (places >= np.repeat(shared[:, 0], lengths)).astype(np.float32)
    return AssembledPairs(tokens, lengths.astype(np.int32), weights, shared)


def reject_empty_pairs(batch: TextBatch, pairs: AssembledPairs) -> AssembledPairs:
    """Make rejects of pairs that differ in their texts and not in their tokens, or whose answer adds no token."""
    num_prompt, prefix, _ = pairs.shared[::2].T
    lengths = pairs.lengths.reshape(-1, 2)
    equal = (lengths == prefix[:, None]).all(axis=1)
    bad = equal | (lengths <= num_prompt[:, None]).any(axis=1)
    if not bad.any():
        return pairs
    for pair in np.flatnonzero(bad).tolist():
        line = int(batch.lines[2 * pair]) if batch.lines is not None else -1
        refusal = _EQUAL_TOKENS if equal[pair] else _NO_TOKENS
        batch.rejects.append(Reject(int(batch.positions[2 * pair]), line, *refusal))
    good = np.repeat(~bad, 2)
    batch.keep(good)
    tokens = np.repeat(good, pairs.lengths)
    return AssembledPairs(pairs.tokens[tokens], pairs.lengths[good], pairs.weights[tokens], pairs.shared[good])


def _count_shared(a: IntArray, b: IntArray) -> int:
    """Count the tokens that two documents have in common before they differ."""
    shortest = min(len(a), len(b))
    differs = a[:shortest] != b[:shortest]
    return int(differs.argmax()) if differs.any() else shortest
