"""What a torchtitan configuration means, in terms of the recipe."""

from __future__ import annotations

from samestep.migrate.reading import Part, Reading, look_up, read_with
from samestep.migrate.rows import Meaning
from samestep.migrate.source import Source
from samestep.migrate.torchtitan_table import TORCHTITAN
from samestep.migrate.values import Values

_T, _P, _C, _O, _L = "training.", "parallelism.", "checkpoint.", "optimizer.", "lr_scheduler."


def read_torchtitan_file(source: Source, given: dict[str, object]) -> Reading:
    """A torchtitan TOML."""
    leaves = source.leaves()
    values = Values(TORCHTITAN, leaves, extra=given)
    part = Part(table=TORCHTITAN, leaves=leaves, unknown_is="refuses it")
    rows, findings, unknown = look_up(source, [part])
    if not any(found.severity == "error" for found in findings):
        ranks = _engine(values)
        _batch(values, ranks)
        _precision(values)
        _training(values)
        _checkpoints(values)
    meaning = Meaning(settings=tuple(values.settings))
    return read_with("torchtitan", leaves, (rows, findings, unknown), values, meaning)


def _engine(v: Values) -> int | None:
    """Says the engine; returns the number of ranks when it is known."""
    replicas, shards = v.get(_P + "data_parallel_replicate_degree"), v.get(_P + "data_parallel_shard_degree")
    ranks = replicas * shards if shards > 0 else v.extra.get("engine.ranks")
    paths = (_P + "data_parallel_shard_degree", _P + "data_parallel_replicate_degree")
    replicated, whole = replicas > 1, shards == 1
    name = {(True, True): "ddp", (True, False): "hsdp", (False, True): "single"}.get((replicated, whole), "fsdp")
    v.say("engine.name", name, *paths, rule="replicas and shards: hsdp; replicas: ddp; shards: fsdp; neither: single")
    if shards > 0:
        v.say("engine.ranks", ranks, *paths, rule="replicas x shards")
    if name == "hsdp":
        if shards <= 0 and ranks and ranks % replicas:
            v.find(paths[1], "error", f"{ranks} ranks do not divide into {replicas} replicas")
        elif shards > 0 or ranks:
            shard = shards if shards > 0 else ranks // replicas
            v.say("engine.shard_ranks", shard, *paths, rule="ranks in one sharding group")
        else:
            v.asked.append("engine.shard_ranks")
    if name in ("fsdp", "hsdp"):
        path = _P + "fsdp_reshard_after_forward"
        v.say("engine.reshard_after_forward", v.get(path) != "never", path)
    elif v.has(_P + "fsdp_reshard_after_forward"):
        v.say(None, None, _P + "fsdp_reshard_after_forward", rule="nothing is sharded", status="not-needed")
    if v.has(_T + "enable_cpu_offload"):
        v.say("engine.offload", "cpu" if v.get(_T + "enable_cpu_offload") else "none", _T + "enable_cpu_offload")
    return ranks


