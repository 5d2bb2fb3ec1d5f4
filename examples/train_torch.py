"""Train a small GPT with PyTorch on a tokenmill store; read it from top to bottom, then change what you like.

    tokenmill tokenize corpus/*.jsonl -o data/tok --tokenizer tokenizer --val-fraction 0.01
    python examples/train_torch.py --data data/tok --config tiny --steps 200
    torchrun --nproc-per-node 8 examples/train_torch.py --data data/tok --config medium --compile

The same command run again goes on behind the last checkpoint. Three rules keep the device busy: batches come from
memory-mapped tokens, the loss stays on the device for `--log-every` steps, and the step clock tells when
either of these stops being true. docs/train.md explains the flags and the clock's table.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import glob
import hashlib
import itertools
import json
import math
import os
import pickle
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil

import tokenmill as tm
from tokenmill.arguments import positive, whole_number
from tokenmill.clock import StepClock
from tokenmill.engines import load_tokenizer
from tokenmill.files import sync_directory

try:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.nn import functional
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint
except ImportError as missing:
    sys.exit(f"error: {tm.MissingDependencyError(f'train_torch.py ({missing.name})', 'torch')}")

if torch.cuda.is_available():
    # Not compiled, FlexAttention writes down the whole matrix that it exists to avoid.
    flex_attention, create_block_mask = torch.compile(flex_attention), torch.compile(create_block_mask)

NO_LOSS = -100
"""The target of a token that is not trained on: padding, or the last one of a document."""
MOST_GRADIENT = 1.0
"""The norm of gradients is cut to this."""
Mask = Tensor | BlockMask | None
Rotation = tuple[Tensor, Tensor]


# The model: rotary positions, RMSNorm, attention that stays inside documents, SwiGLU


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a model, and the rows and the learning rate that it is meant for."""

    num_layers: int
    num_heads: int
    width: int
    seq_len: int
    batch_size: int
    learning_rate: float
    vocab_size: int = 50_257

    @property
    def hidden_width(self) -> int:
        """Of the three matrices of SwiGLU, which cost as much as the usual two of four times the width."""
        return _round_up(8 * self.width // 3, 128)


CONFIGS = {
    "tiny": Config(4, 4, 256, seq_len=256, batch_size=8, learning_rate=2e-3),
    "small": Config(12, 12, 768, seq_len=1024, batch_size=16, learning_rate=6e-4),
    "medium": Config(24, 12, 1536, seq_len=16_384, batch_size=1, learning_rate=3e-4),
    "large": Config(32, 16, 2048, seq_len=32_768, batch_size=1, learning_rate=2e-4),
}


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


class Attention(nn.Module):
    """Every token looks at the tokens before it, as far as the mask lets it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, mask: Mask) -> Tensor:
        """Mix what tokens know."""
        heads = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (rows, heads, tokens, head width)
        mixed = attend(rotate(query, rotation), rotate(key, rotation), value, mask)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """Attention by what kind of mask there is: none, as a matrix, or as the blocks of FlexAttention."""
    if isinstance(mask, BlockMask):
        # Compiled for CPUs, torch 2.13 reads a value whose strides are not those of the key wrongly.
        return flex_attention(query, key, value.contiguous(), block_mask=mask)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)


def find_rotation(positions: Tensor, head_width: int) -> Rotation:
    """Cosines and sines of (rows, 1, tokens, half a head): by which angle each pair of numbers is turned."""
    pairs = torch.arange(0, head_width, 2, device=positions.device)
    angles = positions[:, None, :, None] * 10_000.0 ** (-pairs / head_width)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn queries and keys, so that their product depends on how far apart they are."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention, then two layers on each token by itself, both added to what was there."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config)
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.gate_up = nn.Linear(config.width, 2 * config.hidden_width, bias=False)
        self.down = nn.Linear(config.hidden_width, config.width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, mask: Mask) -> Tensor:
        """One layer of the model."""
        x = x + self.attention(self.attention_norm(x), rotation, mask)
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Head(nn.Module):
    """From the last layer to the loss; a module of its own, so that it can be compiled as a whole."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.vocabulary = nn.Linear(config.width, _round_up(config.vocab_size, 128), bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses of all tokens that have a target."""
        logits = self.vocabulary(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_LOSS, reduction="sum")


class GPT(nn.Module):
    """Gives the sum of losses of a batch, which the caller divides by how many tokens a whole step trains on."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.recompute = False
        self.embedding = nn.Embedding(_round_up(config.vocab_size, 128), config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config)
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        """Small numbers; smaller ones where every layer adds to the same sum."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):
            for layer in (module.attention.out, module.down):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * self.config.num_layers))

    def forward(self, inputs: Tensor, targets: Tensor, positions: Tensor | None, mask: Mask) -> Tensor:
        """Without positions, tokens are counted through the row."""
        if positions is None:
            positions = torch.arange(inputs.shape[1], device=inputs.device)[None]
        rotation = find_rotation(positions, self.config.width // self.config.num_heads)
        x = self.embedding(inputs)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, rotation, mask, use_reentrant=False)
            else:
                x = block(x, rotation, mask)
        return self.head(x, targets)

    def compile_parts(self) -> None:
        """Compile a block and the head; the code of one block serves all of them, so this does not grow with layers."""
        for part in (*self.blocks, self.head):
            part.compile()

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward by the usual count: 6 for each number of a matrix, and attention as if unmasked."""
        num_in_matrices = count_parameters(self) - self.embedding.weight.numel()
        return 6 * num_in_matrices + 12 * self.config.num_layers * self.config.width * seq_len


def count_parameters(model: nn.Module) -> int:
    """How many numbers a model learns."""
    return sum(parameter.numel() for parameter in model.parameters())


# Masks: rows hold several documents, and a token must see only its own


def may_see(segment_ids: Tensor) -> Callable[..., Tensor]:
    """Whether query q of row b may look at key k: the rule of both kinds of masks."""

    def rule(b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return (q >= k) & (segment_ids[b, q] == segment_ids[b, k])

    return rule


def make_mask(segment_ids: Tensor | None, attention: str) -> Mask:
    """The mask of a batch, made once for all layers; none at all is plain causal attention."""
    if segment_ids is None:
        return None
    num_rows, seq_len = segment_ids.shape
    device, rule = segment_ids.device, may_see(segment_ids)
    if attention == "flex":
        return create_block_mask(rule, num_rows, None, seq_len, seq_len, device=device)
    rows, places = torch.arange(num_rows, device=device), torch.arange(seq_len, device=device)
    return rule(rows[:, None, None], None, places[:, None], places)[:, None]


# The machine: device, ranks, precision


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where this process computes, and how."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    attention: str = "sdpa"
    is_mixed: bool = False

    def autocast(self) -> torch.autocast:
        """Matrices in bfloat16 where precision is mixed; parameters and sums stay float32."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.is_mixed)

    def say(self, text: str) -> None:
        """Print a line, once for all ranks."""
        if self.rank == 0:
            print(text, flush=True)

    def add_up(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over all ranks."""
        for tensor in tensors if self.world_size > 1 else ():
            dist.all_reduce(tensor)


def find_machine(flags: argparse.Namespace) -> Machine:
    """The device that was asked for or is there; torchrun tells ranks through the environment."""
    rank, world_size, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = find_device(flags.device or ("cuda" if torch.cuda.is_available() else "cpu"), local_rank)
    is_cuda = device.type == "cuda"
    attention = flags.attention if flags.attention != "auto" else "flex" if is_cuda else "sdpa"
    if attention == "flex" and not is_cuda:
        raise tm.UsageError(f"--attention flex cannot train on {device.type}: it has no backward pass there; use sdpa")
    is_mixed = flags.mixed_precision == "bf16"
    if is_cuda:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32
        torch.backends.cudnn.benchmark = True  # There is no convolution here; there may be one in your model.
        is_mixed = is_mixed or (flags.mixed_precision == "auto" and torch.cuda.is_bf16_supported())
    if world_size > 1:
        dist.init_process_group("nccl" if is_cuda else "gloo")
    return Machine(device, rank, max(1, world_size), attention, is_mixed)


def find_device(name: str, local_rank: int) -> torch.device:
    """The device of this name; of several of a kind, each rank of a machine has its own."""
    try:
        device = torch.device(name, local_rank) if name == "cuda" else torch.device(name)
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise tm.UsageError(f"--device {name} cannot be used: {reason}; leave it out, or pass --device cpu") from None
    return device


PEAK_TERAFLOPS = {
    "GB200": 2500,
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H100": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "MI300X": 1307,
    "A100": 312,
    "L40S": 362,
    "A40": 150,
    "A10": 125,
    "L4": 121,
    "RTX 4090": 165,
    "RTX 3090": 71,
}
"""What makers say of bfloat16 matrices without sparsity; of names that fit, the longest counts."""


def find_peak_flops(device: torch.device) -> float | None:
    """What the device could compute in a second, where that is known."""
    name = name_device(device)
    fitting = [known for known in PEAK_TERAFLOPS if re.search(rf"\b{known}\b", name) and "Laptop" not in name]
    return PEAK_TERAFLOPS[max(fitting, key=len)] * 1e12 if fitting else None


def name_device(device: torch.device) -> str:
    """What the maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def find_utilization(device: torch.device) -> list[str]:
    """How busy the driver says the device is; that needs a package which may be missing."""
    try:
        return [f"device {torch.cuda.utilization(device)}%"] if device.type == "cuda" else []
    except (ImportError, RuntimeError):
        return []


# Data


def make_loader(flags: argparse.Namespace, machine: Machine, *, split: str = "train") -> tm.Loader:
    """Batches of a store, or of raw text that is tokenized as it is read.

    A global batch is `--batch-size` rows for each rank and each accumulation, in the order of the rows. So
    1 rank with 2 accumulations and 2 ranks with 1 see the same rows in the same step.
    """
    settings: dict[str, Any] = {
        "seq_len": flags.seq_len,
        "batch_size": flags.batch_size,
        "framework": "torch",
        "packing": flags.packing,
        "seed": flags.seed,
        "document_mask": flags.document_mask,
        "epochs": flags.epochs,
        "vocab_size": flags.vocab_size,
        "rank": machine.rank,
        "world_size": machine.world_size,
        "device": machine.device,
        "num_workers": flags.num_workers,
        "prefetch": flags.prefetch,
    }
    if split != "train":
        settings |= {"epochs": 1, "shuffle": False}
    if flags.tokenizer is None:
        return tm.load(open_store(flags.data), split=split, **settings)
    settings |= {"tokenizer": flags.tokenizer, "cache": flags.cache or flags.checkpoint_path / "cache"}
    return tm.load(flags.data, split=split, val_fraction=flags.val_fraction or 0.0, verbose=flags.verbose, **settings)


def open_store(paths: list[str]) -> Any:
    """The store, or several as one; what is not there yet has to be made first."""
    for path in map(Path, paths):
        if not path.exists() and not glob.has_magic(str(path)):
            make = f"`tokenmill tokenize TEXT -o {path} --tokenizer T`"
            raise tm.UsageError(f"no store found at {path}; run {make} first, or pass text with --tokenizer T")
        if path.is_file() and TEXT_SUFFIXES.intersection(path.suffixes):
            make = f"`tokenmill tokenize {path} -o data/tok --tokenizer T`"
            raise tm.UsageError(f"{path} is text and no store; run {make} first, or pass --tokenizer T here")
    return tm.open(paths[0] if len(paths) == 1 else paths)


TEXT_SUFFIXES = {".jsonl", ".json", ".txt", ".md", ".ndjson"}


def find_vocab_size(flags: argparse.Namespace, loader: tm.Loader) -> int:
    """How many ids the embedding needs: one more than the largest that the data may have."""
    if flags.vocab_size is not None:
        return flags.vocab_size
    if flags.tokenizer is not None:
        return load_tokenizer(flags.tokenizer).vocab_size
    sizes = [leaf.documents.vocab_size for leaf in loader.rows.leaves()]
    if None in sizes:
        raise tm.UsageError(f"{' '.join(flags.data)} does not say how many ids there are; pass --vocab-size")
    return max(sizes)


def hash_batches(batches: Sequence[tm.Batch], machine: Machine) -> str:
    """A hash of the inputs of a global batch as int32, row after row: equal wherever the rows are."""
    digest = hashlib.sha256()
    for batch in batches:
        tokens = batch.inputs.int()
        parts = [tokens]
        if machine.world_size > 1:
            parts = [torch.empty_like(tokens) for _ in range(machine.world_size)]
            dist.all_gather(parts, tokens)
        digest.update(torch.cat(parts).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


# One step


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[tm.Batch], machine: Machine, clock: StepClock
) -> Tensor:
    """Learn from one global batch; gives this rank's share of its mean loss, which stays on the device.

    The mean is over all tokens that are trained on in the whole step: a batch with little in it counts for little.
    """
    with clock.part("compute"):
        num_trained = count_trained(batches, machine)
        total = torch.zeros((), device=machine.device)
    for batch in batches:
        with clock.part("copy"):
            positions, segment_ids = find_documents(batch)
        with clock.part("compute"), wait_for_last(model, batch is batches[-1]):
            with machine.autocast():
                mask = make_mask(segment_ids, machine.attention)
                loss = model(batch.inputs, batch.targets, positions, mask) / num_trained
            # Ranks average their gradients, and what is wanted is the sum.
            (loss * machine.world_size).backward()
            total += loss.detach()
    with clock.part("compute"):
        nn.utils.clip_grad_norm_(model.parameters(), MOST_GRADIENT)
        optimizer.step()
        optimizer.zero_grad()
    return total


def count_trained(batches: Iterable[tm.Batch], machine: Machine) -> Tensor:
    """How many tokens have a target, in the batches of all ranks."""
    count = torch.stack([(batch.targets != NO_LOSS).sum() for batch in batches]).sum()
    machine.add_up(count)
    return count.clamp(min=1)


def find_documents(batch: tm.Batch) -> tuple[Tensor | None, Tensor | None]:
    """Positions and documents of tokens, where documents are kept apart."""
    return (batch.positions, batch.segment_ids) if batch.is_masked else (None, None)


def wait_for_last(model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Ranks exchange gradients once in a step, with its last batch."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not is_last else contextlib.nullcontext()


@torch.no_grad()
def validate(model: nn.Module, loader: tm.Loader, machine: Machine, num_batches: int) -> float:
    """The mean loss of the first batches of the validation split, which are the same every time."""
    loader.seek(0)
    total = torch.zeros((), device=machine.device, dtype=torch.float64)
    count = torch.zeros((), device=machine.device)
    for batch in itertools.islice(loader, num_batches):
        positions, segment_ids = find_documents(batch)
        with machine.autocast():
            total += model(batch.inputs, batch.targets, positions, make_mask(segment_ids, machine.attention))
        count += (batch.targets != NO_LOSS).sum()
    machine.add_up(total, count)
    return (total / count.clamp(min=1)).item()


def make_optimizer(model: nn.Module, flags: argparse.Namespace, machine: Machine) -> torch.optim.Optimizer:
    """AdamW, with decay for matrices only; in 8 bits where that was asked for and can be had."""
    parameters = list(model.parameters())
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": flags.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    settings: dict[str, Any] = {"lr": flags.learning_rate, "betas": (0.9, 0.95)}
    if not flags.use_8bit_optim or machine.device.type != "cuda":
        return torch.optim.AdamW(groups, fused=machine.device.type == "cuda", **settings)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise tm.UsageError("--use-8bit-optim needs a package: pip install bitsandbytes, or leave it out") from None
    return AdamW8bit(groups, **settings)


def find_learning_rate(step: int, num_steps: int, flags: argparse.Namespace) -> float:
    """Up in a straight line, then down to a tenth along a cosine."""
    num_warmup = min(flags.warmup_steps, num_steps // 10)
    if step <= num_warmup:
        return flags.learning_rate * step / num_warmup
    done = (step - num_warmup) / max(1, num_steps - num_warmup)
    return flags.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


# Checkpoints: model, optimizer, place in the data and random state, all of one step


def save_checkpoint(folder: Path, step: int, content: dict[str, Any]) -> Path:
    """Write a checkpoint that is there as a whole or not at all, and keep the one before it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    temporary = folder / f"{path.name}.tmp"
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        temporary.unlink()
        # torch hides what the disk says behind an error of its own.
        cause = error if isinstance(error, OSError) else error.__context__
        raise OSError(cause.errno, cause.strerror, str(path)) if isinstance(cause, OSError) else error from None
    temporary.replace(path)
    sync_directory(folder)
    for old in [*list_checkpoints(folder)[:-2], *folder.glob("step-*.pt.tmp")]:
        old.unlink()
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted(folder.glob("step-*.pt"))


def load_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint, or the one before if that is damaged; nothing in it is executed."""
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            if isinstance(content, dict) and isinstance(content.get("identity"), dict):
                return path, content
            reason = "it is no checkpoint of this trainer"
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).partition("\n")[0]
        print(f"{path} cannot be read: {reason}", file=sys.stderr)
    if paths:
        raise tm.UsageError(f"no checkpoint in {folder} can be read; pass another --checkpoint-path, or delete them")
    return None


# The run


class Trainer:
    """One run, from flags to the last checkpoint."""

    def __init__(self, flags: argparse.Namespace, machine: Machine) -> None:
        self.flags, self.machine = flags, machine
        self.loader = make_loader(flags, machine)
        self.validation_loader = self._find_validation()
        self.config = dataclasses.replace(CONFIGS[flags.config], vocab_size=find_vocab_size(flags, self.loader))
        torch.manual_seed(flags.seed)
        self.core = GPT(self.config).to(machine.device)
        self.core.recompute = flags.recompute
        self.optimizer = make_optimizer(self.core, flags, machine)
        self.step = self.resume()
        self.num_steps = self._count_steps()
        if flags.compile:
            self.core.compile_parts()
        self.model: nn.Module = self.core
        if machine.world_size > 1:
            self.model = DistributedDataParallel(self.core, gradient_as_bucket_view=True)
        tokens = self.loader.global_batch_size * flags.gradient_accumulation * flags.seq_len
        self.clock = StepClock(every=flags.table_every, tokens_per_step=tokens, device=machine.device)
        self.losses: dict[int, float] = {}

    def _find_validation(self) -> tm.Loader | None:
        flags = self.flags
        if not flags.validate_every:
            return None
        if flags.tokenizer is not None and not flags.val_fraction:
            self.machine.say("no validation: --val-fraction 0.01 would keep some of the text for it")
            return None
        if flags.tokenizer is None and "val" not in open_store(flags.data).splits:
            self.machine.say("no validation: the store has no split 'val', which tokenize --val-fraction 0.01 makes")
            return None
        return make_loader(flags, self.machine, split="val")

    def _count_steps(self) -> int:
        """Steps of the whole run; the epochs may end in the middle of the last one."""
        flags = self.flags
        if flags.epochs is None:
            return flags.steps
        num_left = -(-(len(self.loader) - self.loader.step) // flags.gradient_accumulation)
        return min(self.step + num_left, flags.steps or sys.maxsize)

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with; whether the data is the same, its loader knows."""
        shape = {name: getattr(self.config, name) for name in ("num_layers", "num_heads", "width", "vocab_size")}
        return {**shape, "optimizer": type(self.optimizer).__name__, "document_mask": self.flags.document_mask}

    def save(self) -> None:
        """Write a checkpoint; all ranks have the same to say, so the first one says it."""
        if self.machine.rank > 0:
            return
        content = {
            "identity": self.identity(),
            "step": self.step,
            "model": self.core.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "data": json.dumps(self.loader.state_dict()),
            "random": torch.get_rng_state(),
            "random_of_device": torch.cuda.get_rng_state() if self.machine.device.type == "cuda" else None,
        }
        self.machine.say(f"checkpoint {save_checkpoint(self.flags.checkpoint_path, self.step, content)}")

    def resume(self) -> int:
        """Go on from the last checkpoint, if there is one; gives the number of steps that are done."""
        found = load_checkpoint(self.flags.checkpoint_path)
        if found is None:
            return 0
        path, content = found
        todo = "pass the flags that it was made with, or another --checkpoint-path"
        for name, ours in self.identity().items():
            theirs = content["identity"].get(name)
            if theirs != ours:
                raise tm.UsageError(f"{path} is of another run: {name} is {theirs} there and {ours} here; {todo}")
        try:
            self.loader.load_state_dict(json.loads(content["data"]))
        except tm.UsageError as error:
            raise tm.UsageError(f"{path} is of other data: {str(error).partition(';')[0]}; {todo}") from None
        self.core.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        torch.set_rng_state(content["random"])
        if content["random_of_device"] is not None and self.machine.device.type == "cuda":
            torch.cuda.set_rng_state(content["random_of_device"])
        self.machine.say(f"resumed from {path}, after step {content['step']:,}")
        return content["step"]

    def run(self) -> None:
        """All steps that are left, then validation and the clock's table."""
        if self.step >= self.num_steps:
            self.machine.say(f"nothing to do: all {self.num_steps:,} steps are done; pass more --steps or --epochs")
            return
        batches = self.clock.data(self.loader)
        psutil.cpu_percent()  # The next call tells the use of the CPU since this one.
        while self.step < self.num_steps:
            some = list(itertools.islice(batches, self.flags.gradient_accumulation))
            self.step += 1
            for group in self.optimizer.param_groups:
                group["lr"] = find_learning_rate(self.step, self.num_steps, self.flags)
            loss = train_step(self.model, self.optimizer, some, self.machine, self.clock)
            self._end_step(some, loss)
        self.machine.say(self.clock.table())

    def _end_step(self, batches: Sequence[tm.Batch], loss: Tensor) -> None:
        """What comes after some of the steps; only here does the host wait for the device."""
        flags, clock, is_last = self.flags, self.clock, self.step == self.num_steps
        if flags.batch_log is not None:
            self._append(flags.batch_log, hash_batches(batches, self.machine))
        if is_last or self.step % flags.log_every == 0:
            with clock.part("sync"):
                self.machine.add_up(loss)
                self.losses[self.step] = loss.item()
            self._append(flags.loss_log, repr(self.losses[self.step]))
            self.machine.say(self._describe_step())
        if clock.end_step() and not is_last:
            self.machine.say(clock.table(recent=True))
        with clock.outside():
            if self.validation_loader is not None and (is_last or self.step % flags.validate_every == 0):
                num_batches = flags.validation_batches * flags.gradient_accumulation
                found = validate(self.core, self.validation_loader, self.machine, num_batches)
                self.machine.say(f"step {self.step:,}: validation loss {found:.4f}")
            if is_last or self.step % flags.checkpoint_every == 0:
                self.save()

    def _append(self, path: Path | None, text: str) -> None:
        if path is not None and self.machine.rank == 0:
            with path.open("a") as file:
                file.write(f"{self.step} {text}\n")

    def _describe_step(self) -> str:
        """Loss, speed, and how busy device and host are."""
        device, speed = self.machine.device, self.clock.tokens_per_second(recent=True)
        parts = [f"step {self.step:,}/{self.num_steps:,}", f"loss {self.losses[self.step]:.4f}"]
        parts += [f"rate {self.optimizer.param_groups[0]['lr']:.2e}"]
        parts += [f"{speed:,.0f} tokens/s"] if speed else []
        peak = find_peak_flops(device)
        if peak is not None and speed:
            flops = speed * self.core.flops_per_token(self.flags.seq_len)
            parts.append(f"MFU {flops / peak / self.machine.world_size:.1%}")
        parts += [*find_utilization(device), f"cpu {psutil.cpu_percent():.0f}%"]
        if self.flags.verbose and device.type == "cuda":
            parts.append(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
        return "  ".join(parts)

    def describe(self) -> None:
        """Say what will run, and which paths are off because this machine cannot have them."""
        flags, machine, say = self.flags, self.machine, self.machine.say
        num_besides = count_parameters(self.core) - 2 * self.core.embedding.weight.numel()
        num_rows = self.loader.global_batch_size * flags.gradient_accumulation
        say(f"{flags.config}: {count_parameters(self.core):,} parameters, {num_besides:,} besides embeddings")
        ranks = "1 rank" if machine.world_size == 1 else f"{machine.world_size} ranks"
        say(f"{self.num_steps:,} steps of {num_rows} rows of {flags.seq_len} tokens, on {ranks}")
        precision = "bfloat16 where it is safe" if machine.is_mixed else "float32"
        say(f"{name_device(machine.device)}, {precision}, attention by {machine.attention}")
        if machine.device.type != "cuda":
            say("pinned memory is off: it needs a CUDA device")
            if flags.use_8bit_optim:
                say("the 8-bit optimizer is off: it needs a CUDA device; this is AdamW with 32 bits")
        if find_peak_flops(machine.device) is None:
            say(f"MFU unknown for {name_device(machine.device)}")
        if any(leaf.documents.weight is not None for leaf in self.loader.rows.leaves()):
            say("the weights of tokens in this store are not used here: every trained token counts the same")
        if flags.verbose:
            say(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n{self.loader!r}")


def train(flags: argparse.Namespace) -> Trainer:
    """Run as the flags say."""
    trainer = Trainer(flags, find_machine(flags))
    trainer.describe()
    trainer.run()
    if dist.is_initialized():
        dist.destroy_process_group()
    return trainer


# A check of everything above, on text that every machine has


def check_everything(device: str | None) -> bool:
    """Train the tiny model, resume it from the middle, and say of each property whether it holds."""
    if device == "cpu" or not torch.cuda.is_available():
        torch.set_num_threads(1)  # Threads that wait for each other are many times slower on a busy machine.
    with tempfile.TemporaryDirectory(prefix="train-torch-") as folder:
        home = Path(folder)
        given = ["--data", str(make_test_store(home)), "--checkpoint-path", str(home / "run"), "--steps", "30"]
        given += ["--seq-len", "128", "--checkpoint-every", "20", "--log-every", "1", "--validate-every", "0"]
        given += ["--device", device] if device else []
        whole = train(parse_flags(given))
        list_checkpoints(home / "run")[-1].unlink()
        again = train(parse_flags(given))
    apart = max(abs(loss - whole.losses[step]) for step, loss in again.losses.items())
    waiting = whole.clock.shares()["data"]
    checks = {
        f"the loss falls from {whole.losses[1]:.2f} to {whole.losses[30]:.2f}": whole.losses[30] < whole.losses[1] - 1,
        f"a resumed run's losses differ by {apart}": apart == 0 if whole.machine.device.type == "cpu" else apart < 0.01,
        f"steps wait for data {waiting:.1%} of the time": waiting < 0.05,
    }
    for name, expected in {"medium": 850e6, "large": 1.8e9}.items():
        with torch.device("meta"):
            count = count_parameters(GPT(CONFIGS[name]))
        checks[f"{name} has {count:,} parameters"] = abs(count / expected - 1) < 0.03
    for text, holds in checks.items():
        print(f"{'ok  ' if holds else 'FAIL'}  {text}")
    return all(checks.values())


def make_test_store(home: Path) -> Path:
    """Tokenize some modules of Python's standard library with a tokenizer that is trained on them."""
    from tokenmill.training import train_tokenizer

    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
    lines = [json.dumps({"text": module.read_text("utf-8", errors="replace")}) + "\n" for module in modules]
    (home / "text.jsonl").write_text("".join(lines))
    train_tokenizer([str(home / "text.jsonl")], home / "tokenizer", vocab_size=2048)
    tm.tokenize(home / "text.jsonl", home / "store", tokenizer=str(home / "tokenizer"))
    return home / "store"


# Flags


class Parser(argparse.ArgumentParser):
    """Says what is wrong in a sentence, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        """End the program."""
        self.exit(2, f"error: {message}; --help lists the flags\n")


def make_parser() -> Parser:
    """All flags; those without a default take it from the config or the device."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--data", nargs="+", metavar="PATH", help="a store, several as one, or text with --tokenizer")
    add("--tokenizer", metavar="T", help="read --data as text, tokenized while training")
    add("--cache", type=Path, metavar="DIR", help="where tokens of text are kept; else below --checkpoint-path")
    add("--val-fraction", type=float, metavar="F", help="of text: the share that is for validation")
    add("--packing", choices=["concat", "best-fit", "pad"], default="concat", help="how documents become rows")
    add("--document-mask", action=argparse.BooleanOptionalAction, default=True, help="keep documents of a row apart")
    add("--num-workers", type=int, default=0, metavar="N", help="processes that fill batches; 0 is best for a store")
    add("--prefetch", type=int, metavar="N", help="fill ahead in a thread; 2 on CUDA, else 0")
    add("--config", choices=CONFIGS, default="tiny", help="size of the model")
    add("--vocab-size", type=int, metavar="N", help="ids of the model, where the data does not tell")
    add("--seq-len", type=int, metavar="N", help="tokens in a row; else the config's")
    add("--batch-size", type=int, metavar="N", help="rows of one rank at a time; else the config's")
    add("--gradient-accumulation", type=int, default=1, metavar="N", help="batches of a rank in one step")
    add("--steps", type=int, metavar="N", help="how many steps to train for")
    add("--epochs", type=float, metavar="X", help="how often to go through the data; once, if --steps is not given")
    add("--learning-rate", type=float, metavar="X", help="the highest; else the config's")
    add("--warmup-steps", type=int, default=100, metavar="N", help="until it is reached; at most a tenth of the run")
    add("--weight-decay", type=float, default=0.1, metavar="X", help="of matrices")
    add("--seed", type=int, default=0, metavar="N", help="of the model and of the order of rows")
    add("--device", metavar="NAME", help="cuda where there is one, else cpu")
    add("--attention", choices=["auto", "sdpa", "flex"], default="auto", help="flex on CUDA, else sdpa")
    add("--mixed-precision", choices=["auto", "bf16", "off"], default="auto", help="bf16 on CUDA, else off")
    add("--compile", action="store_true", help="compile the model, which takes a minute")
    add("--recompute", action="store_true", help="save memory: compute layers again in the backward pass")
    add("--use-8bit-optim", action="store_true", help="save memory: AdamW of bitsandbytes, on CUDA")
    add("--checkpoint-path", type=Path, default=Path("checkpoints"), metavar="DIR", help="resumed from, if it has some")
    add("--checkpoint-every", type=int, default=500, metavar="N", help="steps")
    add("--validate-every", type=int, default=500, metavar="N", help="steps; 0 for never")
    add("--validation-batches", type=int, default=20, metavar="N", help="global batches")
    add("--log-every", type=int, default=10, metavar="N", help="steps between readings of the loss")
    add("--table-every", type=int, default=100, metavar="N", help="steps between tables of the step clock")
    add("--loss-log", type=Path, metavar="FILE", help="append steps and losses with all digits")
    add("--batch-log", type=Path, metavar="FILE", help="append steps and hashes of their tokens")
    add("--verbose", action="store_true", help="say more of machine, data and memory")
    add("--test", action="store_true", help="check everything on this machine, in two minutes")
    return parser


LEAST = {"warmup_steps": 0, "seed": 0, "num_workers": 0, "prefetch": 0, "validate_every": 0}
"""Of whole numbers; that of all others is 1."""


def parse_flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, checked, with what they leave open filled in."""
    flags = make_parser().parse_args(arguments)
    for name, value in vars(flags).items():
        what = f"--{name.replace('_', '-')}"
        if isinstance(value, int) and not isinstance(value, bool):
            whole_number(value, what, LEAST.get(name, 1))
        elif isinstance(value, float) and name != "weight_decay":
            positive(value, what)
    if flags.data is None and not flags.test:
        raise tm.UsageError("--data is missing; pass a store, or text with --tokenizer")
    if flags.tokenizer is not None and (flags.steps is None or flags.epochs is not None):
        raise tm.UsageError(
            "--tokenizer needs --steps and not --epochs: how many rows text has is known when it is tokenized"
        )
    if flags.tokenizer is None and flags.val_fraction:
        raise tm.UsageError("--val-fraction is for text with --tokenizer; the split of a store is made by tokenize")
    if flags.compile and not (shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")):
        raise tm.UsageError("--compile needs a C++ compiler, and there is none; install g++, or leave it out")
    if flags.steps is None and flags.epochs is None:
        flags.epochs = 1.0
    is_cuda = torch.cuda.is_available() and str(flags.device or "cuda").startswith("cuda")
    flags.prefetch = (2 if is_cuda else 0) if flags.prefetch is None else flags.prefetch
    for name in ("seq_len", "batch_size", "learning_rate"):
        if getattr(flags, name) is None:
            setattr(flags, name, getattr(CONFIGS[flags.config], name))
    return flags


LOST_MEMORY = re.compile("out of memory|can't allocate memory")
"""What torch says on devices that have no error of their own for this."""


def explain_memory(error: BaseException) -> str:
    """What to change when memory has run out; errors of another kind go on."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and not LOST_MEMORY.search(reason):
        raise error
    return (
        f"out of memory ({reason[:160]}); lower --batch-size and raise --gradient-accumulation as much, lower "
        "--seq-len, or use --recompute, --mixed-precision bf16, --use-8bit-optim or a smaller --config"
    )


def main() -> int:
    """Train, and say what went wrong in a sentence."""
    try:
        flags = parse_flags()
        if flags.test:
            return 0 if check_everything(flags.device) else 1
        train(flags)
        return 0
    except tm.TokenmillError as error:
        reason, code = str(error), 2 if isinstance(error, tm.UsageError) else 1
    except OSError as error:
        reason, code = f"{error.filename or 'a file'}: {error.strerror or error}", 1
    except (RuntimeError, MemoryError) as error:
        reason, code = explain_memory(error), 1
    except KeyboardInterrupt:
        reason, code = "stopped; the same command goes on behind the last checkpoint", 130
    rank = os.environ.get("RANK", "0")
    print(f"error: {reason}" if rank == "0" else f"error on rank {rank}: {reason}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
