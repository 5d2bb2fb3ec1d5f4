"""Train a small GPT with JAX on a tokenmill store. Copy this file and change what you like.

    tokenmill tokenize corpus/*.jsonl -o data/tok --tokenizer tokenizer --val-fraction 0.05
    python examples/train_jax.py --config examples/config.yaml --set data_config.dataset_name=data/tok

The same command resumes after the last checkpoint. Arrays live on a mesh of all devices of all processes: batches are
sharded by rows, parameters are replicated or, if asked for, sharded as well. docs/train_jax.md explains the settings.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import hashlib
import itertools
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from settings import CONFIG, read_settings

import tokenmill as tm

with tm.exit_on_error(extra="jax,examples"):
    import jax
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Model: RMSNorm, rotary position embeddings, causal self-attention with a document mask, SwiGLU. Layers are stacked and
# scanned, so that the time to compile does not grow with their number.


def make_parameters(config: SimpleNamespace, vocab_size: int, key: Any) -> dict[str, Any]:
    """Initialize; matrices that add to the residual stream start smaller, the more layers there are."""
    layers, width, heads = config.num_layers, config.width, config.num_heads
    keys, smaller = iter(jax.random.split(key, 6)), (2 * layers) ** -0.5

    def normal(*shape: int, scale: float = 1.0) -> Any:
        return 0.02 * scale * jax.random.normal(next(keys), shape)

    return {
        "embedding": normal(vocab_size, width),
        "layers": {
            "attention_norm": jnp.ones((layers, width)),
            "attention_in": normal(layers, width, 3, heads, width // heads),
            "attention_out": normal(layers, heads, width // heads, width, scale=smaller),
            "mlp_norm": jnp.ones((layers, width)),
            "mlp_in": normal(layers, width, 2, config.mlp_width),
            "mlp_out": normal(layers, config.mlp_width, width, scale=smaller),
        },
        "final_norm": jnp.ones(width),
        "head": normal(width, vocab_size),
    }


def normalize(x: Any, scale: Any) -> Any:
    """RMSNorm, with the mean in float32."""
    mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + 1e-6).astype(x.dtype) * scale


def rotate(heads: Any, angles: Any) -> Any:
    """Apply rotary position embeddings to queries or keys."""
    cosine, sine = jnp.cos(angles).astype(heads.dtype), jnp.sin(angles).astype(heads.dtype)
    first, second = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def predict(config: SimpleNamespace, parameters: dict[str, Any], batch: dict[str, Any]) -> Any:
    """Compute the logits of the next tokens, (rows, seq_len, vocab_size), in float32."""
    default = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    dtype = jnp.dtype(default if config.compute_dtype == "auto" else config.compute_dtype)
    segments, head_width = batch["inputs_segmentation"], config.width // config.num_heads
    is_before = jnp.tril(jnp.ones((segments.shape[1], segments.shape[1]), bool))
    mask = ((segments[:, :, None] == segments[:, None, :]) & is_before)[:, None]  # (rows, 1, seq_len, seq_len)
    frequencies = config.rope_base ** (-jnp.arange(0, head_width, 2) / head_width)
    angles = (batch["inputs_position"][:, :, None] * frequencies)[:, :, None]  # (rows, seq_len, 1, head_width / 2)

    def layer(x: Any, weights: dict[str, Any]) -> tuple[Any, None]:
        weights = jax.tree.map(lambda array: array.astype(dtype), weights)
        normal = normalize(x, weights["attention_norm"])
        query, key, value = jnp.einsum("rtw,wcnh->crtnh", normal, weights["attention_in"])
        mixed = jax.nn.dot_product_attention(rotate(query, angles), rotate(key, angles), value, mask=mask)
        x = x + jnp.einsum("rtnh,nhw->rtw", mixed, weights["attention_out"])
        gate, up = jnp.einsum("rtw,wcm->crtm", normalize(x, weights["mlp_norm"]), weights["mlp_in"])
        return x + (jax.nn.silu(gate) * up) @ weights["mlp_out"], None

    x = parameters["embedding"][batch["inputs"]].astype(dtype)
    x, _ = jax.lax.scan(jax.checkpoint(layer) if config.remat else layer, x, parameters["layers"])
    x = normalize(x, parameters["final_norm"].astype(dtype))
    return (x @ parameters["head"].astype(dtype)).astype(jnp.float32)


def sum_losses(config: SimpleNamespace, parameters: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
    """Sum the losses of a global batch, and count the tokens that have one; padding has segment 0."""
    counts = (batch["targets_segmentation"] > 0).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(predict(config, parameters, batch), batch["targets"])
    return jnp.sum(losses * counts), jnp.sum(counts)


def make_optimizer(config: SimpleNamespace) -> Any:
    """AdamW after clipping, with a linear warm-up of at most a tenth of the run and a cosine down to a tenth."""
    rate, num_warmup = config.learning_rate, min(config.warmup_steps, config.steps // 10)
    after = optax.warmup_cosine_decay_schedule(0.0, rate, num_warmup, config.steps, rate / 10)
    schedule = lambda num_done: after(num_done + 1)  # noqa: E731 (steps count from 1)
    clip = optax.clip_by_global_norm(config.gradient_clip) if config.gradient_clip else optax.identity()
    # Matrices are decayed, and norms are not.
    mask = functools.partial(jax.tree_util.tree_map_with_path, lambda path, _: not path[-1].key.endswith("norm"))
    return optax.chain(clip, optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=mask))


def place_state(shapes: Any, mesh: Mesh, is_sharded: bool) -> Any:
    """Choose where arrays live: replicated, or sharded along the longest axis that the devices divide evenly."""

    def place(shape: Any) -> Any:
        axes = [axis for axis, length in enumerate(shape.shape) if is_sharded and length % mesh.size == 0]
        longest = max(axes, key=lambda axis: shape.shape[axis], default=None)
        spec = PartitionSpec(*("data" if axis == longest else None for axis in range(len(shape.shape))))
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, shapes)


def make_step(settings: SimpleNamespace, shapes: Any, mesh: Mesh) -> Any:
    """Compile the training step, which reuses the memory of the state that it gets."""
    optimizer = make_optimizer(settings.train_config)

    def mean_loss(parameters: Any, batch: Any) -> Any:
        total, count = sum_losses(settings.model_config, parameters, batch)
        return total / jnp.maximum(count, 1)

    def step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        loss, gradients = jax.value_and_grad(mean_loss)(state["parameters"], batch)
        updates, optimizer_state = optimizer.update(gradients, state["optimizer"], state["parameters"])
        return {"parameters": optax.apply_updates(state["parameters"], updates), "optimizer": optimizer_state}, loss

    places = jax.tree.map(lambda shape: shape.sharding, shapes), NamedSharding(mesh, PartitionSpec())
    return jax.jit(step, donate_argnums=0, out_shardings=places)


# Data

PARTS = ("inputs", "targets", "inputs_segmentation", "inputs_position", "targets_segmentation")
NEXT_LOADER = {"grain": "tf", "tf": "tokenmill"}  # The loader to use if the package of another is missing.


def print0(text: str) -> None:
    """Print in the first process."""
    if jax.process_index() == 0:
        print(text, flush=True)


def describe_rows(settings: SimpleNamespace) -> tuple[dict[str, Any], bool]:
    """Return the settings that all loaders share, and whether there is validation data."""
    data = settings.data_config
    rows = {name: getattr(data, name) for name in ("seq_len", "batch_size", "packing", "seed", "document_mask")}
    rows |= {"layout": "maxtext", "vocab_size": settings.model_config.vocab_size}
    names = [data.dataset_name] if isinstance(data.dataset_name, str) else data.dataset_name
    if data.tokenizer_name is not None and not all((Path(name) / "manifest.json").exists() for name in names):
        cache = data.cache_path or f"{settings.train_config.checkpoint_path}-cache"
        text = {"tokenizer": data.tokenizer_name, "cache": cache, "val_fraction": data.val_fraction}
        return {**rows, **text, "source": data.dataset_name}, data.val_fraction > 0
    store = tm.open(names if len(names) > 1 else names[0])
    if ".weight" in store.split().beside:
        print0("the weights of tokens in this store are not used here: every trained token counts the same")
    return {**rows, "source": store}, "val" in store.splits


def make_loader(name: str, data: SimpleNamespace, rows: dict[str, Any], sharding: Any) -> tuple[Any, Any, str | None]:
    """Make a loader; return it, a function that begins its batches, and what to blame when steps wait for them."""
    if name == "tokenmill":  # A thread fills batches and starts to copy them; the sharding gives rank and world size.
        loader = tm.load(framework="jax", sharding=sharding, prefetch=data.prefetch_buffer_size, **rows)
        return loader, loader.__iter__, None
    rows = {**rows, "framework": name, "rank": jax.process_index(), "world_size": jax.process_count()}
    if name == "tf":
        loader = tm.load(dtype="int32", prefetch=data.prefetch_buffer_size, **rows)
        import tensorflow

        tensorflow.config.set_visible_devices([], "GPU")  # TensorFlow would take all memory of the accelerator.
        blame = "tf.data; raise data_config.prefetch_buffer_size, or set data_config.loader to tokenmill"
        return loader, lambda: loader.dataset().as_numpy_iterator(), blame
    loader = batches = tm.load(**rows)
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # Grain's workers ask for absl's flags, which only absl.app.run parses.
    if data.worker_count:
        sizes = {"num_workers": data.worker_count, "per_worker_buffer_size": data.worker_buffer_size}
        batches = batches.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(**sizes))
    if data.prefetch_buffer_size:
        ahead = {"prefetch_buffer_size": data.prefetch_buffer_size}
        batches = grain.experimental.ThreadPrefetchIterDataset(batches, **ahead)
    blame = "Grain's workers; raise data_config.worker_count, or set data_config.loader to tokenmill"
    return loader, batches.__iter__, blame


def open_loader(name: str, data: SimpleNamespace, rows: dict[str, Any], sharding: Any) -> tuple[Any, Any, str | None]:
    """Make the loader of this name or, if its package is missing, the next one."""
    try:
        made = make_loader(name, data, rows, sharding)
    except tm.MissingDependencyError as error:
        print0(f"{error}; continuing with loader {NEXT_LOADER[name]}")
        return open_loader(NEXT_LOADER[name], data, rows, sharding)
    print0(f"loader {name}: {data.batch_size} rows of {data.seq_len} tokens a process")
    if data.worker_count and name != "grain":
        print0(f"data_config.worker_count has no effect: loader {name} fills batches in a thread, with the same result")
    if data.cache_size:
        print0("data_config.cache_size has no effect: the store is mapped into memory, so there is nothing to keep")
    return made


# Training


@contextlib.contextmanager
def orbax_errors(what: str, remedy: str) -> Iterator[None]:
    """Turn what Orbax raises for missing, damaged or too large files into a sentence."""
    try:
        yield
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise tm.StoreError(f"{what} ({' '.join(str(error).split())[:200]}); {remedy}") from None


def resume(checkpoints: Any, identity: dict[str, Any], loader: Any, shapes: Any) -> tuple[int, int, Any]:
    """Restore the last checkpoint, and move the loader to its place; return the step, the row and the state."""
    if (step := checkpoints.latest_step()) is None:
        return 0, 0, None
    with orbax_errors(f"{checkpoints.directory / str(step)} cannot be read", "delete it to resume from the one before"):
        read = {"data": ocp.args.JsonRestore(), "model": ocp.args.JsonRestore()}
        saved = checkpoints.restore(step, args=ocp.args.Composite(**read))
        for name, ours in identity.items():
            if (theirs := saved.model.get(name)) != ours:
                differ = f"has a model with {name} {theirs!r}, and this one has {ours!r}; make the model as it was"
                raise tm.UsageError(f"{checkpoints.directory} {differ}, or set another train_config.checkpoint_path")
        loader.load_state_dict(saved.data)
        state = checkpoints.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes))).state
    print0(f"resumed after step {step:,}, from {checkpoints.directory}")
    return step, saved.data["next_row"], state


def join_processes(is_distributed: bool) -> None:
    """Become one of several processes; on Slurm, Open MPI and TPU pods, JAX finds the others by itself."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    address, *numbers = (os.environ.get(name) for name in names)
    if address is not None or is_distributed:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.distributed.initialize(address, *(None if number is None else int(number) for number in numbers))
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise tm.UsageError(f"the processes did not find each other ({reason}); set {', '.join(names)}") from None


