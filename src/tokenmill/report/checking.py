"""What is known of a store's soundness, and how its run went: from the manifest, file sizes and `run.json`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenmill.errors import StoreError
from tokenmill.pipeline.observer import RunInfo
from tokenmill.report.figures import Checks
from tokenmill.store.manifest import FileInfo, Manifest, decode_sealed
from tokenmill.store.store import TokenStore
from tokenmill.verification import verify as verify_store

__all__ = ["check_store", "read_run"]


def check_store(store: TokenStore, *, verify: bool, advance: Callable[[str, int, int], None]) -> Checks:
    """Compare the sizes of all files with the manifest; with `verify`, read every byte of them instead."""
    manifest = store.manifest
    parity = manifest.engine.parity
    files = _list_files(store.path, manifest)
    problems, verified = _check_sizes(files), None
    if verify:
        result = verify_store(store.path, advance=advance)
        problems, verified = result.problems, result.rows()
    return Checks(
        engine=f"{manifest.engine.name} {manifest.engine.version}",
        reference=parity.reference if parity else None,
        num_compared=parity.num_documents if parity else 0,
        num_compared_bytes=parity.num_bytes if parity else 0,
        num_awkward=parity.num_awkward if parity else 0,
        num_mismatches=parity.num_mismatches if parity else 0,
        num_rerouted=manifest.engine.num_rerouted,
        num_files=len(files),
        num_bytes=sum(info.bytes for info in files.values()),
        problems=[problem.replace(str(store.path), store.path.name) for problem in problems],
        verified=verified,
    )


def _list_files(store: Path, manifest: Manifest) -> dict[Path, FileInfo]:
    files = {store / "tokenizer" / name: info for name, info in manifest.tokenizer.files.items()}
    files |= {store / name: info for name, info in manifest.files.items()}
    for split in manifest.splits.values():
        for shard in split.shards:
            files |= {store / f"{shard.name}{suffix}": info for suffix, info in shard.files.items()}
    return files


def _check_sizes(files: dict[Path, FileInfo]) -> list[str]:
    problems = []
    for path, info in files.items():
        try:
            size = path.stat().st_size
        except OSError:
            problems.append(f"{path} is missing")
            continue
        if size != info.bytes:
            problems.append(f"{path} has {size:,} bytes and the manifest says {info.bytes:,}")
    return problems


def read_run(store: Path) -> RunInfo | None:
    """How the run went; None where that was not kept, or is not readable: no figure depends on it."""
    path = store / "run.json"
    try:
        return decode_sealed(path.read_bytes(), RunInfo, path)
    except (OSError, StoreError):
        return None
