"""The job that is sent to every worker process of a run."""

from __future__ import annotations

import msgspec

from tokenmill.pipeline.input_file import InputFile
from tokenmill.pipeline.plan.ranks import WHOLE, Share
from tokenmill.pipeline.settings import OnError, Settings

__all__ = ["Job"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a process needs to run any task of a run."""

    store: str
    inputs: list[InputFile]
    settings: Settings
    engine: str
    vocab_size: int
    special_ids: list[int]
    on_error: OnError
    batch_size: int | None
    worker_bytes: int
    """The memory limit of one worker."""
    profile: str | None = None
    """The file to which the worker with this job writes its profile."""
    mirror: str | None = None
    """The URL of the store if it is in a bucket; `store` is a scratch directory then."""
    plan_tag: str | None = None
    """The ETag of the plan in the bucket."""
    scratch: str | None = None
    """The folder in which machines of a cluster create their own scratch directories."""
    share: Share = WHOLE
    attempt: str = ""
    """A unique word for the names of temporary files."""
