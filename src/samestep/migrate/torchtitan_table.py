"""The fields of a torchtitan configuration, in the sections that a training run needs."""

from __future__ import annotations

from samestep.migrate.rows import Row, Table

_OWN = "torchtitan's own; it does not change the training"
_T, _P, _C, _O, _L = "training.", "parallelism.", "checkpoint.", "optimizer.", "lr_scheduler."

_TRAINING = [
    Row(_T + "local_batch_size", "int", "renamed", "rows per rank and micro-batch", to="train.micro_batch",
        topic="accumulation", default=8),
    Row(_T + "batch_size", "int", "renamed", "rows per rank and micro-batch", to="train.micro_batch",
        topic="accumulation", deprecated="local_batch_size"),
    Row(_T + "global_batch_size", "int", "computed", "rows of one step on all ranks; -1: one micro-batch a step",
        to="train.accumulation", topic="accumulation", default=-1),
    Row(_T + "seq_len", "int", "renamed", "tokens of a packed row; samestep keeps its examples apart",
        to="data.max_tokens data.packing", default=2048),
    Row(_T + "max_norm", "float", "renamed", "the largest gradient norm", to="train.max_grad_norm", topic="clipping",
        default=1.0),
    Row(_T + "steps", "int", "kept", "optimizer steps", to="train.steps", topic="schedule", default=10000),
    Row(_T + "enable_cpu_offload", "bool", "computed", "parameters, gradients and optimizer are on the CPU",
        to="engine.offload", topic="offload", default=False),
    Row(_T + "dtype", "text", "computed", "dtype of the masters; bfloat16 is the regime low", to="precision.regime",
        topic="precision", default="float32", choices=("float32", "bfloat16")),
    Row(_T + "mixed_precision_param", "text", "computed", "bfloat16 compute with fp32 masters is the regime mixed",
        to="precision.regime", topic="precision", default="bfloat16", choices=("bfloat16", "float32")),
    Row(_T + "mixed_precision_reduce", "text", "computed", "gradients cross the ranks in this dtype",
        to="precision.overrides.reduce", topic="precision", default="float32", choices=("float32", "bfloat16")),
    Row(_T + "dataset", "text", "lossy", "a data set that torchtitan knows by name: give data.path"),
    Row(_T + "dataset_path", "text", "renamed", "the data: a text column in files that samestep reads",
        to="data.path data.format"),
    Row(_T + "seed", "int", "kept", "the same seed, but not the same random numbers", to="train.seed"),
    Row(_T + "deterministic", "bool", "not-needed", "samestep's CPU runs always are"),
    Row(_T + "compile", "bool", "lossy", "torch.compile changes last bits; samestep does not compile",
        harmless=(False,)),
    *(Row(_T + name, "any", "not-needed", _OWN) for name in ("gc_freq", "gc_debug", "debug_moe_force_load_balance")),
]  # fmt: skip

_PARALLELISM = [
    Row(_P + "data_parallel_replicate_degree", "int", "computed", "groups that hold the same shards",
        to="engine.name engine.shard_ranks", topic="sharding", default=1),
    Row(_P + "data_parallel_shard_degree", "int", "computed", "ranks in one sharding group; -1: all that are left",
        to="engine.name engine.shard_ranks", topic="sharding", default=-1),
    Row(_P + "fsdp_reshard_after_forward", "text", "computed",
        "never keeps parameters gathered; default and always free them", to="engine.reshard_after_forward",
        topic="sharding", default="default", choices=("default", "always", "never")),
    *(Row(f"{_P}{name}_degree", "int", "impossible", f"{what} parallelism has no counterpart", harmless=(1,),
          topic="sharding", default=1)
      for name, what in (("tensor_parallel", "tensor"), ("pipeline_parallel", "pipeline"),
                         ("context_parallel", "context"), ("expert_parallel", "expert"),
                         ("expert_tensor_parallel", "expert tensor"))),
    *(Row(_P + name, "any", "not-needed", "goes with a degree above 1")
      for name in ("disable_loss_parallel", "enable_async_tensor_parallel", "pipeline_parallel_split_points",
                   "pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule",
                   "pipeline_parallel_schedule_csv", "pipeline_parallel_microbatch_size",
                   "context_parallel_rotate_method", "enable_compiled_autograd",
                   "module_fqns_per_model_part", "pipeline_parallel_first_stage_less_layers",
                   "pipeline_parallel_last_stage_less_layers")),
]  # fmt: skip

_CHECKPOINT = [
    *(Row(_C + name, "bool", "computed", "checkpoints every interval steps", to="checkpoint.every",
          topic="checkpointing", default=False, deprecated=new)
      for name, new in (("enable", ""), ("enable_checkpoint", "enable"))),
    Row(_C + "interval", "int", "renamed", "steps between checkpoints", to="checkpoint.every", topic="checkpointing",
        default=500),
    Row(_C + "keep_latest_k", "int", "renamed", "checkpoints kept; 0, all of them, has no counterpart",
        to="checkpoint.keep", topic="checkpointing", default=10),
    Row(_C + "async_mode", "text", "computed", "disabled, or written while the training goes on",
        to="checkpoint.asynchronous", topic="checkpointing", default="disabled",
        choices=("disabled", "async", "async_with_pinned_mem")),
    Row(_C + "export_dtype", "text", "renamed", "dtype of the exported weights", to="precision.export_dtype",
        topic="checkpointing", default="float32", choices=("float16", "bfloat16", "float32")),
    *(Row(_C + name, "any", "lossy", "give model.path, or resume a samestep run", topic="loading",
          harmless=(None, "", False))
      for name in ("initial_load_path", "initial_load_in_hf")),
    *(Row(_C + name, "any", "not-needed", "samestep's checkpoints are whole; transformers loads its exports",
          topic="checkpointing")
      for name in ("folder", "initial_load_model_only", "last_save_model_only", "last_save_in_hf", "load_step",
                   "load_only", "exclude_from_loading", "enable_first_step_checkpoint", "create_seed_checkpoint",
                   "initial_load_in_hf_quantized")),
]  # fmt: skip

