"""Where a directory stands: empty, unfinished or finished, and whether this request may go on there.

A store is one request's work. The same command continues it or finds it done; a command with
other inputs or content flags is refused with the difference named, because mixing them would
give a store that nobody asked for.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.engines import Tokenizer
from tokenmill.errors import StoreError
from tokenmill.pipeline.journal import Journal, SavedPlan, TaskRecord
from tokenmill.pipeline.plan import InputFile, Plan, make_plan
from tokenmill.pipeline.settings import Settings
from tokenmill.pipeline.sharing import WHOLE, Share, membership
from tokenmill.store.manifest import MANIFEST, Manifest, read_manifest

__all__ = ["Standing", "begin_or_resume", "find_finished", "is_discarded", "is_same"]


@dataclass(frozen=True)
class Standing:
    """What there is to do, and what earlier attempts left."""

    manifest: Manifest | None = None
    """The store is finished, and by the same request."""
    plan: Plan = field(default_factory=lambda: Plan([], [], []))
    """The whole run."""
    part: Plan = field(default_factory=lambda: Plan([], [], []))
    """What of it this process does."""
    done: dict[str, TaskRecord] = field(default_factory=dict)
    """Of that part."""
    ended_streams: dict[int, list[int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def has_work(self) -> bool:
        """Whether anything of this process's part is left to do."""
        names = [task.name for task in self.part.tasks]
        for stream in self.part.streams:
            if stream.input not in self.ended_streams:
                return True
            names += map(stream.task_name, self.ended_streams[stream.input])
        return any(name not in self.done for name in names)


def begin_or_resume(
    journal: Journal,
    settings: Settings,
    files: list[InputFile],
    tokenizer: Tokenizer,
    *,
    plan: Plan | None = None,
    overwrite: bool = False,
) -> Standing:
    """Decide what is left to do in a directory, and prepare it; `plan` is made here, unless it was made before."""
    store = journal.store
    if overwrite:
        _erase(store)
    if journal.mirror is not None:
        if overwrite:
            journal.mirror.erase()
        journal.mirror.pull(store)
    saved = None
    manifest = find_finished(store, settings, files, journal.share)
    if manifest is None and not journal.exists():
        saved = _begin(journal, settings, plan or make_plan(files, settings))
        # Without locks, it may have been finished between the two looks.
        manifest = find_finished(store, settings, files, journal.share)
    if manifest is not None:
        journal.sweep_finished()
        return Standing(manifest)
    saved = saved or journal.saved_plan()
    begun = _Begun(store, saved.settings, _describe(saved.inputs), "another tokenizer")
    _refuse_differences(begun, settings, files, journal.share)
    tokenizer.save(store / "tokenizer")
    if journal.mirror is not None:
        journal.mirror.push_tokenizer(store)
    return _resume(journal, saved, settings, files, plan)


def is_discarded(journal: Journal, settings: Settings, files: list[InputFile]) -> bool:
    """Whether another request was begun here and nothing of it done: it may have ended for the flag that is new now."""
    if not journal.share.is_whole or not journal.exists() or journal.names() or (journal.store / MANIFEST).exists():
        return False
    return not is_same(journal.saved_plan(), settings, files)


def find_finished(store: Path, settings: Settings, files: list[InputFile], share: Share = WHOLE) -> Manifest | None:
    """The manifest of a store that is finished, if this request would make the same one; None if there is none."""
    if not (store / MANIFEST).exists():
        return None
    manifest = read_manifest(store)
    described = [(file.path, file.bytes, file.fingerprint) for file in manifest.inputs]
    begun = _Begun(store, manifest.settings, described, manifest.tokenizer.name)
    _refuse_differences(begun, settings, files, share)
    return manifest


def is_same(saved: SavedPlan, settings: Settings, files: list[InputFile]) -> bool:
    """Whether a run that was begun is one of these settings and inputs."""
    return saved.settings == settings.flags() and _describe(saved.inputs) == _describe(files)


def _describe(files: list[InputFile]) -> list[tuple[str, int, str]]:
    return [(file.name, file.bytes, file.fingerprint) for file in files]


def _begin(journal: Journal, settings: Settings, plan: Plan) -> SavedPlan | None:
    """Write the plan down; None if another rank was faster."""
    if journal.share.is_whole:
        journal.clear()
    elif journal.names() and not journal.exists():
        raise StoreError(
            f"{journal.store} holds what is left of a store that was being overwritten; remove it (rm -r "
            f"{journal.store}), then start all ranks again"
        )
    saved = _saved(settings, plan)
    return saved if journal.begin(saved) else None


def _saved(settings: Settings, plan: Plan) -> SavedPlan:
    return SavedPlan(settings.flags(), Plan(plan.inputs, plan.tasks, plan.streams))


