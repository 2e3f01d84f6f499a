"""The fields of an Accelerate configuration (1.15), as `accelerate launch --config_file` reads it."""

from __future__ import annotations

from samestep.migrate.rows import Row, Table

_F = "fsdp_config.fsdp_"
_D = "deepspeed_config."
_P = "parallelism_config.parallelism_config_"
_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA",
          "MULTI_HPU", "MULTI_NEURON", "FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TPU")  # fmt: skip
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "1", "2", "3", "4", "5")

_TOP = [
    Row("distributed_type", "text", "computed",
        "FSDP is fsdp or hsdp, DEEPSPEED the stage's engine, MULTI_* ddp, NO single", to="engine.name",
        topic="sharding", choices=_KINDS),
    Row("mixed_precision", "text", "computed",
        "bf16 and fp16 are the regime mixed; no trains in the dtype that the script loads the model in",
        to="precision.regime precision.low_dtype", topic="precision", default="no",
        choices=("no", "fp16", "bf16", "fp8")),
    Row("fp16", "bool", "computed", "the old spelling of mixed_precision: fp16", to="precision.regime",
        topic="precision", deprecated="mixed_precision: fp16"),
    Row("num_processes", "int", "renamed", "processes, one per device", to="engine.ranks", topic="sharding"),
    Row("compute_environment", "text", "not-needed", "samestep starts its own ranks", family="launcher",
        choices=("LOCAL_MACHINE", "AMAZON_SAGEMAKER"), default="LOCAL_MACHINE"),
    Row("num_machines", "int", "not-needed", "where and how ranks start is given to torchrun, not to a recipe",
        family="launcher", default=1),
    *(Row(name, "any", "not-needed", "where and how ranks start is given to torchrun, not to a recipe",
          family="launcher")
      for name in ("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend",
                   "same_network", "gpu_ids", "use_cpu", "main_training_function", "enable_cpu_affinity", "debug",
                   "mpirun_config.*")),
    Row("downcast_bf16", "any", "not-needed", "read on TPUs only"),
    *(Row(name, "any", "not-needed", "read on TPUs only")
      for name in ("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm",
                   "tpu_env")),
    Row("ipex_config*", "any", "not-needed", "Accelerate 1.15 no longer knows it", ignored="Accelerate 1.15 refuses "
        "this key; remove it"),
    Row("dynamo_backend", "text", "lossy", "torch.compile changes last bits; samestep does not compile",
        harmless=("no", "NO"), deprecated="dynamo_config.dynamo_backend"),
    Row("dynamo_config.dynamo_backend", "text", "lossy", "torch.compile changes last bits; samestep does not compile",
        harmless=("no", "NO"), family="launcher", default="no"),
    Row("dynamo_config.*", "any", "not-needed", "goes with dynamo_backend", family="launcher"),
    Row("megatron_lm_config.*", "any", "impossible", "Megatron-LM has no counterpart", topic="sharding"),
]  # fmt: skip

_FSDP = [
    Row(_F + "version", "int", "computed",
        "samestep's fsdp is FSDP2; FSDP1 with autocast keeps some operations in fp32, and its buffers are bf16",
        to="engine.name", topic="sharding", default=1),
    Row(_F + "sharding_strategy", "text", "computed",
        "FSDP1: FULL_SHARD and SHARD_GRAD_OP are fsdp with and without resharding, NO_SHARD is ddp, HYBRID_* are hsdp",
        to="engine.name engine.reshard_after_forward", topic="sharding", default="FULL_SHARD", choices=_STRATEGIES),
    Row(_F + "reshard_after_forward", "any", "kept", "FSDP2: whether parameters are freed after the forward pass",
        to="engine.reshard_after_forward", topic="sharding", default=True),
    Row(_F + "offload_params", "bool", "computed", "parameters, gradients and optimizer are on the CPU",
        to="engine.offload", topic="offload", default=False),
    Row(_F + "auto_wrap_policy", "text", "lossy",
        "samestep's units are classes; other units change memory and speed, not numbers", topic="wrapping",
        harmless=("TRANSFORMER_BASED_WRAP",), family="fsdp", default="NO_WRAP",
        choices=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")),
    Row(_F + "transformer_layer_cls_to_wrap", "texts", "renamed", "module classes that form one shard unit each",
        to="engine.unit_classes", topic="wrapping"),
    Row(_F + "min_num_params", "int", "lossy", "goes with SIZE_BASED_WRAP; changes memory and speed, not numbers",
        topic="wrapping", harmless=(0,), family="fsdp", default=0),
    Row(_F + "backward_prefetch", "text", "not-needed", "speed only; FSDP2 has its own order", topic="prefetch",
        choices=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "1", "2")),
    Row(_F + "forward_prefetch", "bool", "not-needed", "speed only; FSDP2 ignores it", topic="prefetch",
        default=False),
    Row(_F + "state_dict_type", "text", "not-needed",
        "samestep's checkpoints are sharded and load on any engine; exports are whole", topic="checkpointing",
        family="fsdp", choices=("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT", "1", "2", "3")),
    Row(_F + "use_orig_params", "bool", "not-needed", "FSDP2 always does", topic="sharding"),
    Row(_F + "sync_module_states", "bool", "not-needed", "samestep loads on one rank and sends the weights",
        topic="loading"),
    Row(_F + "cpu_ram_efficient_loading", "bool", "not-needed", "samestep loads on one rank and sends the weights",
        topic="loading", family="fsdp"),
    Row(_F + "activation_checkpointing", "bool", "renamed", "recompute activations; does not change numbers",
        to="train.activation_checkpointing", topic="activations", default=False),
    Row(_F + "activation_checkpointing_offload", "bool", "lossy", "activations stay on the device; memory only",
        topic="activations", harmless=(False,), family="fsdp", default=False),
    Row(_F + "ignored_modules", "any", "computed", "a regular expression over module names, as glob patterns",
        to="engine.ignored_modules", topic="wrapping"),
    Row(_F + "mixed_precision_policy", "any", "impossible", "Python only; the launcher does not read it",
        topic="precision"),
    Row(_F + "limit_all_gathers", "bool", "not-needed", "speed and memory only", topic="prefetch"),
    Row(_F + "xla*", "any", "impossible", "XLA has no counterpart", harmless=(False,)),
]  # fmt: skip

