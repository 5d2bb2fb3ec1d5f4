"""The state of a directory: empty, unfinished or finished, and whether this request may resume it.

A store belongs to one request. The same command resumes it or finds it done. A command with other inputs or content
flags is refused with the difference named, because a mix of the two would be a store that no command asked for.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.errors import StoreError
from tokenmill.files import sync_directory
from tokenmill.formatting import plural
from tokenmill.pipeline.counts import Counts
from tokenmill.pipeline.input_file import InputFile
from tokenmill.pipeline.journal.journal import Journal, SavedPlan, TaskRecord
from tokenmill.pipeline.journal.mirror import file_sizes
from tokenmill.pipeline.plan.prepare import Prepared
from tokenmill.pipeline.plan.ranks import Share, membership
from tokenmill.pipeline.plan.tasks import Plan, Stream, Task
from tokenmill.pipeline.settings import KEEP_DAMAGED, ON_ERROR
from tokenmill.store.manifest import MANIFEST, Manifest, read_manifest

__all__ = ["RunState", "begin_or_resume", "check_sizes", "find_finished", "is_same"]


@dataclass(frozen=True)
class RunState:
    """The plan of a run, and the part of it that earlier attempts have done."""

    plan: Plan
    """The plan of the whole run."""
    part: Plan
    """The tasks and streams of this process's rank."""
    done: dict[str, TaskRecord] = field(default_factory=dict)
    """The finished tasks of `part`."""
    ended_streams: dict[int, list[int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def remaining(self) -> tuple[list[Task], list[Stream]]:
        """Return the tasks and streams of `part` that are left to do."""
        tasks = [task for task in self.part.tasks if task.name not in self.done]
        streams = [
            stream
            for stream in self.part.streams
            if stream.input not in self.ended_streams
            or any(stream.task_name(number) not in self.done for number in self.ended_streams[stream.input])
        ]
        return tasks, sorted(streams, key=self.part.place)

    def counts(self) -> Counts:
        """Count what was done when this attempt began."""
        total = self.part.size_on_disk(self.part.tasks, self.part.streams)
        before = total - self.part.size_on_disk(*self.remaining())
        rejects = sum(sum(record.rejects.values()) for record in self.done.values())
        return Counts(total, before, before, len(self.done), rejects)


def begin_or_resume(
    journal: Journal,
    prepared: Prepared,
    plan_for: Callable[[list[InputFile]], Plan],
    *,
    order: dict[str, int] | None = None,
    may_discard: bool = False,
) -> RunState | Manifest:
    """Prepare a directory and return what is left to do there, or the manifest if the store is finished.

    `plan_for` makes the plan of a new run; a resumed run has the plan of its journal, with `order` as the order of its
    tasks. `may_discard` lets it remove the journal of a different request that finished no task.
    """
    store, mirror, share = journal.store, journal.mirror, journal.share
    if prepared.request.overwrite or (may_discard and journal.exists() and _is_discarded(journal, prepared)):
        _erase(store)
        if mirror is not None:
            mirror.erase()
    if mirror is not None:
        mirror.pull(store)
    begun = None
    manifest = find_finished(store, prepared)
    if manifest is None and not journal.exists():
        if share.is_whole:
            journal.clear()
        elif journal.names() and not journal.exists():
            raise StoreError(
                f"{store} holds the rest of a store that was being overwritten; remove it (rm -r {store}), then start "
                "all ranks again"
            )
        new = plan_for(prepared.files)
        # The order of tasks does not affect the store, so it is not saved. Another rank may save its plan first.
        whole = msgspec.structs.replace(new, order={})
        saved = SavedPlan(prepared.settings.flags(), whole, prepared.tokenizer.name)
        begun = new if journal.begin(saved) else None
        # Without locks, another rank may have finished the store between the two checks.
        manifest = find_finished(store, prepared)
    if manifest is not None:
        journal.sweep_finished()
        return manifest
    state = RunState(begun, share.of(begun)) if begun is not None else _resume(journal, prepared, plan_for, order or {})
    prepared.tokenizer.save(store / "tokenizer")
    if mirror is not None:
        mirror.push_tokenizer(store)
    return state


def _is_discarded(journal: Journal, prepared: Prepared) -> bool:
    """Whether a different request began here and finished no task, so that its journal can be discarded.

    The earlier attempt may have stopped because of a flag that this request changes.
    """
    if not journal.share.is_whole or journal.names() or (journal.store / MANIFEST).exists():
        return False
    return not is_same(journal.saved_plan(), prepared)


def find_finished(store: Path, prepared: Prepared) -> Manifest | None:
    """Return the manifest if the store is finished; raise if this request would make a different store."""
    if not (store / MANIFEST).exists():
        return None
    manifest = read_manifest(store)
    inputs = [(file.path, file.bytes, file.fingerprint) for file in manifest.inputs]
    before = manifest.settings
    if "damaged" not in manifest.rejects:
        before = _keep_damaged_from_now_on(before, prepared)
    _refuse_differences(store, prepared, before, inputs, manifest.tokenizer.name)
    return manifest


def check_sizes(store: Path, manifest: Manifest) -> None:
    """Raise if a file of a finished store is missing or has another size: such a store is not finished."""
    sizes = file_sizes(shard for split in manifest.splits.values() for shard in split.shards)
    sizes |= {name: file.bytes for name, file in manifest.files.items()}
    sizes |= {f"tokenizer/{name}": file.bytes for name, file in manifest.tokenizer.files.items()}
    for name, size in sizes.items():
        found = "is missing"
        with suppress(FileNotFoundError):
            found = f"has {(store / name).stat().st_size:,} bytes"
        if found != f"has {size:,} bytes":
            raise StoreError(
                f"{store / name} {found}, and the manifest says {size:,}; make the store again with --overwrite"
            )


def is_same(saved: SavedPlan, prepared: Prepared) -> bool:
    """Whether a saved run has the settings and inputs of this request."""
    return saved.settings == prepared.settings.flags() and _identify(saved.plan.inputs) == _identify(prepared.files)


def _identify(files: list[InputFile]) -> list[tuple[str, int, str]]:
    return [(file.name, file.bytes, file.fingerprint) for file in files]


def _resume(
    journal: Journal, prepared: Prepared, plan_for: Callable[[list[InputFile]], Plan], order: dict[str, int]
) -> RunState:
    """Keep the finished tasks, except those of inputs that were modified since and may have other content."""
    saved = journal.saved_plan()
    plan, before = saved.plan, saved.plan.inputs
    settings = _keep_damaged_from_now_on(saved.settings, prepared)
    if settings != saved.settings and any("damaged" in record.rejects for record in journal.records()):
        settings = saved.settings
    _refuse_differences(journal.store, prepared, settings, _identify(before), saved.tokenizer)
    files = [_reconcile(old, new, journal.share) for old, new in zip(before, prepared.files, strict=True)]
    is_modified = any(old.stamp != new.stamp for old, new in zip(before, files, strict=True))
    if is_modified:
        plan = msgspec.structs.replace(plan_for(files), order={})
    if is_modified or settings != saved.settings:
        journal.amend(SavedPlan(prepared.settings.flags(), plan, saved.tokenizer))
    # Keep the saved tasks: another version of tokenmill might cut the inputs in other places.
    plan = msgspec.structs.replace(plan, inputs=files, order=order)
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
        notes.append(f"continuing: {plural(len(done), 'task')} {'is' if len(done) == 1 else 'are'} already done")
    journal.sweep(done.values())
    return RunState(plan, part, done, journal.ended_streams(files), tuple(notes))


def _keep_damaged_from_now_on(before: dict[str, Any], prepared: Prepared) -> dict[str, Any]:
    """The settings of an earlier attempt, with those of this one for damage, where both would keep the same text.

    A run that stopped at damage may be resumed with keep-damaged, as long as nothing was rejected for damage. The
    reverse would leave altered text in the store. Ranks agree on it from the start, because any of them may write the
    manifest.
    """
    if prepared.settings.keeps_damaged and prepared.share.is_whole:
        return {**before, ON_ERROR: KEEP_DAMAGED}
    return before


def _reconcile(old: InputFile, new: InputFile, share: Share) -> InputFile:
    """Give an input with a new modification time its old one if its whole content is known to be the same.

    For a large input, only a sample of the content is compared. A single run repeats the tasks of such an input. Ranks
    raise an error: with copies of different times, each would discard the tasks of the others again and again.
    """
    if old.stamp == new.stamp:
        return new
    if not new.is_sampled:
        return msgspec.structs.replace(new, mtime_ns=old.mtime_ns, origin=old.origin)
    if share.is_whole:
        return new
    if old.origin != new.origin:
        raise StoreError(
            f"{new.name} was fetched from {old.origin or 'a file'} when the run began, and from "
            f"{new.origin or 'a file'} by {share}; name the same revision in the commands of all ranks"
        )
    raise StoreError(
        f"{new.name} has another modification time for {share} than when the run began; copies on several machines "
        "need the same times (rsync -a, cp -p); if the file was changed, remove the store and start all ranks again"
    )


def _refuse_differences(
    store: Path,
    prepared: Prepared,
    before: dict[str, Any],
    inputs: list[tuple[str, int, str]],
    tokenizer: str,
) -> None:
    """Raise if a run with the settings `before`, those `inputs` and that tokenizer differs from this request."""
    now, files = prepared.settings.flags(), prepared.files
    advice = "Use another directory, or --overwrite"
    if not prepared.share.is_whole:
        advice = f"Use another directory, or remove {store} and start all ranks again"
    # The task size follows from the sizes of the inputs, so a difference in the inputs is reported first.
    if before.get(ON_ERROR) != now.get(ON_ERROR):
        made = "with --on-error keep-damaged, and this run is without it"
        if ON_ERROR not in before:
            made = "without --on-error keep-damaged, and left damaged text out"
        raise StoreError(f"{store} was made {made}. {advice}")
    differing = [flag for flag in now if before.get(flag) != now[flag] and flag != "task-bytes"]
    for flag in differing:
        old, value = before.get(flag), now[flag]
        if flag == "tokenizer":
            raise StoreError(
                f"{store} was tokenized with {tokenizer} ({str(old)[:6]}); this run uses {prepared.tokenizer.name} "
                f"({str(value)[:6]}). {advice}"
            )
        raise StoreError(f"{store} was made with --{flag} {_show(old)}; this run has {_show(value)}. {advice}")
    names_before = [name for name, _, _ in inputs]
    names_now = [file.name for file in files]
    if names_before != names_now:
        all_before, all_now = set(names_before), set(names_now)
        gone = [name for name in names_before if name not in all_now]
        added = [name for name in names_now if name not in all_before]
        difference = f"without {gone[0]}" if gone else f"with {added[0]} added" if added else "in another order"
        raise StoreError(
            f"{store} was made from {len(names_before)} inputs; this run has {len(names_now)}, {difference}. {advice}"
        )
    for (name, size, fingerprint), file in zip(inputs, files, strict=True):
        if size != file.bytes:
            raise StoreError(f"{name} had {size} bytes when {store} was begun and has {file.bytes} now. {advice}")
        if fingerprint != file.fingerprint:
            raise StoreError(f"{name} has other content than when {store} was begun, at the same size. {advice}")
    old, value = before.get("task-bytes"), now["task-bytes"]
    if old != value:
        raise StoreError(f"{store} was made with --task-bytes {old}; this run has {value}. {advice}")


def _show(value: Any) -> str:
    return "not set" if value is None else repr(value) if isinstance(value, str) else str(value)


def _erase(store: Path) -> None:
    """Remove a store, the manifest first, so that an interrupted removal leaves nothing that looks finished.

    The folder of the journal stays: a directory without journal or manifest would not count as a token store. Each of
    the two syncs keeps a power failure from undoing what the steps after it rely on.
    """
    journal = store / ".tasks"
    if any((store / name).exists() for name in (MANIFEST, ".tasks")):
        journal.mkdir(exist_ok=True)
        sync_directory(store)
    (journal / "plan.json").unlink(missing_ok=True)
    (store / MANIFEST).unlink(missing_ok=True)
    sync_directory(store)
    for name in ("run.json", "rejects.jsonl"):
        (store / name).unlink(missing_ok=True)
    for split in ("train", "val"):
        for path in (store / split).glob("shard-*"):
            path.unlink()
        with suppress(OSError):
            (store / split).rmdir()
    shutil.rmtree(store / "tokenizer", ignore_errors=True)
    for path in journal.glob("*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
