"""Checkpoints of a training run: one file per step in a folder, each complete or absent.

A file is written under a temporary name, synced and renamed, so a kill at any moment leaves only complete files. It
holds the states of all parts of a run, including the place in the data, and what identifies the run. The
caller passes the functions that write and read a file, so no framework is imported here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from tokenmill.arguments import local_path, whole_number
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.files import sync_directory

__all__ = ["Checkpoints"]

WHAT_TO_DO = "use the settings that it was made with, or another folder"


class Stateful(Protocol):
    """A part of a training run: a loader, a model, an optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the part needs to continue."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Continue from a state."""


class Checkpoints:
    """The checkpoints `step-00000500.pt` and so on of a folder, of which the newest `keep` are kept.

        parts = {"data": loader, "model": model, "optimizer": optimizer}
        checkpoints = tm.Checkpoints("checkpoints", parts, {"width": 256})
        saved = checkpoints.resume(lambda path: torch.load(path, weights_only=True))
        step = saved["step"] if saved else 0
        checkpoints.save(step, torch.save)

    `identity` is what a checkpoint must agree with to be resumed. If several ranks train together, one of them saves,
    and all of them resume.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        parts: Mapping[str, Stateful],
        identity: Mapping[str, Any] | None = None,
        *,
        keep: int = 2,
        suffix: str = ".pt",
    ) -> None:
        self.folder = local_path(folder, "checkpoints")
        self._parts = dict(parts)
        self._identity = dict(identity or {})
        self._keep = whole_number(keep, "keep", 1)
        self._suffix = suffix

    def paths(self) -> list[Path]:
        """List the complete checkpoints, oldest first."""
        found = {path.name.removeprefix("step-").removesuffix(self._suffix): path for path in self._glob("")}
        return [found[number] for number in sorted(filter(str.isdecimal, found), key=int)]

    def save(self, step: int, write: Callable[[dict[str, Any], IO[bytes]], object], **more: Any) -> Path:
        """Write the parts and `more` as one file, then delete checkpoints that are too old or unfinished."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{whole_number(step, 'step', 0):08d}{self._suffix}"
        temporary = path.with_name(f"{path.name}.tmp")
        states = {name: part.state_dict() for name, part in self._parts.items()}
        try:
            with temporary.open("wb") as file:
                write({**more, **states, "step": step, "identity": self._identity}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            # torch.save raises a RuntimeError of its own while it handles the error of the disk.
            cause = error.__context__ if isinstance(error, RuntimeError) else error
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror, str(path)) from None
            raise
        sync_directory(self.folder)
        for old in [*self.paths()[: -self._keep], *self._glob(".tmp")]:
            old.unlink()
        return path

    def resume(self, read: Callable[[Path], Any]) -> dict[str, Any] | None:
        """Load the newest checkpoint into the parts; return its content and its `path`, or None if there is none.

        If a file is damaged, a line on the standard error says so, and the one before it is loaded.
        """
        paths = self.paths()
        for path in reversed(paths):
            try:
                content = read(path)
                if isinstance(content, dict) and isinstance(content.get("identity"), dict):
                    self._load(path, content)
                    return {**content, "path": path}
                reason = "it is not a checkpoint of this trainer"
            except (TokenmillError, OSError, MemoryError):
                raise
            except Exception as error:  # Each framework has errors of its own for a damaged file.
                reason = str(error).partition("\n")[0]
            print(f"tokenmill: {path} cannot be read: {reason}", file=sys.stderr)
        if paths:
            raise UsageError(f"no checkpoint in {self.folder} can be read; delete them, or use another folder")
        return None

    def _load(self, path: Path, content: dict[str, Any]) -> None:
        """Load the states of the parts, unless the checkpoint is one of another run."""
        for name, ours in self._identity.items():
            theirs = content["identity"].get(name)
            if theirs != ours:
                raise UsageError(f"{path} is of another run: {name} is {theirs} there and {ours} here; {WHAT_TO_DO}")
        for name, part in self._parts.items():
            try:
                part.load_state_dict(content[name])
            except UsageError as error:
                reason = str(error).partition(";")[0]
                raise UsageError(f"{path} has other {name}: {reason}; {WHAT_TO_DO}") from None

    def _glob(self, ending: str) -> list[Path]:
        return list(self.folder.glob(f"step-*{self._suffix}{ending}"))