_OPTIMIZER = [
    Row(_O + "name", "text", "computed", "AdamW is adamw", to="train.optimizer.name", topic="optimizer",
        default="AdamW"),
    Row(_O + "lr", "float", "kept", "the learning rate at factor 1", to="train.optimizer.lr", topic="optimizer",
        default=8e-4),
    Row(_O + "beta1", "float", "renamed", "the first of betas", to="train.optimizer.betas", topic="optimizer",
        default=0.9),
    Row(_O + "beta2", "float", "renamed", "the second of betas", to="train.optimizer.betas", topic="optimizer",
        default=0.95),
    Row(_O + "eps", "float", "kept", "added to the root of the second moment", to="train.optimizer.eps",
        topic="optimizer", default=1e-8),
    Row(_O + "weight_decay", "float", "kept", "decay of all parameters, as one group",
        to="train.optimizer.weight_decay train.optimizer.no_decay", topic="optimizer", default=0.1),
    Row(_O + "implementation", "text", "not-needed", "fused kernels differ in last bits", topic="optimizer"),
    Row(_O + "early_step_in_backward", "bool", "impossible", "updates before the norm is known", harmless=(False,),
        topic="optimizer"),
    Row(_L + "warmup_steps", "int", "kept", "step s of w takes s/w of the rate, in both",
        to="train.schedule.warmup_steps", topic="schedule", default=200),
    Row(_L + "decay_type", "text", "renamed", "linear and cosine after the warm-up", to="train.schedule.name",
        topic="schedule", default="linear", choices=("linear", "sqrt", "cosine")),
    Row(_L + "decay_ratio", "float", "impossible", "samestep decays from the end of the warm-up on",
        topic="schedule"),
    Row(_L + "min_lr_factor", "float", "renamed", "the share of the rate that the schedule ends at",
        to="train.schedule.final_factor", topic="schedule", default=0.0),
    Row(_L + "lr_min", "float", "renamed", "the share of the rate that the schedule ends at",
        to="train.schedule.final_factor", topic="schedule", deprecated="min_lr_factor"),
]  # fmt: skip

_OTHER = [
    *(Row(f"model.{name}", "any", "lossy", "a model that torchtitan knows by name: give model.path")
      for name in ("name", "flavor", "hf_assets_path", "tokenizer_path")),
    Row("model.converters", "texts", "computed", "float8 is the regime mixed-fp8", to="precision.regime",
        topic="precision", harmless=([], "")),
    Row("model.print_after_conversion", "bool", "not-needed", _OWN),
    Row("float8.recipe_name", "text", "renamed", "how many values share one scale", to="precision.fp8.scaling",
        topic="precision", choices=("tensorwise", "rowwise", "rowwise_with_gw_hp")),
    Row("float8.filter_fqns", "texts", "computed", "parts of names of layers that stay in bfloat16",
        to="precision.fp8.skip", topic="precision"),
    Row("float8.emulate", "bool", "kept", "multiply in fp32 what was rounded to float8", to="precision.fp8.emulate",
        topic="precision"),
    Row("float8.enable_fsdp_float8_all_gather", "bool", "lossy", "samestep gathers in bfloat16", topic="precision",
        harmless=(False,)),
    Row("float8.moe_fqns*", "any", "impossible", "samestep has no float8 experts", topic="precision",
        harmless=([], "")),
    Row("float8.*", "any", "not-needed", "speed only", topic="precision"),
    Row("quantize.*", "any", "impossible", "give precision.regime: mixed-fp8", topic="precision"),
    Row("mx.*", "any", "not-needed", "read with the mx converter only", topic="precision"),
    Row("activation_checkpoint.mode", "text", "computed",
        "full and selective recompute whole units in samestep; none does not", to="train.activation_checkpointing",
        topic="activations", default="selective"),
    Row("activation_checkpoint.*", "any", "not-needed", "memory and speed only", topic="activations"),
    Row("compile.enable", "bool", "lossy", "torch.compile changes last bits; samestep does not compile",
        harmless=(False,)),
    Row("compile.*", "any", "not-needed", "goes with compile.enable"),
    Row("metrics.log_freq", "int", "renamed", "steps between lines of the log", to="log.every", default=10),
    Row("metrics.enable_tensorboard", "bool", "computed", "the tracker tensorboard", to="log.trackers"),
    Row("metrics.enable_wandb", "bool", "lossy", "samestep has tensorboard and trackio", harmless=(False,)),
    Row("comm.train_timeout_seconds", "int", "renamed", "seconds", to="engine.timeout_seconds", default=100),
    Row("validation.*", "any", "lossy", "give data.held_out and train.evaluate_every", harmless=(False,)),
    Row("fault_tolerance.enable", "bool", "impossible", "samestep has no torchft", harmless=(False,)),
    *(Row(f"{name}.*", "any", "not-needed", _OWN)
      for name in ("job", "profiling", "metrics", "comm", "memory_estimation", "fault_tolerance", "experimental",
                   "debug")),
]  # fmt: skip

TORCHTITAN = Table("torchtitan", [*_TRAINING, *_PARALLELISM, *_CHECKPOINT, *_OPTIMIZER, *_OTHER])
