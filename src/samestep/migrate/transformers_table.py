"""The fields of transformers' TrainingArguments (5.24) that a JSON of them holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from samestep.migrate.accelerate_table import ACCELERATE
from samestep.migrate.rows import Row, Table

_OWN = "the Trainer's own; it does not change the training"
_OUT = ("output_dir", "run_name", "project", "logging_strategy", "logging_first_step", "log_on_each_node",
        "logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level", "log_level_replica", "disable_tqdm",
        "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "eval_delay",
        "per_device_eval_batch_size", "prediction_loss_only", "eval_on_start", "eval_do_concat_batches",
        "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics",
        "bf16_full_eval", "fp16_full_eval", "save_only_model", "save_on_each_node", "enable_jit_checkpoint",
        "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push",
        "hub_revision", "ignore_data_skip", "restore_callback_states_from_checkpoint", "full_determinism", "use_cpu",
        "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
        "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
        "remove_unused_columns", "label_names", "length_column_name", "debug", "skip_memory_metrics", "do_train",
        "do_eval", "do_predict", "resume_from_checkpoint", "local_rank", "torch_empty_cache_steps", "use_cache",
        "overwrite_output_dir", "logging_dir", "no_cuda", "half_precision_backend", "jit_mode_eval", "past_index",
        "save_safetensors", "metric_for_best_model", "greater_is_better", "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend",
        "gradient_checkpointing_kwargs*", "activation_checkpointing_kwargs*", "torch_compile_backend",
        "torch_compile_mode", "liger_kernel_config*", "accelerator_config.even_batches",
        "accelerator_config.dispatch_batches", "accelerator_config.use_seedable_sampler",
        "accelerator_config.non_blocking", "accelerator_config.use_configured_state",
        "accelerator_config.gradient_accumulation_kwargs*")  # fmt: skip

_TRAINING = [
    Row("per_device_train_batch_size", "int", "renamed", "rows per rank and micro-batch", to="train.micro_batch",
        topic="accumulation", default=8),
    Row("gradient_accumulation_steps", "int", "renamed", "micro-batches per rank and step", to="train.accumulation",
        topic="accumulation", default=1),
    Row("num_train_epochs", "float", "renamed", "passes over the data; max_steps above 0 wins", to="train.epochs",
        topic="schedule", default=3.0),
    Row("max_steps", "int", "renamed", "optimizer steps; -1 leaves it to num_train_epochs", to="train.steps",
        topic="schedule", default=-1),
    Row("max_grad_norm", "float", "renamed", "the largest gradient norm; 0 means no clipping",
        to="train.max_grad_norm", topic="clipping", default=1.0),
    Row("seed", "int", "kept", "the same seed, but not the same random numbers", to="train.seed", default=42),
    Row("data_seed", "int", "lossy", "samestep has one seed for weights and data"),
    Row("gradient_checkpointing", "bool", "renamed", "recompute activations; does not change numbers",
        to="train.activation_checkpointing", topic="activations", deprecated="activation_checkpointing"),
    Row("activation_checkpointing", "bool", "renamed", "recompute activations; does not change numbers",
        to="train.activation_checkpointing", topic="activations"),
    Row("average_tokens_across_devices", "bool", "lossy", "samestep averages over the label tokens of all ranks",
        harmless=(True,), default=True, topic="accumulation"),
    Row("label_smoothing_factor", "float", "impossible", "samestep's loss has no label smoothing", harmless=(0,)),
    Row("neftune_noise_alpha", "float", "impossible", "samestep adds no noise to embeddings", harmless=(0,)),
    Row("auto_find_batch_size", "bool", "impossible", "a batch size that is found by trying has no counterpart",
        harmless=(False,), topic="accumulation"),
    Row("train_sampling_strategy", "text", "computed", "random shuffles, sequential does not", to="data.shuffle",
        default="random"),
    Row("group_by_length", "bool", "impossible", "samestep does not sort rows by length", harmless=(False,),
        deprecated="train_sampling_strategy: group_by_length"),
    Row("dataloader_drop_last", "bool", "lossy",
        "the Trainer drops the last short micro-batch, samestep the last short step", to="data.drop_last",
        default=False, harmless=(False,)),
    Row("torch_compile", "bool", "lossy", "torch.compile changes last bits; samestep does not compile",
        harmless=(False,)),
    Row("tf32", "bool", "lossy", "samestep leaves fp32 matmuls as torch has them", harmless=(False,),
        topic="precision"),
    Row("use_liger_kernel", "bool", "lossy", "fused kernels change last bits; samestep has none", harmless=(False,)),
    Row("load_best_model_at_end", "bool", "lossy", "samestep exports the last weights", harmless=(False,)),
    Row("ddp_timeout", "int", "renamed", "seconds", to="engine.timeout_seconds", default=1800),
    Row("accelerator_config.split_batches", "bool", "impossible", "rows are given per rank in a recipe",
        harmless=(False,), topic="accumulation"),
    Row("parallelism_config*", "any", "impossible", "give a samestep engine instead", topic="sharding"),
]  # fmt: skip

_OPTIMIZER = [
    Row("learning_rate", "float", "renamed", "the learning rate at factor 1", to="train.optimizer.lr",
        topic="optimizer", default=5e-5),
    Row("optim", "text", "computed", "adamw_torch and adamw_torch_fused are adamw (last bits), sgd is sgd",
        to="train.optimizer.name", topic="optimizer", default="adamw_torch_fused"),
    Row("optim_args", "any", "impossible", "give the fields of train.optimizer instead", topic="optimizer"),
    Row("optim_target_modules", "any", "impossible", "samestep has no GaLore", topic="optimizer"),
    Row("weight_decay", "float", "computed", "the Trainer does not decay biases and norms",
        to="train.optimizer.weight_decay train.optimizer.no_decay", topic="optimizer", default=0.0),
    Row("adam_beta1", "float", "renamed", "the first of betas", to="train.optimizer.betas", topic="optimizer",
        default=0.9),
    Row("adam_beta2", "float", "renamed", "the second of betas", to="train.optimizer.betas", topic="optimizer",
        default=0.999),
    Row("adam_epsilon", "float", "renamed", "added to the root of the second moment", to="train.optimizer.eps",
        topic="optimizer", default=1e-8),
    Row("lr_scheduler_type", "text", "computed", "constant, linear and cosine, with a warm-up",
        to="train.schedule.name", topic="schedule", default="linear"),
    Row("lr_scheduler_kwargs*", "any", "impossible", "only min_lr_rate of cosine_with_min_lr has a counterpart",
        topic="schedule", harmless=({},)),
    Row("warmup_steps", "float", "lossy",
        "the Trainer's step s of w takes (s - 1)/w of the rate, so its first step is lost; samestep's takes s/w",
        to="train.schedule.warmup_steps", topic="schedule", default=0, harmless=(0,)),
    Row("warmup_ratio", "float", "lossy", "a share of the steps, rounded up; the Trainer's step s takes (s - 1)/w",
        to="train.schedule.warmup_steps", topic="schedule", deprecated="warmup_steps", harmless=(0,)),
]  # fmt: skip

_ENGINES = [
    Row("bf16", "bool", "computed", "bf16 compute with fp32 masters is the regime mixed", to="precision.regime",
        topic="precision", default=False),
    Row("fp16", "bool", "computed", "fp16 compute with fp32 masters is the regime mixed",
        to="precision.regime precision.low_dtype", topic="precision", default=False),
    Row("fp16_opt_level", "text", "not-needed", "read by apex only", topic="precision"),
    Row("fsdp", "any", "computed", "FSDP; fsdp_config says how", to="engine.name", topic="sharding"),
    Row("deepspeed", "any", "computed", "its fields stand below, each by itself", topic="sharding"),
    Row("fsdp_config", "any", "computed", "its fields stand below, each by itself", topic="sharding"),
]  # fmt: skip

_RUN = [
    Row("save_strategy", "text", "computed", "no, or every save_steps; samestep counts steps", to="checkpoint.every",
        topic="checkpointing", default="steps"),
    Row("save_steps", "int", "renamed", "steps between checkpoints", to="checkpoint.every", topic="checkpointing",
        default=500),
    Row("save_total_limit", "int", "renamed", "checkpoints kept", to="checkpoint.keep", topic="checkpointing"),
    Row("eval_strategy", "text", "lossy", "evaluation needs held-out rows: give data.held_out",
        to="train.evaluate_every", harmless=("no",), default="no"),
    Row("evaluation_strategy", "text", "lossy", "evaluation needs held-out rows: give data.held_out",
        deprecated="eval_strategy", harmless=("no",)),
    Row("eval_steps", "int", "lossy", "evaluation needs held-out rows: give data.held_out",
        to="train.evaluate_every"),
    Row("logging_steps", "int", "renamed", "steps between lines of the log", to="log.every", default=500),
    Row("report_to", "texts", "computed", "tensorboard and trackio", to="log.trackers"),
    *(Row(name, "any", "not-needed", _OWN) for name in _OUT),
]  # fmt: skip

TRANSFORMERS = Table("the Trainer", [*_TRAINING, *_OPTIMIZER, *_ENGINES, *_RUN])

TRAINER_NAMES = {"cpu_offload": "offload_params"}
"""The Trainer's names of fields of FSDP, where they are others than Accelerate's."""
# Fields of Accelerate's that the Trainer does not hand on from its fsdp_config.
_UNREAD = {
    "offload_params": "cpu_offload is its name there",
    "sharding_strategy": "reshard_after_forward decides under FSDP2, and FSDP1 runs FULL_SHARD",
    "activation_checkpointing_offload": "Accelerate's default stays",
    "ignored_modules": "no module is ignored",
    "mixed_precision_policy": "bf16 and fp16 decide",
}


def _trainer_rows() -> Iterator[Row]:
    theirs = {path: name for name, path in TRAINER_NAMES.items()}
    for row in ACCELERATE:
        section, _, bare = row.path.partition(".fsdp_")
        if section != "fsdp_config" or not bare:
            continue
        if bare in _UNREAD:
            yield replace(row, path=f"fsdp_config.{bare}", ignored=f"the Trainer does not read it: {_UNREAD[bare]}")
        if bare not in _UNREAD or bare in theirs:
            yield replace(row, path=f"fsdp_config.{theirs.get(bare, bare)}")


TRAINER_FSDP = Table("the Trainer", _trainer_rows())
"""What the Trainer reads of its fsdp_config."""