def _resume(
    journal: Journal, saved: SavedPlan, settings: Settings, files: list[InputFile], plan: Plan | None
) -> Standing:
    """Keep finished tasks, except those of inputs that were touched since and may be others: those are done again."""
    files = [_recognize(old, new, journal.share) for old, new in zip(saved.inputs, files, strict=True)]
    if any(old.stamp != new.stamp for old, new in zip(saved.inputs, files, strict=True)):
        plan = plan or make_plan(files, settings)
        journal.amend(_saved(settings, plan))
    # Cut once: what a run that continues would cut may depend on its version.
    plan = msgspec.structs.replace(plan or saved.plan, inputs=files)
    part = journal.share.of(plan)
    notes = []
    done = {}
    touched: set[int] = set()
    redone = 0
    for record in journal.records(membership(part)):
        if modified := record.modified(files):
            touched |= modified
            journal.forget(record)
            redone += 1
        elif not journal.is_whole(record):
            journal.forget(record)
            notes.append(f"the shards of task {record.name} are damaged or missing; it is done again")
        else:
            done[record.name] = record
    if redone:
        names = ", ".join(files[number].name for number in sorted(touched)[:3])
        notes.append(f"{names}: modified since the run began; its {redone} finished tasks are done again")
    if done:
        notes.append(f"continuing: {len(done):,} tasks are already done")
    journal.sweep(done)
    return Standing(None, plan, part, done, journal.ended_streams(files), tuple(notes))


def _recognize(old: InputFile, new: InputFile, share: Share) -> InputFile:
    """An input that was touched since the run began: untouched, where its whole content is known to be equal.

    Of a large one only a sample is known. A run does its tasks again; ranks would undo each other's work for ever
    where each has a copy with a time of its own.
    """
    if old.stamp == new.stamp:
        return new
    if not new.is_sampled:
        return msgspec.structs.replace(new, mtime_ns=old.mtime_ns, origin=old.origin)
    if share.is_whole:
        return new
    if old.origin != new.origin:
        raise StoreError(
            f"{new.name} was fetched from {old.origin or 'a file'} when the run was begun, and from "
            f"{new.origin or 'a file'} by {share}; name the same revision in the commands of all ranks"
        )
    raise StoreError(
        f"{new.name} has another modification time for {share} than when the run was begun; copies on several machines "
        "need the same times (rsync -a, cp -p); if the file was changed, remove the store and start all ranks again"
    )


@dataclass(frozen=True)
class _Begun:
    """What a directory was begun with."""

    store: Path
    settings: dict[str, Any]
    inputs: list[tuple[str, int, str]]
    tokenizer: str


def _refuse_differences(begun: _Begun, settings: Settings, files: list[InputFile], share: Share) -> None:
    store, before, now = begun.store, begun.settings, settings.flags()
    advice = "Use another directory, or --overwrite"
    if not share.is_whole:
        advice = f"Use another directory, or remove {store} and start all ranks again"
    # The size of tasks follows from that of the inputs, so a difference of inputs is told first.
    differing = [flag for flag in now if before.get(flag) != now[flag] and flag != "task-bytes"]
    for flag in differing:
        old, value = before.get(flag), now[flag]
        if flag == "tokenizer":
            raise StoreError(
                f"{store} was tokenized with {begun.tokenizer} ({str(old)[:6]}); this run's tokenizer is another one "
                f"({str(value)[:6]}). {advice}"
            )
        raise StoreError(f"{store} was made with --{flag} {_show(old)}; this run has {_show(value)}. {advice}")
    names_before = [name for name, _, _ in begun.inputs]
    names_now = [file.name for file in files]
    if names_before != names_now:
        all_before, all_now = set(names_before), set(names_now)
        gone = [name for name in names_before if name not in all_now]
        added = [name for name in names_now if name not in all_before]
        difference = f"without {gone[0]}" if gone else f"with {added[0]} added" if added else "in another order"
        raise StoreError(
            f"{store} was made from {len(names_before)} inputs; this run has {len(names_now)}, {difference}. {advice}"
        )
    for (name, size, mark), file in zip(begun.inputs, files, strict=True):
        if size != file.bytes:
            raise StoreError(f"{name} had {size} bytes when {store} was begun and has {file.bytes} now. {advice}")
        if mark != file.fingerprint:
            raise StoreError(f"{name} has other content than when {store} was begun, at the same size. {advice}")
    old, value = before.get("task-bytes"), now["task-bytes"]
    if old != value:
        raise StoreError(f"{store} was made with --task-bytes {old}; this run has {value}. {advice}")


def _show(value: Any) -> str:
    return "not set" if value is None else repr(value) if isinstance(value, str) else str(value)


def _erase(store: Path) -> None:
    """Remove a store, the manifest first, so that a kill in between leaves no store that looks whole.

    The journal goes last: without it or a manifest, the directory would count as somebody else's.
    """
    journal = store / ".tasks"
    if any((store / name).exists() for name in (MANIFEST, ".tasks")):
        journal.mkdir(exist_ok=True)
    (journal / "plan.json").unlink(missing_ok=True)
    for name in (MANIFEST, "run.json", "rejects.jsonl"):
        (store / name).unlink(missing_ok=True)
    for split in ("train", "val"):
        for path in (store / split).glob("shard-*"):
            path.unlink()
        with suppress(OSError):
            (store / split).rmdir()
    shutil.rmtree(store / "tokenizer", ignore_errors=True)
    shutil.rmtree(journal, ignore_errors=True)
