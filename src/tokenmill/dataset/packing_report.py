"""What a packing did with its tokens; those that it leaves out are counted here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tokenmill.formatting import plural
from tokenmill.store.table import Integers

__all__ = ["LongDocuments", "PackingReport"]

LongDocuments = Literal["split", "truncate", "drop"]


@dataclass
class PackingReport:
    """Counts of one epoch: the tokens of the store are those kept, left over, truncated and dropped."""

    num_rows: int = 0
    num_tokens: int = 0
    """Tokens in rows."""
    num_padding_tokens: int = 0
    num_split_documents: int = 0
    """Documents that are longer than a row and so in several."""
    num_truncated_documents: int = 0
    num_truncated_tokens: int = 0
    num_dropped_documents: int = 0
    num_dropped_tokens: int = 0
    num_empty_documents: int = 0
    """Documents without a token."""
    num_left_over_tokens: int = 0
    """Tokens at the end of the stream that do not fill a row."""
    num_bounded_rows: int = 0
    """Rows that end early because they have as many documents as they may."""
    left_out: dict[str, int] = field(default_factory=dict)
    """How many pairs have no row, by reason."""

    def count(self, lengths: Integers, seq_len: int, long_documents: LongDocuments) -> Integers:
        """Count documents by their lengths; return into how many pieces of at most `seq_len` each one is cut."""
        long = lengths > seq_len
        num_long, long_tokens = int(long.sum()), int(lengths[long].sum())
        self.num_empty_documents += int((lengths == 0).sum())
        self.num_tokens += int(lengths.sum()) - long_tokens
        pieces = (lengths > 0).astype(np.int64)
        if long_documents == "split":
            pieces = -(-lengths // seq_len)
            self.num_split_documents += num_long
            self.num_tokens += long_tokens
        elif long_documents == "truncate":
            self.num_truncated_documents += num_long
            self.num_truncated_tokens += long_tokens - num_long * seq_len
            self.num_tokens += num_long * seq_len
        else:
            pieces[long] = 0
            self.num_dropped_documents += num_long
            self.num_dropped_tokens += long_tokens
        return pieces

    @property
    def padding(self) -> float:
        """The fraction of places in rows that hold no token."""
        places = self.num_tokens + self.num_padding_tokens
        return self.num_padding_tokens / places if places else 0.0

    def __str__(self) -> str:
        cut, dropped = plural(self.num_truncated_tokens, "token"), plural(self.num_dropped_tokens, "token")
        truncated = plural(self.num_truncated_documents, "document")
        others = [
            (self.num_padding_tokens, f"{self.padding:.3%} padding"),
            (self.num_split_documents, f"{plural(self.num_split_documents, 'document')} split"),
            (self.num_truncated_documents, f"{truncated} truncated ({cut} cut off)"),
            (self.num_dropped_documents, f"{plural(self.num_dropped_documents, 'document')} dropped ({dropped})"),
            (self.num_empty_documents, plural(self.num_empty_documents, "empty document")),
            (self.num_bounded_rows, f"{plural(self.num_bounded_rows, 'row')} ended early by max_documents"),
            (self.num_left_over_tokens, f"{plural(self.num_left_over_tokens, 'token')} left over"),
        ]
        parts = [plural(self.num_rows, "row"), plural(self.num_tokens, "token")]
        parts += [text for count, text in others if count]
        return ", ".join(
            parts + [f"{plural(count, 'pair')} left out: {reason}" for reason, count in self.left_out.items()]
        )