def _batch(v: Values, ranks: int | None) -> None:
    path = _T + ("batch_size" if v.has(_T + "batch_size") else "local_batch_size")
    micro, rows = v.get(path), v.get(_T + "global_batch_size")
    v.say("train.micro_batch", micro, path)
    if rows < 0:
        v.say("train.accumulation", 1, _T + "global_batch_size")
    elif ranks is None:
        v.say(
            None,
            None,
            _T + "global_batch_size",
            rule="depends on the ranks: give --set engine.ranks=...",
            status="lossy",
        )
    elif rows % (micro * ranks):
        v.find(_T + "global_batch_size", "error", f"{rows} is no multiple of {micro} rows x {ranks} ranks")
    else:
        v.say("train.accumulation", rows // (micro * ranks), _T + "global_batch_size")


def _precision(v: Values) -> None:
    paths = (_T + "mixed_precision_param", _T + "dtype", "model.converters")
    converters = v.get("model.converters") or []
    compute, masters = v.get(paths[0]), v.get(paths[1])
    if any("float8" in name for name in converters):
        v.say("precision.regime", "mixed-fp8", "model.converters", *paths[:2])
        if v.has("float8.recipe_name"):
            v.say("precision.fp8.scaling", v.get("float8.recipe_name"), "float8.recipe_name")
        if v.has("float8.filter_fqns"):
            globs = [f"*{name}*" for name in v.get("float8.filter_fqns")]
            v.say("precision.fp8.skip", globs, "float8.filter_fqns")
        if v.has("float8.emulate"):
            v.say("precision.fp8.emulate", v.get("float8.emulate"), "float8.emulate")
        if masters == "bfloat16":
            v.say("precision.fp8.master", "bfloat16", paths[1], rule="dtype of the masters")
    elif masters == "bfloat16":
        v.say("precision.regime", "low", paths[1], paths[0])
    else:
        regime = "mixed" if compute == "bfloat16" else "full"
        rule = "bfloat16 compute with fp32 masters is mixed, fp32 alone is full"
        v.say("precision.regime", regime, *paths, rule=rule)
    own = "bfloat16" if masters == "bfloat16" else "float32"
    reduce = v.get(_T + "mixed_precision_reduce")
    v.say("precision.overrides.reduce", None if reduce == own else reduce, _T + "mixed_precision_reduce")


def _training(v: Values) -> None:
    v.say("train.steps", v.get(_T + "steps"), _T + "steps")
    norm = v.get(_T + "max_norm")
    v.say("train.max_grad_norm", norm if norm > 0 else None, _T + "max_norm")
    v.say("data.max_tokens", v.get(_T + "seq_len"), _T + "seq_len")
    v.say("data.packing", True, _T + "seq_len")
    if v.has(_T + "dataset_path"):
        v.say("data.path", v.get(_T + "dataset_path"), _T + "dataset_path")
        v.say("data.format", "text", _T + "dataset_path")
    if v.has(_T + "seed"):
        v.say("train.seed", v.get(_T + "seed"), _T + "seed")
    name = str(v.get(_O + "name"))
    if name == "AdamW":
        v.say("train.optimizer.name", "adamw", _O + "name")
    else:
        v.say("train.optimizer.name", "adamw", _O + "name", rule=f"samestep has no {name}", status="impossible")
    v.say("train.optimizer.lr", v.get(_O + "lr"), _O + "lr")
    v.say("train.optimizer.betas", [v.get(_O + "beta1"), v.get(_O + "beta2")], _O + "beta1", _O + "beta2")
    v.say("train.optimizer.eps", v.get(_O + "eps"), _O + "eps")
    v.say("train.optimizer.weight_decay", v.get(_O + "weight_decay"), _O + "weight_decay")
    v.say("train.optimizer.no_decay", [], _O + "weight_decay")
    _schedule(v)
    mode = v.get("activation_checkpoint.mode")
    v.say("train.activation_checkpointing", mode != "none", "activation_checkpoint.mode")
    if v.has("metrics.log_freq"):
        v.say("log.every", max(1, v.get("metrics.log_freq")), "metrics.log_freq")
    if v.get("metrics.enable_tensorboard"):
        v.say("log.trackers", ["tensorboard"], "metrics.enable_tensorboard")
    if v.has("comm.train_timeout_seconds"):
        v.say("engine.timeout_seconds", v.get("comm.train_timeout_seconds"), "comm.train_timeout_seconds")


def _schedule(v: Values) -> None:
    kind = v.get(_L + "decay_type")
    if kind == "sqrt":
        v.say("train.schedule.name", "linear", _L + "decay_type", rule="samestep has no sqrt", status="impossible")
    else:
        v.say("train.schedule.name", kind, _L + "decay_type")
    v.say("train.schedule.warmup_steps", min(v.get(_L + "warmup_steps"), v.get(_T + "steps")), _L + "warmup_steps")
    path = _L + ("lr_min" if v.has(_L + "lr_min") else "min_lr_factor")
    v.say("train.schedule.final_factor", v.get(path), path)


def _checkpoints(v: Values) -> None:
    path = _C + ("enable_checkpoint" if v.has(_C + "enable_checkpoint") else "enable")
    if not v.get(path):
        v.say("checkpoint.every", None, path)
        if v.has(_C + "interval"):
            v.say(None, None, _C + "interval", rule="no checkpoints are enabled", status="not-needed")
        return
    v.say("checkpoint.every", v.get(_C + "interval"), _C + "interval", path)
    keep = v.get(_C + "keep_latest_k")
    if keep > 0:
        v.say("checkpoint.keep", keep, _C + "keep_latest_k")
    else:
        v.say("checkpoint.keep", 2**53, _C + "keep_latest_k", rule="all of them, as far as a number goes")
    v.say("checkpoint.asynchronous", v.get(_C + "async_mode") != "disabled", _C + "async_mode")
    if v.has(_C + "export_dtype"):
        v.say("precision.export_dtype", v.get(_C + "export_dtype"), _C + "export_dtype")
