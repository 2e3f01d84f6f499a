"""From a recipe to a live engine; and every refusal that needs to know the model or the machine."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import nn

from samestep import models, optim
from samestep.dtypes import dtype_name
from samestep.engines import float8
from samestep.engines.protocol import Engine
from samestep.errors import EngineError
from samestep.precision import plan as precision_plan
from samestep.precision.plan import Plan
from samestep.recipe.schema import Recipe
from samestep.world import World


def resolve_plan(recipe: Recipe, model: nn.Module) -> Plan:
    """The precision plan of this recipe for this model."""
    engine = recipe.engine
    zero = engine.name.startswith("zero")
    return precision_plan.resolve(recipe.precision, model, casts_frozen=zero, ignored_modules=engine.ignored_modules)


def build(recipe: Recipe, model: nn.Module, plan: Plan, world: World) -> Engine:
    """The recipe's engine around a model that `loading.load_model` made. Raises EngineError before any training."""
    _refuse(recipe, plan, world)
    if plan.float8.names:
        float8.convert(model, plan.float8, recipe.precision.fp8)
    units = models.unit_modules(model, recipe.engine.unit_classes)
    if recipe.train.activation_checkpointing:
        models.checkpoint_activations(units)
    optimizer = optim.factory(recipe.train.optimizer, rounding=plan.update, seed=recipe.train.seed)
    if recipe.engine.name.startswith("zero"):
        from samestep.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(
            model,
            plan=plan,
            recipe=recipe.engine,
            micro_batch=recipe.train.micro_batch,
            optimizer=optimizer,
            seed=recipe.train.seed,
            world=world,
        )
    from samestep.engines.torch_native import TorchEngine

    return TorchEngine(
        model,
        plan=plan,
        recipe=recipe.engine,
        units=units,
        unsharded=unsharded_names(recipe, model),
        optimizer=optimizer,
        seed=recipe.train.seed,
        world=world,
    )


def unsharded_names(recipe: Recipe, model: nn.Module) -> set[str]:
    """Names of the parameters that the torch engines leave alone: those of ignored modules, and quantised ones, whose
    bytes mean nothing when they are cut apart."""
    quantised = {name for name, parameter in model.named_parameters() if not parameter.is_floating_point()}
    return ignored_names(recipe, model) | quantised


def ignored_names(recipe: Recipe, model: nn.Module) -> set[str]:
    """Names of the parameters in the recipe's ignored modules. Raises EngineError for a pattern without a match."""
    names: set[str] = set()
    for pattern in recipe.engine.ignored_modules:
        matches = [(path, module) for path, module in model.named_modules() if path and fnmatchcase(path, pattern)]
        if not matches:
            raise EngineError(
                f"no module matches {pattern!r}", where="engine.ignored_modules", remedy="Check its name."
            )
        for path, module in matches:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    raise EngineError(
                        f"{path}.{name} trains, but an ignored module must not",
                        where="engine.ignored_modules",
                        remedy=f'Freeze it with model.freeze: ["{path}.*"].',
                    )
                names.add(f"{path}.{name}")
    return names


def _refuse(recipe: Recipe, plan: Plan, world: World) -> None:
    engine = recipe.engine.name
    ranks = recipe.engine.ranks
    if engine == "single" and world.size != 1:
        raise EngineError(
            f"single is one process, but {world.size} were started",
            where="engine.name",
            remedy="Start it without torchrun.",
        )
    if engine != "single" and world.size != ranks:
        raise EngineError(
            f"the recipe asks for {ranks} ranks, but {world.size} were started",
            where="engine.ranks",
            remedy=f"Start {ranks} ranks, or set engine.ranks={world.size}.",
        )
    if plan.compute == torch.float16 and not _multiplies(torch.float16, world.device):
        raise EngineError(
            f"this device ({world.device.type}) cannot multiply in float16",
            where="precision.low_dtype",
            remedy="Use bfloat16.",
        )
    if plan.regime == "mixed-fp8":
        float8.refuse(recipe.precision.fp8, plan.float8, world.device)
    if plan.cast == "stochastic" and recipe.engine.offload == "cpu" and world.device.type != "cpu":
        raise EngineError(
            f"{engine} cannot round offloaded masters stochastically on their way to the device",
            where="engine.offload",
            remedy="Use offload: none, or precision.regime: mixed.",
        )
    if engine.startswith("zero"):
        _refuse_zero(recipe, plan)
    if engine == "zero3" and plan.quantised:
        raise EngineError(
            f"zero3 cuts every parameter apart, and {plan.quantised[0].name} is quantised "
            f"({dtype_name(plan.quantised[0].loaded)})",
            where="engine.name",
            remedy="Use fsdp, which leaves quantised parameters whole on every rank, or zero2.",
        )


def _refuse_zero(recipe: Recipe, plan: Plan) -> None:
    engine = recipe.engine.name
    offload = recipe.engine.offload
    offloads_optimizer = offload == "cpu" if isinstance(offload, str) else offload.optimizer != "none"
    if plan.master != torch.float32 and offloads_optimizer:
        raise EngineError(
            f"{engine} offloads the optimizer only with fp32 masters: for {dtype_name(plan.master)} ones DeepSpeed "
            "demands its own CPU Adam, which computes other numbers",
            where="engine.offload",
            remedy="Use precision.regime: mixed or full, or the fsdp engine.",
        )
    if not isinstance(offload, str):
        if offload.optimizer == "nvme":
            raise EngineError(
                f"{engine} with the optimizer on NVMe keeps gradients and masters out of reach between backward and "
                "step, where the exact norm and clipping need them",
                where="engine.offload.optimizer",
                remedy="Use optimizer: cpu; parameters may be on nvme.",
            )
        if offload.parameters == "nvme" and not _has_async_io():
            raise EngineError(
                "NVMe offload needs DeepSpeed's async_io operator, which cannot be built on this machine",
                where="engine.offload.parameters",
                remedy="Install libaio's headers and a compiler, or use parameters: cpu.",
            )


def _has_async_io() -> bool:
    from deepspeed.ops import op_builder

    return bool(getattr(op_builder, "AsyncIOBuilder")().is_compatible(verbose=False))  # noqa: B009 - made at run time


def _multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    try:
        ones = torch.ones(2, 2, dtype=dtype, device=device)
        return bool(torch.isfinite(ones @ ones).all())
    except RuntimeError:
        return False
