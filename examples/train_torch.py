"""Train a small GPT with PyTorch on a tokenmill store. Copy this file and change what you like.

    tokenmill tokenize corpus/*.jsonl -o data/tok --tokenizer tokenizer --val-fraction 0.01
    python examples/train_torch.py --data data/tok --config tiny --steps 200
    torchrun --nproc-per-node 8 examples/train_torch.py --data data/tok --config medium --compile

The same command resumes after the last checkpoint. docs/train.md explains the flags and the table of the step clock.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import tokenmill as tm

with tm.exit_on_error(extra="torch"):
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
    from torch.utils.checkpoint import checkpoint

# Settings

SHAPE = ("num_layers", "num_heads", "width", "seq_len", "batch_size", "learning_rate")
CONFIGS = {
    "tiny": (4, 4, 256, 256, 8, 2e-3),
    "small": (12, 12, 768, 1024, 16, 6e-4),
    "medium": (24, 12, 1536, 16_384, 1, 3e-4),
    "large": (32, 16, 2048, 32_768, 1, 2e-4),
}
IGNORED = -100  # The target of a token without a loss: padding, or the last token of a document.
RANK, LOCAL_RANK = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))  # As torchrun sets them.
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
print0 = functools.partial(print, flush=True) if RANK == 0 else lambda *words, file=None: None
all_reduce = dist.all_reduce if WORLD_SIZE > 1 else lambda tensor: None

parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
parser.error = lambda message: parser.exit(2, f"error: {message}; --help lists the flags\n")  # type: ignore
add = parser.add_argument
add("--data", nargs="+", metavar="PATH", help="a store, several as one, or text with --tokenizer")
add("--tokenizer", metavar="T", help="read --data as text and tokenize it while training")
add("--cache", type=Path, metavar="DIR", help="where tokens of text are kept; default: below --checkpoint-path")
add("--val-fraction", type=float, metavar="F", help="share of the text that is kept for validation")
add("--packing", choices=["concat", "best-fit", "pad"], default="concat", help="how documents become rows")
add("--document-mask", action=argparse.BooleanOptionalAction, default=True, help="mask documents from each other")
add("--num-workers", type=int, default=0, metavar="N", help="processes that fill batches; a store needs none")
add("--prefetch", type=int, metavar="N", help="chunks filled ahead in a thread; default: 2 on CUDA, else 0")
add("--config", choices=CONFIGS, default="tiny", help="size of the model")
add("--vocab-size", type=int, metavar="N", help="ids of the model, if the data does not record them")
add("--seq-len", type=int, metavar="N", help="tokens in a row; default: the config's")
add("--batch-size", type=int, metavar="N", help="rows of one rank at a time; default: the config's")
add("--gradient-accumulation", type=int, default=1, metavar="N", help="batches of a rank in one step")
add("--steps", type=int, metavar="N", help="steps to train for")
add("--epochs", type=float, metavar="X", help="passes over the data; one, if --steps is not given")
add("--learning-rate", type=float, metavar="X", help="the highest; default: the config's")
add("--warmup-steps", type=int, default=100, metavar="N", help="linear warm-up, at most a tenth of the run")
add("--weight-decay", type=float, default=0.1, metavar="X", help="of matrices")
add("--seed", type=int, default=0, metavar="N", help="of the model and of the order of rows")
add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: cuda if there is one, else cpu")
add("--attention", choices=["auto", "sdpa", "flex"], default="auto", help="flex on CUDA, else sdpa")
add("--mixed-precision", choices=["auto", "bf16", "off"], default="auto", help="bf16 on CUDA, else off")
add("--compile", action="store_true", help="compile the model, which takes a minute")
add("--recompute", action="store_true", help="activation checkpointing: less memory, more compute")
add("--use-8bit-optim", action="store_true", help="AdamW of bitsandbytes, on CUDA")
add("--checkpoint-path", type=Path, default=Path("checkpoints"), metavar="DIR", help="resumed from if not empty")
add("--checkpoint-every", type=int, default=500, metavar="N", help="steps")
add("--validate-every", type=int, default=500, metavar="N", help="steps; 0: never")
add("--validation-batches", type=int, default=20, metavar="N", help="global batches")
add("--log-every", type=int, default=10, metavar="N", help="steps between reads of the loss")
add("--table-every", type=int, default=100, metavar="N", help="steps between tables of the step clock")
add("--loss-log", type=Path, metavar="FILE", help="append steps and losses with all digits")
add("--batch-log", type=Path, metavar="FILE", help="append steps and hashes of their tokens")
add("--verbose", action="store_true", help="print more about machine, data and memory")
add("--test", action="store_true", help="train, resume and check on this machine, in two minutes")


def parse_flags(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the flags; the config gives the defaults of some."""
    flags = parser.parse_args(arguments)
    for name, value in vars(flags).items():
        least = 0 if name in ("warmup_steps", "seed", "num_workers", "prefetch", "validate_every") else 1
        if type(value) is int and value < least:
            raise tm.UsageError(f"--{name.replace('_', '-')} {value} must be a whole number, at least {least}")
        if type(value) is float and name != "weight_decay" and not 0 < value < math.inf:
            raise tm.UsageError(f"--{name.replace('_', '-')} {value} must be a number above 0")
    for name, value in zip(SHAPE, CONFIGS[flags.config], strict=True):
        setattr(flags, name, getattr(flags, name, None) or value)
    if flags.data is None and not flags.test:
        raise tm.UsageError("--data is missing; pass a store, or text with --tokenizer")
    if flags.tokenizer is not None and (flags.steps is None or flags.epochs is not None):
        raise tm.UsageError("--tokenizer needs --steps and not --epochs: the number of rows is known when text ends")
    if flags.tokenizer is None and flags.val_fraction:
        raise tm.UsageError("--val-fraction is for text with --tokenizer; `tokenmill tokenize` splits a store")
    if flags.compile and not (shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")):
        raise tm.UsageError("--compile needs a C++ compiler, and there is none; install g++, or leave it out")
    flags.device += f":{LOCAL_RANK}" if flags.device == "cuda" else ""
    if flags.attention == "flex" and not flags.device.startswith("cuda"):
        raise tm.UsageError(f"--attention flex cannot train on {flags.device}: it has no backward pass there; use sdpa")
    if flags.steps is None and flags.epochs is None:
        flags.epochs = 1.0
    return flags


# Model: RMSNorm, rotary position embeddings, causal self-attention with a document mask, SwiGLU

if torch.cuda.is_available():
    # Uncompiled, FlexAttention materializes the matrix that it exists to avoid.
    flex_attention, create_block_mask = torch.compile(flex_attention), torch.compile(create_block_mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings to queries or keys."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


def make_mask(segment_ids: Tensor, attention: str) -> Tensor | BlockMask:
    """Make the causal document mask of a batch, which all layers share."""

    def may_attend(b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return (q >= k) & (segment_ids[b, q] == segment_ids[b, k])

    (num_rows, seq_len), device = segment_ids.shape, segment_ids.device
    if attention == "flex":
        return create_block_mask(may_attend, num_rows, None, seq_len, seq_len, device=device)
    rows, places = torch.arange(num_rows, device=device), torch.arange(seq_len, device=device)
    return may_attend(rows[:, None, None], None, places[:, None], places)[:, None]


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        hidden = -(-8 * width // 3 // 128) * 128  # Three matrices of this width cost as much as two of 4 * width.
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.mlp_out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        """Add causal self-attention, then SwiGLU, to the residual stream."""
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (rows, heads, tokens, head width)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if isinstance(mask, BlockMask):
            # Compiled for CPUs, torch 2.13 misreads a value whose strides are not those of the key.
            mixed = flex_attention(query, key, value.contiguous(), block_mask=mask)
        else:
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.mlp_out(nn.functional.silu(gate) * up)


class GPT(nn.Module):
    """Returns the summed loss of a batch; the caller divides by the number of trained tokens of the whole step."""

    def __init__(self, num_layers: int, num_heads: int, width: int, vocab_size: int) -> None:
        super().__init__()
        self.attention, self.is_mixed, self.recompute = "sdpa", False, False
        self.head_width = width // num_heads
        vocab_size = -(-vocab_size // 128) * 128  # Matrices of odd sizes are slow.
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.vocabulary = nn.Linear(width, vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:  # Layers that add to the residual stream start smaller, the more there are.
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if "_out" in name else 0.02)

    def forward(self, inputs: Tensor, targets: Tensor, positions: Any = None, segment_ids: Any = None) -> Tensor:
        """Without positions and segment ids, a row is one document."""
        if positions is None:
            positions = torch.arange(inputs.shape[1], device=inputs.device)[None]
        pairs = torch.arange(0, self.head_width, 2, device=inputs.device)
        angles = positions[:, None, :, None] * 10_000.0 ** (-pairs / self.head_width)
        mask = None if segment_ids is None else make_mask(segment_ids, self.attention)
        shared = angles.cos(), angles.sin(), mask
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=self.is_mixed):
            x = self.embedding(inputs)
            for block in self.blocks:
                x = checkpoint(block, x, *shared, use_reentrant=False) if self.recompute else block(x, *shared)
            return self.loss(x, targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Sum the cross-entropy of all tokens that have a target."""
        logits = self.vocabulary(self.norm(x)).float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


# Training


def make_loaders(flags: argparse.Namespace) -> tuple[tm.Loader, tm.Loader | None]:
    """Make the loaders for training and validation, from a store or from text that is tokenized while training."""
    names = ("seq_len", "batch_size", "packing", "seed", "document_mask", "vocab_size", "num_workers", "device")
    settings: dict[str, Any] = {name: getattr(flags, name) for name in names}
    prefetch = 2 * flags.device.startswith("cuda") if flags.prefetch is None else flags.prefetch
    settings |= {"framework": "torch", "rank": RANK, "world_size": WORLD_SIZE, "prefetch": prefetch}
    if flags.tokenizer is None:
        source = tm.open(flags.data[0] if len(flags.data) == 1 else flags.data)
        can_validate = "val" in source.splits
    else:
        source, can_validate = flags.data, bool(flags.val_fraction)
        settings |= {"tokenizer": flags.tokenizer, "cache": flags.cache or flags.checkpoint_path / "cache"}
        settings |= {"val_fraction": flags.val_fraction or 0.0, "verbose": flags.verbose}
    loader = tm.load(source, split="train", epochs=flags.epochs, **settings)
    if not can_validate and flags.validate_every:
        print0("no validation: the data has no split 'val'; tokenize it with --val-fraction 0.01")
    is_needed = can_validate and flags.validate_every
    return loader, tm.load(source, split="val", epochs=1, shuffle=False, **settings) if is_needed else None


def make_model(flags: argparse.Namespace, vocab_size: int) -> tuple[GPT, torch.optim.Optimizer]:
    """Set up the device and the other ranks; make the model, and AdamW with weight decay for matrices only."""
    is_cuda = flags.device.startswith("cuda")
    if is_cuda:
        torch.cuda.set_device(flags.device)
        torch.set_float32_matmul_precision("high")  # TF32
    if WORLD_SIZE > 1:
        dist.init_process_group("nccl" if is_cuda else "gloo")
    torch.manual_seed(flags.seed)
    model = GPT(flags.num_layers, flags.num_heads, flags.width, vocab_size).to(flags.device)
    model.attention = "flex" if is_cuda and flags.attention != "sdpa" else "sdpa"
    can_mix = is_cuda and torch.cuda.is_bf16_supported()
    model.is_mixed = flags.mixed_precision == "bf16" or (flags.mixed_precision == "auto" and can_mix)
    model.recompute = flags.recompute
    if flags.compile:  # One block and the loss, so that the time it takes does not grow with the number of layers.
        model.loss = torch.compile(model.loss)
        for block in model.blocks:
            block.compile()
    return model, make_optimizer(model, flags, is_cuda)


def make_optimizer(model: nn.Module, flags: argparse.Namespace, is_cuda: bool) -> torch.optim.Optimizer:
    """AdamW, with weight decay for matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": flags.weight_decay}, {"params": others, "weight_decay": 0.0}]
    settings: dict[str, Any] = {"lr": flags.learning_rate, "betas": (0.9, 0.95)}
    if not (flags.use_8bit_optim and is_cuda):
        return torch.optim.AdamW(groups, fused=is_cuda, **settings)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise tm.UsageError("--use-8bit-optim needs a package: pip install bitsandbytes, or leave it out") from None
    return AdamW8bit(groups, **settings)


def train_step(model: Any, optimizer: torch.optim.Optimizer, batches: list[Any], clock: tm.StepClock) -> Tensor:
    """Train on one global batch; return this rank's share of the mean loss of its tokens, still on the device."""
    with clock.part("compute"):
        num_trained = torch.stack([(batch.targets != IGNORED).sum() for batch in batches]).sum()
        all_reduce(num_trained)
        num_trained, total = num_trained.clamp(min=1), torch.zeros((), device=num_trained.device)
    for number, batch in enumerate(batches, 1):
        with clock.part("copy"):
            documents = (batch.positions, batch.segment_ids) if batch.is_masked else ()
        # Ranks exchange gradients once per step, in the backward pass of the last batch.
        is_apart = WORLD_SIZE > 1 and number < len(batches)
        with clock.part("compute"), model.no_sync() if is_apart else contextlib.nullcontext():
            loss = model(batch.inputs, batch.targets, *documents) / num_trained
            (loss * WORLD_SIZE).backward()  # DistributedDataParallel averages gradients, and they must be summed.
            total += loss.detach()
    with clock.part("compute"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return total


@torch.no_grad()
def validate(model: GPT, loader: tm.Loader, num_batches: int) -> float:
    """Compute the mean loss of the first validation batches, which are the same every time."""
    loader.seek(0)
    sums = torch.zeros(2, dtype=torch.float64, device=model.embedding.weight.device)
    for batch in itertools.islice(loader, num_batches):
        documents = (batch.positions, batch.segment_ids) if batch.is_masked else ()
        sums += torch.stack([model(batch.inputs, batch.targets, *documents), (batch.targets != IGNORED).sum()])
    all_reduce(sums)
    return (sums[0] / sums[1].clamp(min=1)).item()


def hash_rows(batches: list[Any]) -> str:
    """Hash the inputs of a global batch as int32, row after row: equal on any number of ranks."""
    rows = torch.stack([batch.inputs.int() for batch in batches])
    parts = [rows.clone() for _ in range(WORLD_SIZE)]
    if WORLD_SIZE > 1:
        dist.all_gather(parts, rows)
    return hashlib.sha256(torch.stack(parts, dim=1).cpu().numpy().tobytes()).hexdigest()[:16]


def describe(flags: argparse.Namespace, model: GPT, loader: tm.Loader, num_steps: int) -> None:
    """Print what will run, and what is off because this machine cannot have it."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    precision = "bfloat16 autocast" if model.is_mixed else "float32"
    print0(f"{flags.config}: {num_parameters:,} parameters, {precision}, {model.attention} attention on {flags.device}")
    num_rows, ranks = loader.global_batch_size * flags.gradient_accumulation, "rank" if WORLD_SIZE == 1 else "ranks"
    print0(f"{num_steps:,} steps of {num_rows} rows of {flags.seq_len} tokens, on {WORLD_SIZE} {ranks}")
    if not flags.device.startswith("cuda"):
        print0("pinned memory, MFU and the 8-bit optimizer are off: they need a CUDA device")
    if any(leaf.documents.weight is not None for leaf in loader.rows.leaves()):
        print0("the weights of tokens in this store are not used here: every trained token counts the same")
    if flags.verbose:
        print0(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n{loader!r}")


def train(flags: argparse.Namespace) -> tuple[dict[int, float], tm.StepClock]:
    """Train until the last step; return the losses that were read, by step, and the clock."""
    loader, validation = make_loaders(flags)  # Here a device that does not exist is refused.
    if (vocab_size := flags.vocab_size or loader.vocab_size) is None:
        raise tm.UsageError(f"{' '.join(flags.data)} does not record how many ids there are; pass --vocab-size")
    core, optimizer = make_model(flags, vocab_size)
    is_cuda = flags.device.startswith("cuda")
    parts = {"data": loader, "model": core, "optimizer": optimizer}
    identity = {name: getattr(flags, name) for name in ("num_layers", "num_heads", "width", "document_mask")}
    identity |= {"vocab_size": vocab_size, "optimizer": type(optimizer).__name__}
    checkpoints, step = tm.Checkpoints(flags.checkpoint_path, parts, identity), 0
    if saved := checkpoints.resume(functools.partial(torch.load, map_location="cpu", weights_only=True)):
        step, (random, random_of_device) = saved["step"], saved["random"]
        torch.set_rng_state(random)
        if is_cuda and random_of_device is not None:
            torch.cuda.set_rng_state(random_of_device)
        print0(f"resumed from {saved['path']}, after step {step:,}")
    num_steps = flags.steps or sys.maxsize
    if flags.epochs is not None:  # They may end in the middle of the last step.
        num_steps = min(num_steps, step + -(-(len(loader) - loader.step) // flags.gradient_accumulation))
    describe(flags, core, loader, num_steps)
    model = nn.parallel.DistributedDataParallel(core, gradient_as_bucket_view=True) if WORLD_SIZE > 1 else core
    tokens = loader.global_batch_size * flags.gradient_accumulation * flags.seq_len
    num_in_matrices = sum(parameter.numel() for parameter in core.parameters()) - core.embedding.weight.numel()
    # MFU counts 6 operations for each token and parameter of a matrix, and attention as if it were not masked.
    flops = tokens * (6 * num_in_matrices + 12 * flags.num_layers * flags.width * flags.seq_len) / WORLD_SIZE
    clock = tm.StepClock(every=flags.table_every, tokens_per_step=tokens, flops_per_step=flops, device=flags.device)

    batches, losses, nothing = clock.data(loader), {}, Path(os.devnull)
    with (flags.loss_log or nothing).open("a") as loss_log, (flags.batch_log or nothing).open("a") as batch_log:
        while step < num_steps:
            step += 1
            is_last = step == num_steps
            some = list(itertools.islice(batches, flags.gradient_accumulation))
            num_warmup = min(flags.warmup_steps, num_steps // 10)  # Linear, then a cosine schedule down to a tenth.
            done = max(0, step - num_warmup) / max(1, num_steps - num_warmup)
            rate = flags.learning_rate * min(step / max(1, num_warmup), 0.55 + 0.45 * math.cos(math.pi * done))
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = train_step(model, optimizer, some, clock)
            if flags.batch_log is not None:
                print0(step, hash_rows(some), file=batch_log)
            if is_last or step % flags.log_every == 0:
                with clock.part("sync"):  # The host waits for the device here and nowhere else.
                    all_reduce(loss)
                    losses[step] = loss.item()
                print0(step, losses[step], file=loss_log)
                print0(f"step {step:,}/{num_steps:,}  loss {losses[step]:.4f}  rate {rate:.2e}  {clock.status()}")
            if clock.end_step() and not is_last:
                print0(clock.table(recent=True))
            with clock.outside():
                if validation is not None and (is_last or step % flags.validate_every == 0):
                    found = validate(core, validation, flags.validation_batches * flags.gradient_accumulation)
                    print0(f"step {step:,}: validation loss {found:.4f}")
                if RANK == 0 and (is_last or step % flags.checkpoint_every == 0):
                    random = torch.get_rng_state(), torch.cuda.get_rng_state() if is_cuda else None
                    print0(f"checkpoint {checkpoints.save(step, torch.save, random=random)}")
    nothing_to_do = f"nothing to do: all {num_steps:,} steps are done; pass more --steps or --epochs"
    print0(clock.table() if losses else nothing_to_do)
    return losses, clock


def main() -> None:
    """Train, and report mistakes in a sentence."""
    memory = "lower --batch-size and raise --gradient-accumulation as much, lower --seq-len, or use --recompute, "
    with tm.exit_on_error(memory + "--mixed-precision bf16, --use-8bit-optim or a smaller --config"):
        flags = parse_flags()
        if flags.test:
            check = Path(__file__).resolve().parents[1] / "tests/examples/self_check.py"
            os.execv(sys.executable, [sys.executable, str(check), flags.device])
        train(flags)
        if WORLD_SIZE > 1:
            dist.barrier()  # Gloo aborts a rank that leaves while another is still saving.
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
