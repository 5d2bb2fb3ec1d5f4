"""`--config`: a YAML file whose keys are the flags of `tokenize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from tokenmill.cli._flags import count_or_auto, switch
from tokenmill.errors import UsageError

__all__ = ["merge_config"]


def merge_config(config: Path | None, flags: dict[str, Any], context: typer.Context) -> dict[str, Any]:
    """Merge the flags: those of the command line win over those of the file, and these over the defaults."""
    sources = {key: context.get_parameter_source(key) for key in flags}
    merged = {key: flags[key] for key, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    for key, value in (_read_config(config) if config else {}).items():
        name = str(key).replace("-", "_")
        if name in ("no_eos", "no_bos"):
            merged.setdefault(name.removeprefix("no_"), not switch({name: value}, name))
        else:
            merged.setdefault("inputs" if name == "input" else name, value)
    if isinstance(merged.get("keep_keys"), str):
        merged["keep_keys"] = [key.strip() for key in merged["keep_keys"].split(",") if key.strip()]
    if isinstance(merged.get("inputs"), str):
        merged["inputs"] = [merged["inputs"]]
    if isinstance(merged.get("workers"), str):
        merged["workers"] = count_or_auto(merged["workers"], "--workers")
    if isinstance(merged.get("separator"), str):
        merged["separator"] = (
            merged["separator"].replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t").replace("\\0", "\0")
        )
    for key, flag in (("inputs", "INPUT"), ("out", "-o OUT"), ("tokenizer", "--tokenizer SPEC")):
        if not merged.get(key):
            raise UsageError(f"{flag} is missing: tokenmill tokenize INPUT... -o OUT --tokenizer SPEC")
    return merged


def _read_config(path: Path) -> dict[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"--config {path} is not valid YAML{where}: {said}") from None
    if not isinstance(loaded, dict):
        raise UsageError(f"--config {path} must be a mapping of flags to values, such as  tokenizer: gpt2")
    return loaded
