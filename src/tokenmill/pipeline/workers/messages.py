"""Messages between a run and its processes, as tagged msgpack: orders, notes during a call, and answers."""

from __future__ import annotations

import errno
from collections.abc import Callable

import msgspec

from tokenmill.errors import DataError, MissingDependencyError, StoreError, TokenmillError, UsageError
from tokenmill.pipeline.counts import Stages
from tokenmill.pipeline.input_file import Damage, UnconfirmedText
from tokenmill.pipeline.journal.journal import TaskEntry
from tokenmill.pipeline.plan.tasks import Stream, Task
from tokenmill.pipeline.task.gate_sample import GateSample

__all__ = [
    "Cut",
    "CutStream",
    "Failed",
    "Finished",
    "Order",
    "Report",
    "RunGate",
    "RunStream",
    "RunTask",
    "decode_answer",
    "decode_note",
    "decode_order",
    "encode",
]

_FREE_SPACE = "free some space, then "
_REMEDIES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), then ",
}

_ERRORS: dict[str, Callable[..., TokenmillError]] = {
    "data": DataError,
    "unconfirmed": UnconfirmedText,
    "missing": MissingDependencyError,
    "usage": UsageError,
    "store": StoreError,
    "error": TokenmillError,
}


class RunGate(msgspec.Struct, tag=True, frozen=True):
    """Sample the inputs for the parity gate, and encode the sample and the awkward strings."""

    with_awkward: bool
    """Whether the strings are needed: for an equal tokenizer and engine, they were compared before."""


class RunTask(msgspec.Struct, tag=True, frozen=True):
    """Tokenize one task, and publish it unless the run will do so when the parity gate has passed."""

    task: Task
    publish: bool


class CutStream(msgspec.Struct, tag=True, frozen=True):
    """Read a stream and cut it into tasks, whose text goes to spool files for other processes."""

    stream: Stream


class RunStream(msgspec.Struct, tag=True, frozen=True):
    """Read a stream and tokenize every task of it whose number leaves the remainder `part`."""

    stream: Stream
    part: int
    num_parts: int


class Report(msgspec.Struct, tag=True):
    """The progress of a call since it was started."""

    task: str = ""
    num_tasks: int = 0
    disk_bytes: int = 0
    work: Stages = msgspec.field(default_factory=Stages)
    num_recycled: int = 0
    memory_bytes: int = 0


class Cut(msgspec.Struct, tag=True, frozen=True):
    """The text of a task is in its spool file and can be tokenized."""

    task: Task


class Finished(msgspec.Struct, tag=True, frozen=True):
    """The result of a call."""

    report: Report
    records: list[TaskEntry]
    """The tasks that it tokenized."""
    mark: str | None = None
    """The mark of their temporary files, if they are not published yet."""
    numbers: list[int] = []
    """The numbers of all tasks of its stream; those that lie inside one huge document are left out."""
    damage: Damage | None = None
    """Why the stream must be read again, up to the damaged frame."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The error of a call, which ends the run."""

    kind: str
    arguments: list[str | None]

    @classmethod
    def from_error(cls, error: BaseException, store: str) -> Failed:
        """Describe an exception for another process; a failed write that names no file gets the name of the store."""
        if isinstance(error, DataError):
            kind = "unconfirmed" if isinstance(error, UnconfirmedText) else "data"
            return cls(kind, [error.path, error.reason, error.place])
        if isinstance(error, MissingDependencyError):
            return cls("missing", [error.what, error.extra])
        if isinstance(error, OSError):
            hint = _REMEDIES.get(error.errno or 0, "")
            said = (
                f"{error.strerror or error} ({error.filename or store}); {hint}run the same command again to continue"
            )
            return cls("store", [said])
        kind = "usage" if isinstance(error, UsageError) else "store" if isinstance(error, StoreError) else "error"
        return cls(kind, [str(error) or type(error).__name__])

    def to_error(self) -> TokenmillError:
        """Rebuild the exception in the process of the run."""
        return _ERRORS[self.kind](*self.arguments)


Order = RunGate | RunTask | CutStream | RunStream

encode = msgspec.msgpack.Encoder().encode
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_notes: msgspec.msgpack.Decoder[Report | Cut] = msgspec.msgpack.Decoder(Report | Cut)
_answers: msgspec.msgpack.Decoder[GateSample | Finished | Failed] = msgspec.msgpack.Decoder(
    GateSample | Finished | Failed
)
decode_order, decode_note, decode_answer = _orders.decode, _notes.decode, _answers.decode
