"""Checkpoints that other tools make on real ranks, and what their live tensors were.

Each job trains a tiny model for a few steps with the tool itself, has the tool save it, and returns the live weights
and moments, by name, as the tool's own way of reading them gives them.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.small_runs import make_model

STEPS = 3


def batch(step: int, rank: int) -> torch.Tensor:
    """Token ids [2, 8], others on every rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(2, 17, (2, 8), generator=generator)


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Norms first: not the order of the model."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in named if "norm" in name], "weight_decay": 0.0},
        {"params": [p for name, p in named if "norm" not in name], "weight_decay": 0.1},
    ]


def freeze(model: torch.nn.Module, part: str | None) -> None:
    for name, parameter in model.named_parameters():
        if part is not None and part in name:
            parameter.requires_grad_(False)


def live_value(engine: Any, parameter: Any, key: str | None) -> torch.Tensor:
    """A parameter's master, or with a key its moment, from the tensors that DeepSpeed computes with."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() == 3:
        found = safe_get_full_optimizer_state(parameter, key) if key else safe_get_full_fp32_param(parameter)
        assert found is not None
        return found.clone()
    linked = parameter._hp_mapping  # of other things than stage 1's moments; but where in the partition is always right
    whole = torch.zeros(parameter.numel())
    if linked is not None:
        flat = next(p for p in partitions(engine) if storage(p) == storage(linked.hp_fragment))
        part = engine.optimizer.optimizer.state[flat][key] if key else flat
        at, into = linked.hp_fragment_address, linked.lp_fragment_address
        whole[into.start : into.start + into.numel] = part.detach().view(-1)[at.start : at.start + at.numel]
    dist.all_reduce(whole)
    return whole.view(parameter.shape)


def partitions(engine: Any) -> list[torch.Tensor]:
    return [group["params"][0] for group in engine.optimizer.optimizer.param_groups]


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def deepspeed(
    stage: int, out: str, *, frozen: str | None = None, dtype: str = "bf16", **zero: Any
) -> dict[str, torch.Tensor] | None:
    """DeepSpeed's save_checkpoint into `out`, after STEPS steps. The live values by our names, of rank 0."""
    from samestep.engines.deepspeed import import_deepspeed

    library = import_deepspeed(torch.device("cpu"))
    model = make_model()
    freeze(model, frozen)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**6, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if stage == 3:
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 1}
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    elif dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 4}
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2)
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config)
        for step in range(STEPS):
            ids = batch(step, dist.get_rank())
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        live = live_values(engine, model)
        engine.save_checkpoint(out, client_state={"note": "of mine"})
        engine.destroy()
    return live if dist.get_rank() == 0 else None


def plain_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0) -> None:
    """A torch script's training loop."""
    for step in range(STEPS):
        ids = batch(step, rank)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def live_torch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and moments of a plain model and its torch optimizer."""
    live = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            live[f"model.{name}"] = parameter.detach().clone()
            for key in ("exp_avg", "exp_avg_sq"):
                live[f"optim.state.{name}.{key}"] = optimizer.state[parameter][key].clone()
    return live


def live_fsdp1(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and moments out of the ranks' own tensors: ranges of every flattened parameter, in the ranks' order.

    Not through FSDP's own full optimizer state dict: on the CPU it gives exp_avg_sq under both names.
    """
    mine = {}
    for name, parameter in model.named_parameters():
        clean = name.replace("_fsdp_wrapped_module.", "")
        mine[f"model.{clean}"] = parameter.detach().flatten().clone()
        for key in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state.get(parameter, {})
            mine[f"optim.state.{clean}.{key}"] = state[key].flatten().clone() if key in state else torch.empty(0)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    shapes = {name: p.shape for name, p in make_model().named_parameters()}
    live = {}
    for name in mine:
        parameter = name.removeprefix("model.")
        if name.startswith("optim.state."):
            parameter = name.removeprefix("optim.state.").rpartition(".")[0]
        live[name] = torch.cat([part[name] for part in everyone]).view(shapes[parameter])
    return live


