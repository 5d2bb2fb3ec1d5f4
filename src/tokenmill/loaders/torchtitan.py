"""The loader as a data loader of torchtitan's `Trainer`, which its config names like any other.

torchtitan 0.3 asks for `local_batch_size` rows of `seq_len` tokens. Its main branch asks for `num_tokens_per_batch`
tokens in one dimension, with positions that restart at each document and row. Both save the state of their data loader
with their checkpoints. They refuse to load that of their own on another number of data-parallel ranks; this one fits
any number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenmill.dataset.pack import pack
from tokenmill.dataset.rows import Rows
from tokenmill.dataset.shuffle import shuffle
from tokenmill.errors import MissingDependencyError, UsageError
from tokenmill.formats.open import open_tokens
from tokenmill.loaders.base import make_loader

try:
    try:
        from torchtitan.components.data.loader import BaseDataLoader  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        from torchtitan.components.dataloader import BaseDataLoader  # type: ignore[import-not-found]
except ModuleNotFoundError:
    raise MissingDependencyError("tokenmill.loaders.torchtitan", "torchtitan") from None

__all__ = ["TokenmillDataLoader"]


class TokenmillDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Batches of a store, shuffled; for a mixture, override `make_rows` in a subclass.

    Batches have a document mask: labels do not cross documents, and torchtitan derives its attention masks from the
    positions.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """What the config of a run says about its data; rank, row length and batch size come from the trainer."""

        store: str = ""
        """The path or address of a store, or of tokens in another format."""
        split: str | None = None
        packing: str = "best-fit"
        seed: int = 0
        repeat: bool = True
        """Be endless; the validator of torchtitan's main branch sets it."""
        infinite: bool = True
        """The same; the validator of torchtitan 0.3 sets it."""
        settings: dict[str, Any] = field(default_factory=dict)
        """More settings of the loader, such as `prefetch` and `verify`."""

    def __init__(
        self,
        config: Config,
        *,
        dp_rank: int,
        dp_world_size: int,
        seq_len: int | None = None,
        local_batch_size: int | None = None,
        max_context_length: int | None = None,
        num_tokens_per_batch: int | None = None,
        **_: Any,
    ) -> None:
        self._is_flat = max_context_length is not None
        if max_context_length is not None and num_tokens_per_batch is not None:
            seq_len = max_context_length
            local_batch_size, rest = divmod(num_tokens_per_batch, seq_len)
            if rest or not local_batch_size:
                raise UsageError(
                    f"num_tokens_per_microbatch_per_dp_rank={num_tokens_per_batch} is no multiple of "
                    f"max_context_length={seq_len}; choose one, because a batch is whole rows"
                )
        if seq_len is None:
            raise UsageError("torchtitan passed neither seq_len nor max_context_length to its data loader")
        self.loader = make_loader(
            self.make_rows(config, seq_len),
            batch_size=local_batch_size,
            framework="torch",
            layout="torchtitan",
            document_mask=True,
            epochs=None if config.repeat and config.infinite else 1,
            rank=dp_rank,
            world_size=dp_world_size,
            **config.settings,
        )

    def make_rows(self, config: Config, seq_len: int) -> Rows:
        """Return the rows to train on; override this for a mixture or another order."""
        documents = open_tokens(config.store).split(config.split)
        method: Any = config.packing
        return shuffle(pack(documents, seq_len=seq_len, method=method, seed=config.seed), seed=config.seed)

    def __iter__(self) -> Iterator[Any]:
        if not self._is_flat:
            return iter(self.loader)
        return (
            ({name: part.view(-1) for name, part in inputs.items()}, labels.view(-1)) for inputs, labels in self.loader
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader as one value, because torchtitan's checkpoints flatten dictionaries."""
        return {"tokenmill": json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state of any number of data-parallel ranks; an empty one, as torchtitan passes it, is none."""
        if state_dict:
            self.loader.load_state_dict(json.loads(state_dict["tokenmill"]))
