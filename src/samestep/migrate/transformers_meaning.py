"""What TrainingArguments mean, in terms of the recipe: all but FSDP's and DeepSpeed's own fields."""

from __future__ import annotations

import math

from samestep.migrate.values import Values

_SCHEDULES = {
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
_OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd"}
_TRACKERS = ("tensorboard", "trackio")


def read_arguments(v: Values) -> None:
    """Fill `v` from the arguments that hold with every engine."""
    v.say("train.micro_batch", v.get("per_device_train_batch_size"), "per_device_train_batch_size")
    v.say("train.accumulation", v.get("gradient_accumulation_steps"), "gradient_accumulation_steps")
    norm = v.get("max_grad_norm")
    v.say("train.max_grad_norm", norm if norm > 0 else None, "max_grad_norm")
    v.say("train.seed", v.get("seed"), "seed")
    for path in ("gradient_checkpointing", "activation_checkpointing"):
        if v.has(path):
            v.say("train.activation_checkpointing", v.get(path), path)
    if v.has("train_sampling_strategy"):
        _sampling(v)
    if v.get("dataloader_drop_last"):
        v.say("data.drop_last", True, "dataloader_drop_last")
    if v.has("ddp_timeout"):
        v.say("engine.timeout_seconds", v.get("ddp_timeout"), "ddp_timeout")
    _length(v)
    _optimizer(v)
    _schedule(v)
    _checkpoints(v)
    _watching(v)


def _sampling(v: Values) -> None:
    strategy = v.get("train_sampling_strategy")
    if strategy in ("random", "sequential"):
        v.say("data.shuffle", strategy == "random", "train_sampling_strategy")
    else:
        v.say(None, None, "train_sampling_strategy", rule=f"samestep has no {strategy}", status="impossible")


def _length(v: Values) -> None:
    steps = v.get("max_steps")
    if steps > 0:
        v.say("train.steps", steps, "max_steps")
        if v.has("num_train_epochs"):
            v.say(None, None, "num_train_epochs", rule="max_steps wins", status="not-needed")
        return
    if v.has("max_steps"):
        v.say(None, None, "max_steps", rule="-1 leaves it to num_train_epochs", status="not-needed")
    if "train.steps" not in v.extra:
        v.say("train.epochs", v.get("num_train_epochs"), "num_train_epochs")
    elif v.has("num_train_epochs"):
        v.say(None, None, "num_train_epochs", rule="--set train.steps wins", status="not-needed")


def _optimizer(v: Values) -> None:
    kind = v.get("optim")
    name = _OPTIMIZERS.get(kind)
    if name is None:
        v.say("train.optimizer.name", "adamw", "optim", rule=f"samestep has no {kind}", status="impossible")
        name = "adamw"
    else:
        v.say("train.optimizer.name", name, "optim")
    v.say("train.optimizer.lr", v.get("learning_rate"), "learning_rate")
    v.say("train.optimizer.weight_decay", v.get("weight_decay"), "weight_decay")
    v.say("train.optimizer.no_decay", ["*.bias", "*norm*"], "weight_decay")
    if name == "adamw":
        v.say("train.optimizer.betas", [v.get("adam_beta1"), v.get("adam_beta2")], "adam_beta1", "adam_beta2")
        v.say("train.optimizer.eps", v.get("adam_epsilon"), "adam_epsilon")


def _schedule(v: Values) -> None:
    kind = str(v.get("lr_scheduler_type"))
    name = _SCHEDULES.get(kind)
    if name is None:
        v.say("train.schedule.name", "linear", "lr_scheduler_type", rule=f"samestep has no {kind}", status="impossible")
    else:
        v.say("train.schedule.name", name, "lr_scheduler_type")
    if kind == "cosine_with_min_lr":
        _lowest_rate(v)
    warmup, path = v.get("warmup_steps"), "warmup_steps"
    if not warmup and v.get("warmup_ratio"):
        warmup, path = v.get("warmup_ratio"), "warmup_ratio"
    elif v.has("warmup_ratio"):
        v.say(None, None, "warmup_ratio", rule="warmup_steps wins", status="not-needed")
    if kind == "constant" or not warmup:
        v.say("train.schedule.warmup_steps", 0, path, rule="no warm-up")
        return
    if warmup < 1:
        steps = v.extra.get("train.steps") or max(v.get("max_steps"), 0)
        if not steps:
            v.asked.append("train.schedule.warmup_steps")
            v.say(
                None,
                None,
                path,
                status="lossy",
                rule="a share of steps that are not known: give --set train.schedule.warmup_steps=...",
            )
            return
        warmup = math.ceil(steps * warmup)
    v.say("train.schedule.warmup_steps", int(warmup), path)


def _lowest_rate(v: Values) -> None:
    path = "lr_scheduler_kwargs.min_lr_rate"
    if v.has(path):
        v.say("train.schedule.final_factor", v.given[path], path, rule="the share of the rate that cosine ends at")
    elif v.has("lr_scheduler_kwargs.min_lr"):
        path = "lr_scheduler_kwargs.min_lr"
        v.say(
            "train.schedule.final_factor",
            v.given[path] / v.get("learning_rate"),
            path,
            rule="the lowest rate, as a share of the learning rate",
        )


def _checkpoints(v: Values) -> None:
    strategy = v.get("save_strategy")
    if strategy == "steps":
        v.say("checkpoint.every", v.get("save_steps"), "save_steps", "save_strategy")
    elif strategy == "no":
        v.say("checkpoint.every", None, "save_strategy")
    else:
        v.say(
            "checkpoint.every",
            None,
            "save_strategy",
            status="lossy",
            rule=f"samestep counts steps, not {strategy}: give --set checkpoint.every=...",
        )
    if strategy != "steps" and v.has("save_steps"):
        v.say(None, None, "save_steps", rule=f"not read: save_strategy is {strategy}", status="not-needed")
    if v.has("save_total_limit"):
        v.say("checkpoint.keep", v.get("save_total_limit"), "save_total_limit")


def _watching(v: Values) -> None:
    if v.has("logging_steps"):
        every = v.get("logging_steps")
        v.say("log.every", max(1, every), "logging_steps")
    trackers = [name for name in v.get("report_to") or [] if name in _TRACKERS]
    others = [name for name in v.get("report_to") or [] if name not in (*_TRACKERS, "none")]
    if v.has("report_to"):
        rule = f"no tracker for {', '.join(others)}" if others else "the same trackers"
        v.say("log.trackers", trackers, "report_to", rule=rule, status="lossy" if others else "computed")
    if v.get("eval_strategy") == "steps" and v.extra.get("data.held_out"):
        every = v.get("eval_steps") or v.get("logging_steps")
        v.say("train.evaluate_every", every, "eval_strategy", "eval_steps", rule="evaluated every so many steps")
