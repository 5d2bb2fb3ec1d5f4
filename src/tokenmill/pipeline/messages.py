"""What a run and its workers say to each other, as tagged msgpack."""

from __future__ import annotations

import errno

import msgspec

from tokenmill.errors import DataError, MissingDependencyError, StoreError, TokenmillError, UsageError
from tokenmill.pipeline.journal import TaskRecord
from tokenmill.pipeline.plan import Stream, Task
from tokenmill.pipeline.stages import Stages
from tokenmill.store.manifest import ParityInfo

__all__ = [
    "WORKER",
    "Cut",
    "Done",
    "Failed",
    "FeedStream",
    "FromWorker",
    "GateResult",
    "Held",
    "MayPublish",
    "NeedSlot",
    "Preview",
    "Progress",
    "RunGate",
    "RunTask",
    "Slot",
    "StreamEnded",
    "ToWorker",
    "decode_from_worker",
    "decode_to_worker",
    "encode",
]

WORKER = "tokenmill.pipeline.worker"
"""The module whose functions worker processes run."""

_FREE_SPACE = "free some space, then "
_REMEDIES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), then ",
}


class RunTask(msgspec.Struct, tag=True, frozen=True):
    """Tokenize one task, and publish it unless it is to be held back."""

    task: Task
    hold: bool


class FeedStream(msgspec.Struct, tag=True, frozen=True):
    """Cut one stream into tasks, passing over those that are done."""

    stream: Stream
    done: list[int]


class Slot(msgspec.Struct, tag=True, frozen=True):
    """A file that the feeder may write its next span to."""

    path: str


class RunGate(msgspec.Struct, tag=True, frozen=True):
    """Compare the engine with its reference."""


class MayPublish(msgspec.Struct, tag=True, frozen=True):
    """The gate has passed: publish what was held back."""


class Held(msgspec.Struct, tag=True, frozen=True):
    """A task is durable, but has no name yet."""


class Done(msgspec.Struct, tag=True, frozen=True):
    """A task is published and entered in the journal."""

    record: TaskRecord


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The worker met an error that ends the run."""

    kind: str
    arguments: list[str | None]

    @classmethod
    def from_error(cls, error: BaseException, store: str) -> Failed:
        """Put an exception into words that cross a process boundary; a failed write may not know its file."""
        if isinstance(error, DataError):
            return cls("data", [error.path, error.reason, error.place])
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
        """The exception again, on the other side."""
        if self.kind == "data":
            path, reason, place = self.arguments
            return DataError(str(path), str(reason), place)
        if self.kind == "missing":
            return MissingDependencyError(str(self.arguments[0]), str(self.arguments[1]))
        kind = {"usage": UsageError, "store": StoreError}.get(self.kind, TokenmillError)
        return kind(str(self.arguments[0]))


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Work done since the last report."""

    stages: Stages
    num_recycled: int


class NeedSlot(msgspec.Struct, tag=True, frozen=True):
    """The feeder has a span to write and needs a file for it."""


class Cut(msgspec.Struct, tag=True, frozen=True):
    """A span has been written to its slot and can be tokenized."""

    task: Task


class StreamEnded(msgspec.Struct, tag=True, frozen=True):
    """A stream was read to its end."""

    stream: Stream
    numbers: list[int]
    """Of its tasks: those that one huge document covers are left out."""


class Preview(msgspec.Struct, frozen=True):
    """The start and end of one document as the run will write it."""

    text: str
    ids: str
    num_tokens: int


class GateResult(msgspec.Struct, tag=True, frozen=True):
    """The comparison with the reference, and one document as the run will write it."""

    parity: ParityInfo
    preview: Preview | None
    unseen_keys: list[str] = []
    """Fields to keep that no document of the sample has."""


ToWorker = RunTask | FeedStream | Slot | RunGate | MayPublish
FromWorker = Held | Done | Failed | Progress | NeedSlot | Cut | StreamEnded | GateResult

encode = msgspec.msgpack.Encoder().encode
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
decode_to_worker = _to_worker.decode
decode_from_worker = _from_worker.decode