def append(path: str | None, lines: Iterable[str]) -> None:
    """Append lines to a log, in the first process."""
    if path is not None and jax.process_index() == 0:
        with Path(path).open("a") as file:
            file.writelines(f"{line}\n" for line in lines)


def check_shapes(model: SimpleNamespace, num_rows: int) -> None:
    """Refuse sizes that cannot be divided as they must be."""
    if model.width % (2 * model.num_heads):
        heads = 2 * model.num_heads
        raise tm.UsageError(f"model_config.width {model.width} must be a multiple of twice num_heads, {heads}")
    if num_rows % jax.local_device_count():
        devices = f"the devices of a process, {jax.local_device_count()}"
        raise tm.UsageError(f"data_config.batch_size {num_rows} must be a multiple of {devices}")


def validate(evaluate: Any, parameters: Any, loader: Any, num_batches: int) -> float:
    """Compute the mean loss of the first validation batches, which are the same every time."""
    loader.seek(0)
    batches = itertools.islice(loader, num_batches)
    sums = [evaluate(parameters, {name: batch[name] for name in PARTS}) for batch in batches]
    total, count = np.sum(jax.device_get(sums), axis=0)
    return float(total / max(count, 1))


def prepare(settings: SimpleNamespace) -> SimpleNamespace:
    """Open the data, and make the state or restore it."""
    model, data, config = settings.model_config, settings.data_config, settings.train_config
    check_shapes(model, data.batch_size)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data", None))
    print0(f"{jax.default_backend()}: devices {jax.device_count()}, processes {jax.process_count()}")
    rows, can_validate = describe_rows(settings)
    loader, begin, blame = open_loader(data.loader, data, rows, sharding)
    if (vocab_size := model.vocab_size or loader.rows.vocab_size) is None:
        raise tm.UsageError(f"{data.dataset_name} does not record how many ids there are; set model_config.vocab_size")
    validation = None
    if config.validate_every and can_validate:
        validation = tm.load(framework="jax", sharding=sharding, split="val", shuffle=False, epochs=1, **rows)
    elif config.validate_every:
        print0("no validation: the data has no split 'val'; tokenize it with val_fraction 0.01")

    def make_state() -> dict[str, Any]:
        parameters = make_parameters(model, vocab_size, jax.random.key(config.seed))
        return {"parameters": parameters, "optimizer": make_optimizer(config).init(parameters)}

    folder = Path(config.checkpoint_path).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=config.keep_checkpoints, cleanup_tmp_directories=True)
    checkpoints = ocp.CheckpointManager(folder, options=options, item_names=("state", "data", "model"))
    # A checkpoint must agree in what the parameters mean, and not in how they are computed.
    identity = {**vars(model), "vocab_size": vocab_size, "document_mask": data.document_mask}
    del identity["compute_dtype"], identity["remat"]
    shapes, place = place_state(jax.eval_shape(make_state), mesh, config.shard_parameters), loader.state_dict()
    step, place["next_row"], state = resume(checkpoints, identity, loader, shapes)
    if state is None:
        state = jax.jit(make_state, out_shardings=jax.tree.map(lambda shape: shape.sharding, shapes))()
    print0(f"parameters {sum(array.size for array in jax.tree.leaves(state['parameters'])):,}")
    train_step, evaluate = make_step(settings, shapes, mesh), jax.jit(functools.partial(sum_losses, model))
    return SimpleNamespace(**locals())