_DEEPSPEED = [
    Row(_D + "deepspeed_config_file", "any", "computed", "its fields stand below, each by itself"),
    Row(_D + "zero_stage", "int", "computed", "stage 1, 2, 3 is engine zero1, zero2, zero3; 0 is ddp",
        to="engine.name", topic="sharding", default=2),
    Row(_D + "gradient_accumulation_steps", "int", "renamed", "micro-batches per rank and step",
        to="train.accumulation", topic="accumulation", default="auto"),
    Row(_D + "gradient_clipping", "float", "computed", "the largest gradient norm; left out or auto, 1.0",
        to="train.max_grad_norm", topic="clipping", default="auto"),
    Row(_D + "offload_optimizer_device", "text", "computed", "where masters and moments live", to="engine.offload",
        topic="offload", default="none", choices=("none", "cpu", "nvme")),
    Row(_D + "offload_param_device", "text", "computed", "where parameters live (stage 3)", to="engine.offload",
        topic="offload", default="none", choices=("none", "cpu", "nvme")),
    *(Row(f"{_D}offload_{part}_nvme_path", "text", "not-needed", "the launcher does not pass it on", topic="offload",
          ignored="the launcher never passes this path on; put it into a DeepSpeed JSON")
      for part in ("optimizer", "param")),
    Row(_D + "zero3_init_flag", "bool", "not-needed", "samestep loads on one rank and sends the weights",
        topic="loading"),
    Row(_D + "zero3_save_16bit_model", "bool", "computed", "true: the export is in the low dtype",
        to="precision.export_dtype", topic="checkpointing", default=False),
    Row(_D + "deepspeed_moe_layer_cls_names", "any", "lossy", "gathers whole modules; samestep goes module by module",
        topic="wrapping"),
    *(Row(_D + name, "any", "not-needed", "where and how ranks start is given to torchrun, not to a recipe")
      for name in ("deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter",
                   "deepspeed_inclusion_filter")),
]  # fmt: skip

_OTHER = [
    Row(_P + "dp_replicate_size", "int", "computed", "groups of hsdp that hold the same shards",
        to="engine.name engine.shard_ranks", topic="sharding", default=1),
    Row(_P + "dp_shard_size", "int", "computed", "ranks in one sharding group", to="engine.shard_ranks",
        topic="sharding", default=1),
    *(Row(f"{_P}{name}_size", "int", "impossible", f"{what} parallelism has no counterpart", harmless=(1,),
          topic="sharding", default=1)
      for name, what in (("tp", "tensor"), ("cp", "context"), ("sp", "sequence"))),
    *(Row(f"{_P}{name}_*", "any", "not-needed", f"goes with {name}_size") for name in ("tp", "cp", "sp")),
    Row("fp8_config.backend", "text", "impossible", "samestep's float8 is torchao's (AO)", topic="precision",
        harmless=("AO", "ao"), default="AO"),
    *(Row(f"fp8_config.{name}", "any", "not-needed", "nothing reads it", topic="precision",
          ignored=f"nothing reads this key; it is called {other}")
      for name, other in (("amax_history_length", "amax_history_len"), ("amax_compute_algorithm", "amax_compute_algo"),
                          ("optimization_level", "opt_level"))),
    Row("fp8_config.enable_fsdp_float8_all_gather", "bool", "lossy", "samestep gathers in bfloat16",
        topic="precision", harmless=(False,), default=True),
    *(Row(f"fp8_config.{name}", "any", "not-needed", "read by another float8 backend", topic="precision")
      for name in ("use_autocast_during_eval", "margin", "interval", "fp8_format", "amax_history_len",
                   "amax_compute_algo", "override_linear_precision", "opt_level", "pad_inner_dim")),
]  # fmt: skip

ACCELERATE = Table("Accelerate", [*_TOP, *_FSDP, *_DEEPSPEED, *_OTHER])

OLD_NAMES = {
    "fsdp_config.fsdp_backward_prefetch_policy": "fsdp_config.fsdp_backward_prefetch",
    "fsdp_config.fsdp_cpu_offload": "fsdp_config.fsdp_offload_params",
}
"""Names of older versions, and what they are called now."""


def current_name(path: str) -> str:
    """`path` under its present name: with the prefix that a section's keys may go without."""
    section, dot, key = path.partition(".")
    prefix = {"fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_"}.get(section, "")
    if dot and prefix and not key.startswith(prefix):
        path = f"{section}.{prefix}{key}"
    return OLD_NAMES.get(path, path)