def fsdp1(out: str, *, sharded: bool, original: bool = True) -> dict[str, torch.Tensor] | None:
    """torch's first FSDP: one torch.save file of its full state dicts, or its sharded ones through DCP.

    Live values with `original` parameters only; flat ones have the same numbers.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model = FSDP(
        make_model(),
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        use_orig_params=original,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain_steps(model, optimizer, dist.get_rank())
    live = live_fsdp1(model, optimizer) if original else {}
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT if sharded else StateDictType.FULL_STATE_DICT):
        content: dict[str, Any] = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    if sharded:
        dcp.save(content, checkpoint_id=out)
    elif dist.get_rank() == 0:
        torch.save({**content, "epoch": 1}, out)
    dist.barrier()
    return live if dist.get_rank() == 0 else None


def accelerate_fsdp(out: str, *, version: int, sharded: bool) -> dict[str, torch.Tensor] | None:
    """What accelerate's save_state writes with its FSDP plugin, by its own functions: Accelerator itself has no FSDP on
    the CPU."""
    from accelerate.state import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model: Any = make_model()
    if version == 1:
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2)
    plain_steps(model, optimizer, dist.get_rank())
    live = live_fsdp1(model, optimizer) if version == 1 else live_fsdp2(model, optimizer)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, state_dict_type="SHARDED_STATE_DICT" if sharded else "FULL_STATE_DICT"
    )
    accelerator: Any = SimpleNamespace(process_index=dist.get_rank(), num_processes=dist.get_world_size())
    PartialState()  # accelerate's logger wants it
    try:
        save_fsdp_model(plugin, accelerator, model, out)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, out)
    finally:
        PartialState._reset_state()
    dist.barrier()
    return live if dist.get_rank() == 0 else None


def live_fsdp2(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and moments, each gathered by itself."""
    return {name: tensor.full_tensor() for name, tensor in live_torch(model, optimizer).items()}  # type: ignore[operator]


def to_universal(folder: str, out: str) -> None:
    """DeepSpeed's own conversion of its checkpoint, in this process."""

    from deepspeed.checkpoint import ds_to_universal

    arguments = SimpleNamespace(
        input_folder=folder,
        output_folder=out,
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        ds_to_universal.main(arguments)


def load_universal(folder: str, stage: int, recipe: str, index: int) -> dict[str, Any]:
    """A universal checkpoint in a fresh DeepSpeed engine: its live values, the loss of the run's step `index` (this
    rank's sum over label tokens), and the live masters after that step."""
    from samestep import models
    from samestep.data import prepare
    from samestep.engines.deepspeed import import_deepspeed
    from samestep.recipe import load
    from samestep.training import setup

    library = import_deepspeed(torch.device("cpu"))
    checked = load(Path(recipe))
    tokenizer = models.load_tokenizer(checked.model)
    given = setup.training_loader(prepare(checked.data, tokenizer, seed=0), checked, tokenizer).step(index)
    rows = given.batch(0, dist.get_rank())
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**6, "stage3_param_persistence_threshold": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "checkpoint": {"load_universal": True},
    }
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if "norm" not in name]
    others = [p for name, p in named if "norm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = library.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1.0), config=config)
        engine.load_checkpoint(folder)
        inputs = models.Inputs(input_ids=rows.input_ids, labels=rows.labels, position_ids=None, document_ids=None)
        before = live_values(engine, model)
        loss, _ = models.loss_sum(engine, inputs, attention="sdpa")
        engine.backward(loss * dist.get_world_size() / given.label_tokens)
        engine.step()
        after = live_values(engine, model)
        engine.destroy()
    return {
        "before": before,
        "after": after,
        "loss": loss.item(),
        "label_tokens": given.label_tokens,
        "steps": engine.global_steps,
    }


def live_values(engine: Any, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    live = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            live[f"model.{name}"] = live_value(engine, parameter, None)
            for key in ("exp_avg", "exp_avg_sq"):
                live[f"optim.state.{name}.{key}"] = live_value(engine, parameter, key)
    return live
