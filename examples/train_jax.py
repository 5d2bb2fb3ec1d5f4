"""Train a small GPT with JAX, from a tokenmill store to checkpoints; to be read from top to bottom.

    tokenmill tokenize corpus/*.jsonl -o data/tok --tokenizer tokenizer --val-fraction 0.05
    python examples/train_jax.py --config examples/config.yaml --set data_config.dataset_name=data/tok

Settings come from a YAML file, whose keys are the fields of the three classes below. The same command run again goes
on behind the last checkpoint, on CPUs with the same losses bit by bit. Arrays live on a mesh of all devices of all
processes: batches split by rows, parameters copied or, if told, split as well. docs/train_jax.md has more.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import gc
import hashlib
import itertools
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import yaml

import tokenmill as tm
from tokenmill.arguments import flag, one_of, show, whole_number
from tokenmill.clock import StepClock

try:
    import jax
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
except ImportError as error:
    sys.exit(f"error: {tm.MissingDependencyError(f'train_jax.py ({error.name})', 'jax,examples')}")

# Settings

Count: TypeAlias = int
"""A whole number above 0, where `int` may be 0 as well."""
Names: TypeAlias = "str | list[str]"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The size of the model, and how it computes."""

    num_layers: Count = 6
    num_heads: Count = 6
    width: Count = 384
    mlp_width: Count = 1024
    vocab_size: Count | None = None
    rope_base: float = 10_000.0
    compute_dtype: str = "auto"
    remat: bool = False


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where rows come from, and how they come."""

    dataset_name: Names = "data/tok"
    tokenizer_name: str | None = None
    cache_path: str | None = None
    val_fraction: float = 0.0
    loader: str = "grain"
    batch_size: Count = 16
    seq_len: Count = 512
    packing: str = "concat"
    document_mask: bool = True
    seed: int = 0
    worker_count: int = 0
    worker_buffer_size: Count = 1
    prefetch_buffer_size: int = 2
    cache_size: int = 0


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long and how fast to learn, and what to write down."""

    steps: Count = 1000
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    seed: int = 0
    log_every: Count = 20
    table_every: Count = 200
    validate_every: int = 200
    validation_batches: Count = 20
    checkpoint_path: str = "checkpoints"
    checkpoint_every: int = 200
    keep_checkpoints: Count = 2
    shard_parameters: bool = False
    distributed: bool = False
    loss_log: str | None = None
    batch_log: str | None = None


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that a run is told."""

    model_config: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data_config: DataConfig = dataclasses.field(default_factory=DataConfig)
    train_config: TrainConfig = dataclasses.field(default_factory=TrainConfig)


SECTIONS = {"model_config": ModelConfig, "data_config": DataConfig, "train_config": TrainConfig}


def read_settings(path: Path, changes: Iterable[str]) -> Settings:
    """The settings of a YAML file, some of them changed by `section.key=value`."""
    try:
        tree = yaml.safe_load(path.read_text("utf-8")) or {}
        fill(Settings, tree, str(path))
        for change in changes:
            name, _, value = change.partition("=")
            section, _, key = name.partition(".")
            if not key or "=" not in change:
                raise tm.UsageError(f"--set {change} is not of the form section.key=value")
            tree[section] = {**(tree.get(section) or {}), key: yaml.safe_load(value)}
    except (OSError, UnicodeDecodeError) as error:
        raise tm.UsageError(f"{path} cannot be read: {error}; pass --config FILE") from None
    except yaml.YAMLError as error:
        raise tm.UsageError(f"{path} or a value of --set is no YAML: {' '.join(str(error).split())}") from None
    return fill(Settings, tree, "--set")


def fill(kind: Any, values: Any, where: str) -> Any:
    """Settings of one kind, each checked against the type of its field; a key that nobody reads is refused."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    if not isinstance(values, dict):
        raise tm.UsageError(f"{where} holds {show(values)}; expected keys and values, such as {', '.join(kinds)}")
    made = {}
    for key, value in values.items():
        if key not in kinds:
            near = difflib.get_close_matches(str(key), kinds, n=1, cutoff=0)[0]
            raise tm.UsageError(f"{where} has no {show(key)}; did you mean {near}? There are {', '.join(kinds)}")
        if key in SECTIONS:
            made[key] = fill(SECTIONS[key], {} if value is None else value, key)
        else:
            made[key] = check_value(value, f"{where}.{key}", kinds[key])
    return kind(**made)


