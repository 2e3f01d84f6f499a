"""A configuration in its own tool: DeepSpeed by itself, or as Accelerate sets it up."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F

from samestep import optim
from samestep.crosscheck.side import STEPS, Observed, Order
from samestep.data import Loader
from samestep.dtypes import dtype_name
from samestep.engines import loading
from samestep.recipe.schema import Recipe
from samestep.training.steps import on_device
from samestep.world import World, gather_numbers


def run_deepspeed(order: Order, recipe: Recipe, here: World, loader: Loader) -> Observed:
    """Takes the steps as a plain script would: loss, backward, step, and nothing of samestep in between."""
    model = loading.load_model(recipe, here)
    engine = _engine(order, recipe, model)
    reduced = _watch_communication(engine)
    rates, losses = [], []
    for index in range(STEPS):
        data = loader.step(index)
        sums = []
        for micro in range(data.micro_steps):
            inputs = on_device(data.batch(micro, here.rank), here.device)
            logits = engine(input_ids=inputs.input_ids, use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), inputs.labels.flatten(), ignore_index=-100)
            sums.append(float(loss.detach()))
            engine.backward(loss)
            if micro == data.micro_steps - 1:
                rates.append(float(engine.optimizer.param_groups[0]["lr"]))
            engine.step()
        rows = gather_numbers(sums, here)
        losses.append(sum(value for row in rows for value in row) / sum(map(len, rows)))
    return _observed(engine, rates, losses, reduced)


def _engine(order: Order, recipe: Recipe, model: torch.nn.Module) -> Any:
    import deepspeed

    # Compiled at start otherwise, which takes minutes and leaves a lock behind when it is ended.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # type: ignore[attr-defined]
    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = None
    if "optimizer" not in order.config:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        own = optim.factory(recipe.train.optimizer, rounding="nearest", seed=recipe.train.seed)(named)
    if order.tool == "accelerate":
        return _by_accelerate(order.config, model, own)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=own,
        model_parameters=trainable,  # type: ignore[arg-type]
        config=order.config,
    )
    return engine


def _by_accelerate(config: dict[str, Any], model: torch.nn.Module, own: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim

    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    optimizer = own if own is not None else DummyOptim(model.parameters())
    prepared = accelerator.prepare(model, optimizer)
    return prepared[0]


def _watch_communication(engine: Any) -> set[torch.dtype]:
    """Collects the dtypes in which gradients cross the ranks from now on."""
    import deepspeed.comm.comm as comm

    seen: set[torch.dtype] = set()
    backend = comm.cdb
    for name in ("all_reduce", "reduce_scatter_tensor", "reduce"):
        inner = getattr(backend, name, None)
        if inner is None:
            continue

        def watched(*given: Any, _inner: Any = inner, **options: Any) -> Any:
            # Norms and flags are single numbers; a gradient of this model never is.
            tensors = [value for value in (*given, *options.values()) if torch.is_tensor(value)]
            seen.update(tensor.dtype for tensor in tensors if tensor.numel() > 1 and tensor.is_floating_point())
            return _inner(*given, **options)

        setattr(backend, name, watched)
    return seen


def _observed(engine: Any, rates: list[float], losses: list[float], reduced: set[torch.dtype]) -> Observed:
    zero = engine.optimizer
    inner = getattr(zero, "optimizer", zero)
    masters = {p.dtype for group in inner.param_groups for p in group["params"]}
    moments = {
        value.dtype
        for state in inner.state.values()
        for key, value in state.items()
        if torch.is_tensor(value) and value.numel() > 1 and key != "step"
    }
    clip = float(engine.gradient_clipping())
    return Observed(
        master=_only(masters),
        moments=_only(moments),
        compute=_only({p.dtype for p in engine.module.parameters()}),
        reduce=_only(reduced),
        gradient=dtype_name(engine.get_data_types()[1]),
        clip=clip or None,
        accumulation=int(engine.gradient_accumulation_steps()),
        rates=rates,
        losses=losses,
        updates=STEPS - int(getattr(engine, "skipped_steps", 0)),
    )


def _only(dtypes: set[torch.dtype]) -> str | None:
    return dtype_name(next(iter(dtypes))) if len(dtypes) == 1 else None
