"""What a loader does to batches when it is asked to: further fields, and targets without a loss.

`Batch` has its fields as attributes. A layout is what one trainer takes, so `fields` names what else should be in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

import numpy as np

from tokenmill.arguments import show, whole_number
from tokenmill.errors import UsageError
from tokenmill.filling.batch import NumpyBatch
from tokenmill.filling.fill import IGNORED
from tokenmill.filling.layouts import FLAT, FLAT_LAYOUTS, Layout
from tokenmill.filling.token_masks import Goldfish, RepetitionFilter, check_masks
from tokenmill.loaders._world import World

__all__ = ["Extras", "Others", "read_fields", "take_extras"]

FIELDS = ("loss_mask", "loss_weights", "positions", "segment_ids", "sources", "token_sources")


class ExtraSettings(TypedDict, total=False):
    """The settings of a loader that add something to its batches."""

    fields: Sequence[str] | None
    """Further fields of a batch that layouts should have."""
    token_masks: Sequence[Goldfish | RepetitionFilter] | None
    """Rules that leave targets out of the loss because of what the tokens are."""
    ignore_index: int
    """The target of tokens without a loss, -100 unless given."""


class Others(World, ExtraSettings, total=False):
    """The settings of a loader that modules of their own check."""


class Extras(NamedTuple):
    """What to add to batches, checked."""

    fields: tuple[str, ...] = ()
    masks: Mapping[str, Any] = MappingProxyType({})
    """What chunks are told about targets without a loss."""

    def add_fields(self, layout: Layout, name: str) -> Layout:
        """Return the layout of this name with the fields in its dict; a batch without a layout has them already."""
        if name == "xy":
            return layout

        def arrange(batch: NumpyBatch) -> Any:
            parts, extra = layout(batch), read_fields(batch, self.fields)
            if name == FLAT:
                filled = np.asarray(batch.segment_ids) > 0
                filled[0, 0] |= not filled.any()
                extra = {name: part[filled][None] if part.ndim == 2 else part for name, part in extra.items()}
            elif name in FLAT_LAYOUTS:
                extra = {name: part.reshape(-1) for name, part in extra.items()}
            return ({**parts[0], **extra}, *parts[1:]) if isinstance(parts, tuple) else {**parts, **extra}

        return arrange


def take_extras(loader: str, settings: Mapping[str, Any]) -> tuple[Any, Extras]:
    """Check the settings that say what to add to batches; return the others, which say which rank this is."""
    if unknown := settings.keys() - Others.__annotations__:
        raise TypeError(f"{loader} got an unexpected setting {min(unknown)!r}")
    world = {name: value for name, value in settings.items() if name in World.__annotations__}
    ignored = whole_number(settings.get("ignore_index", IGNORED), "ignore_index")
    if not -(1 << 31) <= ignored < 0:
        raise UsageError(f"ignore_index {ignored} must be below 0 and fit 32 bits: a larger number is a token's id")
    masks = {"token_masks": check_masks(settings.get("token_masks")), "ignored": ignored}
    return world, Extras(_check_fields(settings.get("fields")), masks)


def _check_fields(fields: Any) -> tuple[str, ...]:
    if fields is None:
        return ()
    if isinstance(fields, str) or not isinstance(fields, Sequence):
        raise UsageError(f"fields {show(fields)} is not a list of names, such as ['sources']")
    unknown = next((name for name in fields if name not in FIELDS), None)
    if unknown is not None:
        raise UsageError(f"there is no field {show(unknown)}; there are {', '.join(FIELDS)}")
    return tuple(dict.fromkeys(fields))


def read_fields(batch: NumpyBatch, fields: Sequence[str]) -> dict[str, Any]:
    """Return fields of a batch by name."""
    return {name: np.asarray(getattr(batch, name)) for name in fields}
