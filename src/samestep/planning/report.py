"""The plan of a run as data: `samestep plan --json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import nn

from samestep import memory, models, weight_files
from samestep.data import prepare
from samestep.dtypes import dtype_name
from samestep.engines.build import resolve_plan
from samestep.errors import ModelError
from samestep.memory import Estimate
from samestep.optim import lr_at
from samestep.planning.samples import sample
from samestep.precision import float8
from samestep.precision import forecast as forecasts
from samestep.precision import plan as precision_plan
from samestep.precision.forecast import Rounding, Shares
from samestep.precision.plan import Plan
from samestep.recipe.schema import Recipe
from samestep.training import setup


def plan(recipe: Recipe, *, device_memory: int | None = None) -> dict[str, Any]:
    """Roles, parameters, memory of every engine and regime, and the forecast of vanishing updates.

    Reads the model's config and samples of its weights; the data only when the run's length is given in epochs.
    `device_memory` is in bytes. Raises SamestepError.
    """
    model = models.load_meta_model(recipe.model)
    _refuse_quantised(model, recipe)
    models.unit_modules(model, recipe.engine.unit_classes)
    resolved = resolve_plan(recipe, model)
    if resolved.regime == "mixed-fp8":
        float8.check(recipe.precision.fp8, resolved.float8)
    steps = _steps(recipe)
    return {
        "name": recipe.name,
        "engine": recipe.engine.name,
        "regime": recipe.precision.regime,
        "ranks": recipe.engine.ranks,
        "steps": steps,
        "device_memory_bytes": device_memory,
        "roles": {
            role: {"dtype": ", ".join(map(dtype_name, entry.dtypes)) or None, "reason": entry.reason}
            for role, entry in resolved.roles.items()
        },
        "parameters": _parameters(resolved),
        "float8": precision_plan.described(resolved)["float8"],
        "memory": _memory(memory.table(recipe, model), device_memory),
        "forecast": _forecast(recipe, model, resolved, steps),
    }


def _refuse_quantised(model: nn.Module, recipe: Recipe) -> None:
    """A model on the meta device has the weights that its config describes before they are quantised."""
    if recipe.model.path is None:
        return
    method = getattr(models.config_of(model), "quantization_config", None)
    if method is not None:
        name = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", None)
        raise ModelError(
            f"its config quantises the weights{f' ({name})' if name else ''}, and a plan does not load them: it would "
            "be of other sizes and dtypes",
            where="model.path",
            remedy="Plan with the folder of the model before it was quantised; a run checks what it loads.",
        )
    if (folder := weight_files.folder_of(recipe.model.path)) is not None:
        models.refuse_whole_numbers(model, folder)


def _steps(recipe: Recipe) -> int:
    if recipe.train.steps is not None:
        return recipe.train.steps
    tokenizer = models.load_tokenizer(recipe.model)
    data = prepare(recipe.data, tokenizer, seed=recipe.train.seed)
    return setup.total_steps(recipe, setup.training_loader(data, recipe, tokenizer))


def _parameters(plan: Plan) -> dict[str, Any]:
    frozen = [p for p in plan.parameters if not p.trainable]
    return {
        **precision_plan.described(plan)["parameters"],
        "frozen": sum(p.numel for p in frozen),
        "without_master": [p.name for p in frozen],
    }


def _memory(estimates: list[Estimate], device_memory: int | None) -> list[dict[str, Any]]:
    best = memory.cheapest(estimates, device_memory) if device_memory is not None else None
    return [
        {
            "engine": e.engine,
            "regime": e.regime,
            "ranks": e.ranks,
            "bytes_per_rank": e.peak_bytes,
            "items": e.items,
            "after_step_bytes": e.after_step_bytes,
            "after_backward_bytes": e.after_backward_bytes,
            "host_bytes": e.host_bytes,
            "activation_bytes": e.activations,
            "largest_buffer_bytes": e.largest_buffer_bytes,
            "fits": None if device_memory is None else e.peak_bytes <= device_memory,
            "cheapest_that_fits": e is best,
        }
        for e in estimates
    ]


def _forecast(recipe: Recipe, model: nn.Module, plan: Plan, steps: int) -> dict[str, Any]:
    train, missing = recipe.train, {"lost_share": None, "unseen_share": None, "dropped_share": None}
    limit = {"max_lost_share": recipe.precision.max_lost_update_share}
    nothing: dict[str, Any] = {**missing, **limit, "by_class": {}, "never_move": [], "after": []}
    if train.optimizer.name != "adamw":
        return {**nothing, "source": f"no forecast: the size of {train.optimizer.name}'s updates is not known before"}
    samples = sample(recipe, model)
    if not samples.weights:
        return {**nothing, "source": f"no forecast: {samples.source}"}
    lrs = [lr_at(s, lr=train.optimizer.lr, schedule=train.schedule, total_steps=steps) for s in range(1, steps + 1)]
    found = forecasts.forecast(samples.weights, lrs, Rounding.of(recipe.precision, plan), betas=train.optimizer.betas)
    return {
        **_headline(found.first, found.after[-1]),
        **limit,
        "peak_lr": found.peak_lr,
        "after": [asdict(shares) for shares in found.after],
        "by_class": {
            kind: {
                **_headline(found.first_by_class[kind], shares[-1]),
                "weights": found.weights_by_class[kind],
                "after": [asdict(s) for s in shares],
            }
            for kind, shares in found.by_class.items()
        },
        "never_move": list(found.never_move),
        "source": f"{found.sampled:,} samples of {samples.source}",
    }


def _headline(first: Shares, last: Shares) -> dict[str, float | None]:
    """Lost and unseen: of an update of the highest learning rate on the loaded weights. Dropped: by the whole run."""
    return {"lost_share": first.lost, "unseen_share": first.unseen, "dropped_share": last.dropped}
