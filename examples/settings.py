"""Settings of a trainer: a YAML file, and changes such as `--set data_config.batch_size=8`, over documented defaults.

`config.yaml` names every setting, explains it and has its default. A key that is not in there is refused, and so is a
value of another type, because a misspelled setting that is ignored costs a whole run.
"""

from __future__ import annotations

import contextlib
import difflib
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import msgspec
import yaml

import tokenmill as tm

CONFIG = Path(__file__).with_name("config.yaml")
DEFAULTS: dict[str, dict[str, Any]] = yaml.safe_load(CONFIG.read_text("utf-8"))
CHOICES = {"loader": ("grain", "tf", "tokenmill"), "compute_dtype": ("auto", "float32", "bfloat16")}
MAY_BE_0 = {"seed", "worker_count", "prefetch_buffer_size", "cache_size", "warmup_steps"}
MAY_BE_0 |= {"validate_every", "checkpoint_every"}


def read_settings(path: Path, changes: list[str]) -> SimpleNamespace:
    """Read a YAML file, and change some of its settings by `section.key=value`."""
    try:
        given = [(str(path), yaml.safe_load(path.read_text("utf-8")) or {})]
        for change in changes:
            name, equals, value = change.partition("=")
            section, _, key = name.partition(".")
            if not key or not equals:
                raise tm.UsageError(f"--set {change} is not of the form section.key=value")
            given.append(("--set", {section: {key: yaml.safe_load(value)}}))
    except (OSError, UnicodeDecodeError) as error:
        raise tm.UsageError(f"{path} cannot be read: {error}; pass --config FILE") from None
    except yaml.YAMLError as error:
        raise tm.UsageError(f"{path} or a value of --set is not YAML: {' '.join(str(error).split())}") from None
    settings = {section: dict(values) for section, values in DEFAULTS.items()}
    for where, tree in given:
        for section, values in check_keys(tree, DEFAULTS, where).items():
            for key, value in check_keys({} if values is None else values, DEFAULTS[section], section).items():
                settings[section][key] = check_value(value, DEFAULTS[section][key], f"{section}.{key}")
    return SimpleNamespace(**{section: SimpleNamespace(**values) for section, values in settings.items()})


def check_keys(values: Any, known: dict[str, Any], where: str) -> dict[str, Any]:
    """Refuse a key that does not exist, and name the one that it resembles most."""
    if not isinstance(values, dict):
        raise tm.UsageError(f"{where} holds {values!r}; expected keys and values, such as {', '.join(known)}")
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0)[0]
            raise tm.UsageError(f"{where} has no {key!r}; did you mean {near}? There are {', '.join(known)}")
    return values


def check_value(value: Any, default: Any, name: str) -> Any:
    """Check that a value has the type of its default."""
    key = name.partition(".")[2]
    if key in CHOICES and value not in CHOICES[key]:
        raise tm.UsageError(f"{name} {value!r} is unknown; expected {', '.join(CHOICES[key])}")
    kind: Any = type(default) if default is not None else int if key == "vocab_size" else str
    bounds: dict[str, Any] = {"min_length": 1} if kind is str else {"ge": int(kind is int and key not in MAY_BE_0)}
    checked = kind if kind is bool else Annotated[kind, msgspec.Meta(**bounds)]
    if key == "dataset_name":
        checked |= Annotated[list[checked], msgspec.Meta(min_length=1)]
    try:
        with contextlib.suppress(TypeError, ValueError):  # YAML reads 1e-3, without a dot, as text.
            value = float(value) if kind is float and isinstance(value, str) else value
        return msgspec.convert(value, checked if default is not None else checked | None)
    except msgspec.ValidationError as error:
        raise tm.UsageError(f"{name} {value!r} cannot be used: {error}") from None