def train(run: SimpleNamespace) -> None:
    """Train until the last step. JAX returns before the device is done, so the host runs two steps ahead of it."""
    config, loader, state, losses, since_line = run.config, run.loader, run.state, {}, []
    rows_per_step = run.data.batch_size * jax.process_count()
    clock = tm.StepClock(every=config.table_every, tokens_per_step=rows_per_step * run.data.seq_len)
    batches = run.begin()
    timed = clock.data(batches, bottleneck=lambda: loader.rows.bottleneck or run.blame or loader.bottleneck)
    for step, batch in zip(range(run.step + 1, config.steps + 1), timed, strict=False):
        with clock.part("copy"):  # Batches of tokenmill's own loader are on the mesh already.
            arrays = {name: batch[name] for name in PARTS}
            if not isinstance(arrays["inputs"], jax.Array):
                put = functools.partial(jax.make_array_from_process_local_data, run.sharding)
                arrays = {name: put(array) for name, array in arrays.items()}
        with clock.part("compute"):
            state, losses[step] = run.train_step(state, arrays)
            if step - 2 in losses:
                losses[step - 2].block_until_ready()
        is_last = step == config.steps
        is_saved = is_last or (config.checkpoint_every > 0 and step % config.checkpoint_every == 0)
        is_logged = is_last or step % config.log_every == 0
        if is_logged or is_saved:  # A run that resumes here does not do these steps again.
            with clock.part("sync"):
                read = {number: float(loss) for number, loss in jax.device_get(losses).items()}
            append(config.loss_log, (f"{number} {loss!r}" for number, loss in read.items()))
            since_line += read.values()
            losses.clear()
        if is_logged:
            mean, since_line = sum(since_line) / len(since_line), []
            print0(f"step {step:,} of {config.steps:,}: loss {mean:.4f}, {clock.status()}")
        if clock.end_step():
            print0(clock.table(recent=True))
        with clock.outside():
            if config.batch_log is not None:
                inputs = multihost_utils.process_allgather(arrays["inputs"], tiled=True)
                digest = hashlib.sha256(np.ascontiguousarray(inputs, "<i4").tobytes()).hexdigest()[:16]
                append(config.batch_log, [f"{step} {digest}"])
            if run.validation is not None and (is_last or step % config.validate_every == 0):
                found = validate(run.evaluate, state["parameters"], run.validation, config.validation_batches)
                print0(f"step {step:,}: validation loss {found:.4f}")
            if is_saved:
                place = {**run.place, "next_row": run.place["next_row"] + (step - run.step) * rows_per_step}
                items = {"state": ocp.args.StandardSave(state), "data": ocp.args.JsonSave(place)}
                items["model"] = ocp.args.JsonSave(run.identity)
                full = f"{run.checkpoints.directory} cannot be written"
                with orbax_errors(full, "make room, and run the same command again"):
                    run.checkpoints.save(step, args=ocp.args.Composite(**items), force=True)
                    if is_last:
                        run.checkpoints.wait_until_finished()
    done = f"nothing to do: all {config.steps:,} steps are done; pass more --steps"
    print0(f"the whole run:\n{clock.table()}" if clock.num_steps else done)
    getattr(batches, "close", lambda: None)()


def main() -> None:
    """Train, and report mistakes in a sentence."""
    parser = argparse.ArgumentParser(description="Train a small GPT with JAX on a tokenmill store.")
    parser.add_argument("--config", type=Path, default=CONFIG, metavar="FILE", help="settings, as YAML")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change a setting")
    parser.add_argument("--steps", metavar="N", help="the same as --set train_config.steps=N")
    flags = parser.parse_args()
    changes = flags.set + ([f"train_config.steps={flags.steps}"] if flags.steps else [])
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax also raises what it logs.
    smaller = "data_config.batch_size, data_config.seq_len or model_config.width; or set model_config.remat"
    with tm.exit_on_error(f"lower {smaller} or train_config.shard_parameters to true"):
        settings = read_settings(flags.config, changes)
        join_processes(settings.train_config.distributed)
        run = prepare(settings)
        with run.checkpoints:
            train(run)
        gc.collect()  # JAX releases memory that it shares with Grain's workers, which would be reported as leaked.


if __name__ == "__main__":
    main()