def check_value(value: Any, name: str, kind: str) -> Any:
    """A value as its field has it; in YAML, `1e-3` without a dot is text."""
    if value is None and kind.endswith("| None"):
        return None
    kind = kind.removesuffix(" | None")
    if kind == "bool":
        return flag(value, name)
    if kind in ("Count", "int"):
        return whole_number(value, name, 1 if kind == "Count" else 0)
    if kind == "float":
        with contextlib.suppress(TypeError, ValueError):
            if not isinstance(value, bool) and 0 <= float(value) < float("inf"):
                return float(value)
        raise tm.UsageError(f"{name} {show(value)} must be a number, at least 0")
    for one in value if kind == "Names" and isinstance(value, list) and value else [value]:
        if not isinstance(one, str) or not one:
            raise tm.UsageError(f"{name} {show(one)} must be text")
    return value


# The model: functions of a tree of arrays. Layers are stacked along the first axis and scanned, so that
# compiling takes as long for 48 of them as for one.


def make_parameters(config: ModelConfig, vocab_size: int, key: Any) -> dict[str, Any]:
    """New parameters; the layers that add to the residual stream begin smaller the more there are."""
    layers, width, heads = config.num_layers, config.width, config.num_heads
    keys = iter(jax.random.split(key, 6))

    def normal(*shape: int, scale: float = 1.0) -> Any:
        return 0.02 * scale * jax.random.normal(next(keys), shape)

    into_residual = (2 * layers) ** -0.5
    return {
        "embedding": normal(vocab_size, width),
        "layers": {
            "attention_norm": jnp.ones((layers, width)),
            "attention_in": normal(layers, width, 3, heads, width // heads),
            "attention_out": normal(layers, heads, width // heads, width, scale=into_residual),
            "mlp_norm": jnp.ones((layers, width)),
            "mlp_in": normal(layers, width, 2, config.mlp_width),
            "mlp_out": normal(layers, config.mlp_width, width, scale=into_residual),
        },
        "final_norm": jnp.ones(width),
        "head": normal(width, vocab_size),
    }


def predict(config: ModelConfig, parameters: dict[str, Any], batch: dict[str, Any]) -> Any:
    """Logits of the next token at every place: (rows, seq_len, vocab_size), in float32."""
    dtype = find_dtype(config)
    cast = functools.partial(jax.tree.map, lambda array: array.astype(dtype))
    mask = mask_attention(batch["inputs_segmentation"])
    angles = make_angles(batch["inputs_position"], config.width // config.num_heads, config.rope_base)

    def layer(stream: Any, weights: dict[str, Any]) -> tuple[Any, None]:
        weights = cast(weights)
        stream = stream + attend(normalize(stream, weights["attention_norm"]), weights, angles, mask)
        return stream + feed_forward(normalize(stream, weights["mlp_norm"]), weights), None

    stream = parameters["embedding"][batch["inputs"]].astype(dtype)
    # With remat only the stream between layers is kept for the backward pass, and the rest is computed again.
    stream, _ = jax.lax.scan(jax.checkpoint(layer) if config.remat else layer, stream, parameters["layers"])
    stream = normalize(stream, parameters["final_norm"].astype(dtype))
    return (stream @ parameters["head"].astype(dtype)).astype(jnp.float32)


def find_dtype(config: ModelConfig) -> Any:
    """What matrices are multiplied in; parameters and the optimizer stay float32."""
    if config.compute_dtype == "auto":
        return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return jnp.dtype(one_of(config.compute_dtype, ("auto", "float32", "bfloat16"), "model_config.compute_dtype"))


def mask_attention(segments: Any) -> Any:
    """A token sees those before it in its own document: (rows, 1, seq_len, seq_len), for all heads."""
    length = segments.shape[1]
    is_before = jnp.tril(jnp.ones((length, length), bool))
    return ((segments[:, :, None] == segments[:, None, :]) & is_before)[:, None]


def make_angles(positions: Any, head_width: int, base: float) -> Any:
    """By how much rotary embedding turns each pair at each place: (rows, seq_len, 1, head_width / 2)."""
    frequencies = base ** (-jnp.arange(0, head_width, 2) / head_width)
    return (positions[:, :, None] * frequencies)[:, :, None]


def rotate(heads: Any, angles: Any) -> Any:
    """Turn the first half of each head against the second."""
    cosine, sine = jnp.cos(angles).astype(heads.dtype), jnp.sin(angles).astype(heads.dtype)
    first, second = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def normalize(stream: Any, scale: Any) -> Any:
    """RMSNorm, whose mean is taken in float32."""
    mean_square = jnp.mean(jnp.square(stream.astype(jnp.float32)), axis=-1, keepdims=True)
    return stream * jax.lax.rsqrt(mean_square + 1e-6).astype(stream.dtype) * scale


def attend(stream: Any, weights: dict[str, Any], angles: Any, mask: Any) -> Any:
    """Causal attention inside documents."""
    query, key, value = jnp.einsum("rtw,wcnh->crtnh", stream, weights["attention_in"])
    mixed = jax.nn.dot_product_attention(rotate(query, angles), rotate(key, angles), value, mask=mask)
    return jnp.einsum("rtnh,nhw->rtw", mixed, weights["attention_out"])


def feed_forward(stream: Any, weights: dict[str, Any]) -> Any:
    """SwiGLU: one half opens the gates for the other."""
    gate, value = jnp.einsum("rtw,wcm->crtm", stream, weights["mlp_in"])
    return (jax.nn.silu(gate) * value) @ weights["mlp_out"]


def sum_losses(config: ModelConfig, parameters: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
    """The sum of the losses of a global batch and the number of tokens that have one.

    The layout marks what has none, padding and a document's last token, by segment 0. Because the arrays are those
    of all processes, dividing one by the other gives the mean over the whole batch on any number of devices.
    """
    counts = (batch["targets_segmentation"] > 0).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(predict(config, parameters, batch), batch["targets"])
    return jnp.sum(losses * counts), jnp.sum(counts)


# Training


def make_optimizer(config: TrainConfig) -> Any:
    """AdamW behind a gradient clip; the rate rises, then falls along a cosine to a tenth. Norms are not decayed."""
    rate, last = config.learning_rate, max(config.steps, config.warmup_steps + 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, config.warmup_steps, last, rate / 10)

    def is_decayed(parameters: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: not path[-1].key.endswith("norm"), parameters)

    return optax.chain(
        optax.clip_by_global_norm(config.gradient_clip) if config.gradient_clip else optax.identity(),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=is_decayed),
    )


def make_state(settings: Settings, vocab_size: int) -> dict[str, Any]:
    """Parameters and the optimizer's memory of them."""
    key = jax.random.key(settings.train_config.seed)
    parameters = make_parameters(settings.model_config, vocab_size, key)
    return {"parameters": parameters, "optimizer": make_optimizer(settings.train_config).init(parameters)}


def place_state(shapes: Any, mesh: Mesh, is_sharded: bool) -> Any:
    """Where arrays live: a copy on each device or, as fully sharded training has it, a piece of each on all.

    One rule for parameters and optimizer alike: cut the longest axis that can be cut evenly. The compiler then
    gathers what a layer needs and scatters its gradients.
    """

    def place(shape: Any) -> Any:
        cuttable = [axis for axis, length in enumerate(shape.shape) if is_sharded and length % mesh.size == 0]
        longest = max(cuttable, key=lambda axis: shape.shape[axis], default=None)
        spec = [("data" if axis == longest else None) for axis in range(len(shape.shape))]
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(place, shapes)


def make_step(settings: Settings, shapes: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """The training step; it gives the memory of the state it gets to the one that it returns."""
    replicated = NamedSharding(jax.tree.leaves(shapes)[0].sharding.mesh, PartitionSpec())
    places = (jax.tree.map(lambda shape: shape.sharding, shapes), replicated)
    optimizer = make_optimizer(settings.train_config)

    def mean_loss(parameters: Any, batch: Any) -> Any:
        total, count = sum_losses(settings.model_config, parameters, batch)
        return total / jnp.maximum(count, 1)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=places)
    def step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        loss, gradients = jax.value_and_grad(mean_loss)(state["parameters"], batch)
        updates, optimizer_state = optimizer.update(gradients, state["optimizer"], state["parameters"])
        return {"parameters": optax.apply_updates(state["parameters"], updates), "optimizer": optimizer_state}, loss

    return step


# Data

PARTS = ("inputs", "targets", "inputs_segmentation", "inputs_position", "targets_segmentation")
"""What the model takes of a batch in the layout of MaxText: arrays of int32, (rows, seq_len)."""


class Feed:
    """Batches of a loader, and the place in training, which is behind the last batch that was given.

    Grain's workers and tf.data read ahead, so how far they are says nothing. But a place is one row number, and it is
    enough to count; the state is that of any loader, and a run may go on with another one, or with other workers.
    """

    def __init__(self, loader: Any, sharding: Any, read: Callable[[], Any], blame: str | None = None) -> None:
        self.loader = loader
        self._sharding = sharding
        self._read = read
        self._blame = blame
        self._state = dict(loader.state_dict())

    def __iter__(self) -> Iterator[Any]:
        batches = self._read()
        try:
            for batch in batches:
                self._state["next_row"] += self._state["batch_size"] * self._state["world_size"]
                yield batch
        finally:
            if hasattr(batches, "close"):
                batches.close()

    def place(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch as global arrays, of which this process has some rows; where they come from tokenmill, they are."""
        arrays = {name: batch[name] for name in PARTS}
        if all(isinstance(array, jax.Array) for array in arrays.values()):
            return arrays
        return {name: jax.make_array_from_process_local_data(self._sharding, arrays[name]) for name in PARTS}

    def state_dict(self) -> dict[str, Any]:
        """The place in training."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place, also one of another loader or another number of processes."""
        self.loader.load_state_dict(state)
        self._state["next_row"] = state["next_row"]

    @property
    def bottleneck(self) -> str:
        """What to blame when steps wait for data."""
        return self.loader.rows.bottleneck or self._blame or self.loader.bottleneck


def feed_with_grain(config: DataConfig, sharding: Any, rows: dict[str, Any]) -> Feed:
    """Grain: `worker_count` processes fill batches, and a thread keeps some of them at hand."""
    ranks = {"rank": jax.process_index(), "world_size": jax.process_count()}
    loader = tm.load(framework="grain", **rows, **ranks)
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # Workers ask for absl's flags, which a program without absl.app.run has not read.
    batches: Any = loader
    if config.worker_count:
        sizes = {"num_workers": config.worker_count, "per_worker_buffer_size": config.worker_buffer_size}
        batches = batches.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(**sizes))
    if config.prefetch_buffer_size:
        size = config.prefetch_buffer_size
        batches = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=size)
    blame = "Grain's workers; raise data_config.worker_count, or set data_config.loader to tokenmill"
    return Feed(loader, sharding, lambda: iter(batches), blame)


def feed_with_tf(config: DataConfig, sharding: Any, rows: dict[str, Any]) -> Feed:
    """tf.data, which has threads of its own and is kept off the accelerator, where it would take all memory."""
    ranks = {"rank": jax.process_index(), "world_size": jax.process_count()}
    loader = tm.load(framework="tf", dtype="int32", prefetch=config.prefetch_buffer_size, **rows, **ranks)
    import tensorflow

    tensorflow.config.set_visible_devices([], "GPU")
    blame = "tf.data; raise data_config.prefetch_buffer_size, or set data_config.loader to tokenmill"
    return Feed(loader, sharding, lambda: loader.dataset().as_numpy_iterator(), blame)


def feed_with_tokenmill(config: DataConfig, sharding: Any, rows: dict[str, Any]) -> Feed:
    """tokenmill's loader: a thread fills batches and starts copying them; rank and world size follow from the mesh."""
    loader = tm.load(framework="jax", sharding=sharding, prefetch=config.prefetch_buffer_size, **rows)
    return Feed(loader, sharding, lambda: iter(loader))


FEEDS = {"grain": feed_with_grain, "tf": feed_with_tf, "tokenmill": feed_with_tokenmill}
"""By name, each followed by the one to use where its package is missing."""


def open_source(config: DataConfig) -> Any:
    """The store to train on, or None for raw text, which has a tokenizer and is no store."""
    names = [config.dataset_name] if isinstance(config.dataset_name, str) else config.dataset_name
    if config.tokenizer_name is not None and not all((Path(name) / "manifest.json").exists() for name in names):
        return None
    try:
        source = tm.open(names if len(names) > 1 else names[0])
    except tm.StoreError as error:
        raise tm.UsageError(f"{error}; for raw text, set data_config.tokenizer_name") from None
    if ".weight" in source.split().beside:
        say("the store has weights of tokens, which this trainer does not use: every trained token counts the same")
    return source


def open_feed(settings: Settings, source: Any, sharding: Any) -> Feed:
    """Batches, with the loader that was asked for or else one whose package is there."""
    config = settings.data_config
    names = list(FEEDS)
    first = names.index(one_of(config.loader, names, "data_config.loader"))
    for name in names[first:]:
        try:
            feed = FEEDS[name](config, sharding, describe_rows(settings, source))
        except tm.MissingDependencyError as error:
            say(f"{error}; going on with loader {names[names.index(name) + 1]}")
            continue
        say(f"loader {name}: {config.batch_size} rows of {config.seq_len} tokens a process")
        break
    if config.worker_count and name != "grain":
        say(f"data_config.worker_count has no effect: loader {name} fills batches in a thread, with the same result")
    if config.cache_size:
        say("data_config.cache_size has no effect: the store is mapped into memory, so there is nothing to keep")
    return feed


def describe_rows(settings: Settings, source: Any) -> dict[str, Any]:
    """What all loaders are told."""
    config = settings.data_config
    rows = {
        "source": source if source is not None else config.dataset_name,
        "seq_len": config.seq_len,
        "batch_size": config.batch_size,
        "packing": config.packing,
        "seed": config.seed,
        "document_mask": config.document_mask,
        "layout": "maxtext",
        "vocab_size": settings.model_config.vocab_size,
    }
    if source is None:
        cache = config.cache_path or f"{settings.train_config.checkpoint_path}-cache"
        rows |= {"tokenizer": config.tokenizer_name, "cache": cache, "val_fraction": config.val_fraction}
    return rows


def open_validation(settings: Settings, source: Any, sharding: Any) -> Any:
    """The validation rows, always the same ones in the same order; None where there are none."""
    if not settings.train_config.validate_every:
        return None
    if source is None and not settings.data_config.val_fraction:
        say("validation is off: data_config.val_fraction 0.01 would keep some of the text for it")
        return None
    if source is not None and "val" not in source.splits:
        say("validation is off: the data has no split val; make a store with tokenmill tokenize --val-fraction 0.01")
        return None
    rows = {**describe_rows(settings, source), "split": "val", "shuffle": False, "epochs": 1}
    return tm.load(framework="jax", sharding=sharding, **rows)


def hash_batch(batch: dict[str, Any]) -> str:
    """A hash of the inputs of a global batch as int32, row after row: equal wherever the rows are."""
    inputs = multihost_utils.process_allgather(batch["inputs"], tiled=True)
    return hashlib.sha256(np.ascontiguousarray(inputs, "<i4").tobytes()).hexdigest()[:16]


# Checkpoints


def open_checkpoints(config: TrainConfig) -> ocp.CheckpointManager:
    """A folder of checkpoints; a half-written one has another name until it is whole, so it is never read."""
    folder = Path(config.checkpoint_path).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=config.keep_checkpoints, cleanup_tmp_directories=True)
    return ocp.CheckpointManager(folder, options=options, item_names=("state", "data", "model"))


def save_checkpoint(run: Run, step: int) -> None:
    """Copy all that the next steps depend on; it is written while training goes on."""
    items = {
        "state": ocp.args.StandardSave(run.state),
        "data": ocp.args.JsonSave(run.feed.state_dict()),
        "model": ocp.args.JsonSave(run.model),
    }
    with failing_as(f"{run.checkpoints.directory} cannot be written", "make room, and run the same command again"):
        run.checkpoints.save(step, args=ocp.args.Composite(**items), force=True)
        if step == run.settings.train_config.steps:
            run.checkpoints.wait_until_finished()


def read_checkpoint(checkpoints: Any, step: int, **items: Any) -> Any:
    """Some items of a checkpoint."""
    path = checkpoints.directory / str(step)
    with failing_as(f"{path} cannot be read", "delete it to go on from the one before"):
        return checkpoints.restore(step, args=ocp.args.Composite(**items))


@contextlib.contextmanager
def failing_as(what: str, todo: str) -> Iterator[None]:
    """Turn what Orbax raises when files are missing, damaged or too large into a sentence."""
    try:
        yield
    except (KeyError, OSError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise tm.StoreError(f"{what} ({reason}); {todo}") from None


def read_place(checkpoints: Any, model: dict[str, Any]) -> tuple[int, Any]:
    """The step of the last checkpoint and where its data ends; a checkpoint of another model is refused."""
    step = checkpoints.latest_step()
    if step is None:
        return 0, None
    saved = read_checkpoint(checkpoints, step, data=ocp.args.JsonRestore(), model=ocp.args.JsonRestore())
    for name, value in model.items():
        if saved.model.get(name) != value:
            raise tm.UsageError(
                f"{checkpoints.directory} has a model with {name} {show(saved.model.get(name))}, and this one has "
                f"{show(value)}; make the model as it was, or set train_config.checkpoint_path to another folder"
            )
    return step, saved.data


# The loop

STEPS_AHEAD = 2


@dataclasses.dataclass
class Run:
    """All that the loop works with."""

    settings: Settings
    state: Any
    first_step: int
    feed: Feed
    validation: Any
    checkpoints: Any
    model: dict[str, Any]
    step: Callable[..., Any]
    evaluate: Callable[..., Any]


class Log:
    """Losses of steps, which stay on the device until a line is due."""

    def __init__(self, settings: Settings) -> None:
        data, self._config = settings.data_config, settings.train_config
        self.tokens_per_step = data.batch_size * data.seq_len * jax.process_count()
        self._losses: dict[int, Any] = {}
        self._read: list[float] = []
        self._recent: deque[Any] = deque(maxlen=STEPS_AHEAD + 1)
        self._began = time.perf_counter()

    def add(self, step: int, loss: Any) -> None:
        """Keep the loss of a step, and do not run further ahead of the device than two steps.

        JAX returns before the device has begun; without a bound, batches would pile up. The step waited for is two
        back, so the device has work meanwhile, and nothing is copied from it.
        """
        self._losses[step] = loss
        self._recent.append(loss)
        if len(self._recent) > STEPS_AHEAD:
            self._recent[0].block_until_ready()

    def write(self) -> None:
        """Read the losses that are waiting; here the host waits until the device is through with their steps."""
        losses = {step: float(loss) for step, loss in jax.device_get(self._losses).items()}
        self._losses.clear()
        append_lines(self._config.loss_log, [f"{step} {loss!r}" for step, loss in losses.items()])
        self._read += losses.values()

    def tell(self, step: int) -> str:
        """A line about the steps since the last one."""
        self.write()
        now, losses = time.perf_counter(), self._read
        speed = self.tokens_per_step * len(losses) / (now - self._began)
        self._began, self._read = now, []
        mean = sum(losses) / len(losses)
        return f"step {step:,} of {self._config.steps:,}: loss {mean:.4f}, {speed:,.0f} tokens/s"

    def leave_out(self, seconds: float) -> None:
        """Do not count some time that belongs to no step."""
        self._began += seconds


def append_lines(path: str | None, lines: list[str]) -> None:
    """Add lines to a file, if there is one to be written; one process does it for all."""
    if path is not None and jax.process_index() == 0:
        with Path(path).open("a") as file:
            file.writelines(line + "\n" for line in lines)


def prepare(settings: Settings) -> Run:
    """Everything up to the first step: devices, data, and the model as it was left or a new one."""
    check_shapes(settings)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data", None))
    say(f"{jax.default_backend()}: devices {jax.device_count()}, processes {jax.process_count()}")
    source = open_source(settings.data_config)
    feed = open_feed(settings, source, sharding)
    model = describe_model(settings, feed.loader.rows)
    checkpoints = open_checkpoints(settings.train_config)
    first_step, place = read_place(checkpoints, model)
    make = functools.partial(make_state, settings, model["vocab_size"])
    shapes = place_state(jax.eval_shape(make), mesh, settings.train_config.shard_parameters)
    if place is not None:
        feed.load_state_dict(place)
        state = read_checkpoint(checkpoints, first_step, state=ocp.args.StandardRestore(shapes)).state
        say(f"going on behind step {first_step:,}, from {checkpoints.directory}")
    else:
        state = jax.jit(make, out_shardings=jax.tree.map(lambda shape: shape.sharding, shapes))()
    say(f"parameters {sum(array.size for array in jax.tree.leaves(state['parameters'])):,}")
    validation = open_validation(settings, source, sharding)
    step, evaluate = make_step(settings, shapes), jax.jit(functools.partial(sum_losses, settings.model_config))
    return Run(settings, state, first_step, feed, validation, checkpoints, model, step, evaluate)


def train(run: Run) -> None:
    """Train up to the last step.

    Steps run on the device while the host is two steps ahead. So in the clock's table "copy" and "compute" are what the
    host spends on starting work and on waiting for the step before last: where the device is the slowest, "compute" is
    about the time that it takes for a step. As long as that is so, data that is waited for holds nothing up.
    """
    config = run.settings.train_config
    if run.first_step >= config.steps:
        say(f"nothing to do: all {config.steps:,} steps are done; pass more --steps")
        return
    log = Log(run.settings)
    clock = StepClock(every=config.table_every, tokens_per_step=log.tokens_per_step)
    for step, batch in zip(range(run.first_step + 1, config.steps + 1), clock.data(run.feed), strict=False):
        with clock.part("copy"):
            placed = run.feed.place(batch)
        with clock.part("compute"):
            run.state, loss = run.step(run.state, placed)
            log.add(step, loss)
        is_last = step == config.steps
        if step % config.log_every == 0 or is_last:
            with clock.part("sync"):
                line = log.tell(step)
            say(line)
        if clock.end_step():
            say(clock.table(recent=True))
        with clock.outside():
            began = time.perf_counter()
            look_after(run, step, placed, log)
            log.leave_out(time.perf_counter() - began)
    say(f"the whole run:\n{clock.table()}")


def look_after(run: Run, step: int, batch: dict[str, Any], log: Log) -> None:
    """What is due after a step."""
    config = run.settings.train_config
    if config.batch_log is not None:
        append_lines(config.batch_log, [f"{step} {hash_batch(batch)}"])
    if run.validation is not None and is_due(step, config.validate_every, config.steps):
        say(f"step {step:,}: validation loss {validate(run):.4f}")
    if is_due(step, config.checkpoint_every, config.steps):
        log.write()  # A run that goes on from here does not come by these steps again.
        save_checkpoint(run, step)


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something that comes every so many steps comes after this one; it also comes after the last."""
    return step == last or (every > 0 and step % every == 0)


def validate(run: Run) -> float:
    """The mean loss of the first validation batches; sums stay on the device until all are there."""
    batches = itertools.islice(run.validation, run.settings.train_config.validation_batches)
    sums = [run.evaluate(run.state["parameters"], {name: batch[name] for name in PARTS}) for batch in batches]
    run.validation.seek(0)
    total, count = np.sum(jax.device_get(sums), axis=0)
    return float(total / max(count, 1))


def check_shapes(settings: Settings) -> None:
    """Refuse sizes that cannot be cut as they must be, before anything is opened."""
    model, rows = settings.model_config, settings.data_config.batch_size
    find_dtype(model)
    if model.width % (2 * model.num_heads):
        raise tm.UsageError(
            f"model_config.width {model.width} must be a multiple of twice num_heads, {2 * model.num_heads}: heads are "
            "of equal width, which rotary embedding halves"
        )
    if rows % jax.local_device_count():
        raise tm.UsageError(
            f"data_config.batch_size {rows} is rows of one process and must be a multiple of its devices, "
            f"{jax.local_device_count()}"
        )


def describe_model(settings: Settings, rows: tm.Rows) -> dict[str, Any]:
    """What a checkpoint must agree with: all that changes what parameters mean, and not how fast they are computed."""
    model = dataclasses.asdict(settings.model_config)
    del model["compute_dtype"], model["remat"]
    document_mask = settings.data_config.document_mask
    return {**model, "vocab_size": find_vocab_size(settings, rows), "document_mask": document_mask}


def find_vocab_size(settings: Settings, rows: tm.Rows) -> int:
    """How many tokens the model knows: what it is told, or as many as the data has."""
    rows.wait_for(1)
    sizes = [settings.model_config.vocab_size or leaf.documents.vocab_size for leaf in rows.leaves()]
    if None in sizes:
        name = show(settings.data_config.dataset_name)
        raise tm.UsageError(f"{name} does not say how many tokens there are; set model_config.vocab_size")
    return max(size for size in sizes if size is not None)


# The command line


def say(text: str) -> None:
    """Print, in one process of all."""
    if jax.process_index() == 0:
        print(text, flush=True)


def join_processes(config: TrainConfig) -> None:
    """Become one of several processes, as the environment or a cluster's own variables say.

    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` name the first process, how many there are and
    which one this is; on Slurm, Open MPI and TPU pods JAX finds them by itself.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    address, *numbers = (os.environ.get(name) for name in names)
    if address is None and not config.distributed:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        count, index = (None if number is None else int(number) for number in numbers)
        jax.distributed.initialize(address, count, index)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise tm.UsageError(f"the processes did not find each other ({reason}); set {', '.join(names)}") from None


def read_arguments() -> argparse.Namespace:
    """The few things that are said on the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT with JAX on a tokenmill store.")
    default = Path(__file__).with_name("config.yaml")
    parser.add_argument("--config", type=Path, default=default, metavar="FILE", help="settings, as YAML")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change a setting")
    parser.add_argument("--steps", metavar="N", help="the same as --set train_config.steps=N")
    return parser.parse_args()


def explain(error: RuntimeError) -> str:
    """What can be done about an error of the device; memory is the one that settings can help."""
    reason = str(error).partition("\n")[0]
    if "RESOURCE_EXHAUSTED" not in reason and "Out of memory" not in reason:
        raise error
    todo = "data_config.batch_size, data_config.seq_len or model_config.width; or set model_config.remat"
    return f"the device is out of memory ({reason}); lower {todo} or train_config.shard_parameters to true"


def main() -> int:
    """Train; say in a sentence what is wrong."""
    arguments = read_arguments()
    changes = arguments.set + ([f"train_config.steps={arguments.steps}"] if arguments.steps else [])
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # What Orbax logs, it raises as well.
    try:
        settings = read_settings(arguments.config, changes)
        join_processes(settings.train_config)
        run = prepare(settings)
        with run.checkpoints:
            train(run)
            gc.collect()  # JAX lets go of memory that it shares with Grain's workers, which else is said to leak.
    except tm.TokenmillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, tm.UsageError) else 1
    except OSError as error:
        print(f"error: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on behind the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
