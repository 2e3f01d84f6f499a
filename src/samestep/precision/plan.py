"""The precision plan: a regime resolved for one model, with one explicit dtype for every role.

| regime | master | compute | cast to compute | gradient | reduce | moments | update rounding |
|---|---|---|---|---|---|---|---|
| full | fp32 | fp32 | - | fp32 | fp32 | fp32 | nearest |
| mixed | fp32 | bf16 or fp16 | nearest | fp32 | fp32 | fp32 | nearest |
| mixed-stochastic | fp32 | bf16 | stochastic | fp32 | fp32 | fp32 | nearest |
| low | bf16 | bf16 | - | bf16 | bf16 | bf16 | nearest |
| low-stochastic | bf16 | bf16 | - | bf16 | bf16 | bf16 | stochastic |
| low-kahan | bf16 + bf16 | bf16 | - | bf16 | bf16 | bf16 | compensated |
| mixed-fp8 | fp32 (or bf16: as low) | bf16, float8 matmuls | nearest | fp32 | fp32 | fp32 | nearest |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from samestep.dtypes import DTYPES, dtype_name
from samestep.precision import float8, overrides
from samestep.precision.float8 import NO_LAYERS, Float8Layers
from samestep.recipe.schema import Precision

ROLES = ("load", "master", "compute", "gradient", "reduce", "moments", "buffer", "frozen", "output", "export")


@dataclass(frozen=True, kw_only=True)
class Regime:
    """What a regime's name stands for. Gradients and moments are in the master's dtype.

    `cast` is how masters are rounded to compute: nearest or stochastic. `update` is how updates of the masters are
    rounded: nearest, stochastic or compensated.
    """

    name: str
    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    cast: str
    update: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Role:
    """One role's dtypes (several only where the model itself mixes them, none where nothing has it) and the reason."""

    dtypes: tuple[torch.dtype, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """One parameter or buffer: the dtype it was loaded in and the one it is held in."""

    name: str
    numel: int
    loaded: torch.dtype
    held: torch.dtype
    trainable: bool

    @property
    def upcast(self) -> bool:
        return self.held.itemsize > self.loaded.itemsize

    @property
    def rounded(self) -> bool:
        """Whether it is held in fewer bits than it was loaded in."""
        return self.held.itemsize < self.loaded.itemsize

    @property
    def quantised(self) -> bool:
        """Whether it stores something else than numbers to compute with, as 4-bit weights packed in bytes do."""
        return not self.loaded.is_floating_point


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A regime for one model: every role, parameter and buffer."""

    regime: str
    master: torch.dtype
    compute: torch.dtype
    gradient: torch.dtype
    reduce: torch.dtype
    moments: torch.dtype
    cast: str
    update: str
    roles: dict[str, Role]
    parameters: tuple[TensorPlan, ...]
    buffers: tuple[TensorPlan, ...]
    float8: Float8Layers = NO_LAYERS

    @property
    def trainable(self) -> tuple[TensorPlan, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.trainable)

    @property
    def upcast(self) -> tuple[TensorPlan, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.upcast)

    @property
    def rounded(self) -> tuple[TensorPlan, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.rounded)

    @property
    def quantised(self) -> tuple[TensorPlan, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.quantised)

    @property
    def upcast_bytes(self) -> int:
        """Bytes that holding the upcast parameters in the master dtype costs over their load dtype, before sharding."""
        return sum(p.numel * (p.held.itemsize - p.loaded.itemsize) for p in self.upcast)


def regime_of(precision: Precision) -> Regime:
    """What the recipe's regime stands for."""
    low, fp32 = DTYPES[precision.low_dtype], torch.float32
    name, _, rounding = precision.regime.partition("-")
    master = low if name == "low" else fp32
    if precision.regime == "mixed-fp8":
        master = DTYPES[precision.fp8.master]
    compute = fp32 if name == "full" else low
    what = {
        "full": "fp32 everywhere",
        "mixed": f"fp32 masters, {dtype_name(low)} compute",
        "mixed-stochastic": f"fp32 masters, rounded stochastically to {dtype_name(low)} compute",
        "low": f"{dtype_name(low)} everywhere",
        "low-stochastic": f"{dtype_name(low)} everywhere, updates rounded stochastically",
        "low-kahan": f"{dtype_name(low)} everywhere, rounding errors of updates carried along",
        "mixed-fp8": f"{dtype_name(master)} masters, {dtype_name(low)} compute with float8 matmuls "
        f"({precision.fp8.scaling} scales{', emulated' if precision.fp8.emulate else ''})",
    }[precision.regime]
    return Regime(
        name=precision.regime,
        master=master,
        compute=compute,
        reduce=DTYPES[precision.overrides.reduce] if precision.overrides.reduce else master,
        cast="stochastic" if precision.regime == "mixed-stochastic" else "nearest",
        update={"stochastic": "stochastic", "kahan": "compensated"}.get(rounding, "nearest")
        if name == "low"
        else "nearest",
        reason=f"regime {precision.regime}: {what}",
    )


def resolve(
    precision: Precision, model: nn.Module, *, casts_frozen: bool = False, ignored_modules: Sequence[str] = ()
) -> Plan:
    """The plan for this model as it was loaded.

    Trainable parameters are held in the master dtype; frozen ones (ignored ones are frozen) and buffers keep what they
    have. `casts_frozen` is for engines that hold frozen parameters in the compute dtype; exports have the originals.
    Quantised ones (not floating point) are left alone by all engines. `ignored_modules` are the recipe's patterns:
    these modules do not compute in float8 either.
    """
    regime = regime_of(precision)
    frozen = overrides.frozen_dtype(precision, regime.compute, casts_frozen=casts_frozen)
    ignored = _names_in(model, ignored_modules)

    def held(name: str, parameter: nn.Parameter) -> torch.dtype:
        if parameter.requires_grad:
            return regime.master
        if frozen is None or name in ignored or not parameter.is_floating_point():
            return parameter.dtype
        return frozen

    parameters = tuple(
        TensorPlan(
            name=name,
            numel=parameter.numel(),
            loaded=parameter.dtype,
            held=held(name, parameter),
            trainable=parameter.requires_grad,
        )
        for name, parameter in model.named_parameters()
    )
    buffers = tuple(
        TensorPlan(name=name, numel=buffer.numel(), loaded=buffer.dtype, held=buffer.dtype, trainable=False)
        for name, buffer in model.named_buffers()
    )
    fixed = {"master": regime.master, "compute": regime.compute, "gradient": regime.master}
    fixed |= {"moments": regime.master, "output": regime.compute}
    overrides.refuse(precision, fixed, {b.name: b.held for b in buffers if b.held.is_floating_point})
    return Plan(
        regime=regime.name,
        master=regime.master,
        compute=regime.compute,
        gradient=regime.master,
        reduce=regime.reduce,
        moments=regime.master,
        cast=regime.cast,
        update=regime.update,
        roles=_roles(precision, regime, parameters, buffers, casts_frozen=casts_frozen),
        parameters=parameters,
        buffers=buffers,
        float8=float8.choose(precision.fp8, model, ignored_modules=ignored_modules)
        if regime.name == "mixed-fp8"
        else NO_LAYERS,
    )


def _names_in(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Names of the parameters of modules that match a pattern."""
    matching = [path for path, _ in model.named_modules() if path and any(fnmatchcase(path, p) for p in patterns)]
    return {name for name, _ in model.named_parameters() if any(name.startswith(f"{path}.") for path in matching)}


def _roles(
    precision: Precision,
    regime: Regime,
    parameters: tuple[TensorPlan, ...],
    buffers: tuple[TensorPlan, ...],
    *,
    casts_frozen: bool,
) -> dict[str, Role]:
    loaded = _dtypes(parameter.loaded for parameter in parameters)
    frozen = _dtypes(parameter.held for parameter in parameters if not parameter.trainable)
    export = loaded if precision.export_dtype == "loaded" else (DTYPES[precision.export_dtype],)
    why, master, compute = regime.reason, (regime.master,), (regime.compute,)
    why_frozen = "frozen parameters keep their load dtype and have no master"
    if precision.overrides.frozen:
        why_frozen = (
            f"precision.overrides.frozen: {precision.overrides.frozen}; quantised and ignored ones are left alone"
        )
    elif any(p.quantised for p in parameters):
        why_frozen += "; quantised ones are left alone"
    elif casts_frozen:
        why_frozen = "this engine holds frozen parameters in the compute dtype; exports have the loaded values"
    return {
        "load": Role(dtypes=loaded, reason="as the model was loaded; it does not change the regime"),
        "master": Role(dtypes=master, reason=why),
        "compute": Role(dtypes=compute, reason=why),
        "gradient": Role(dtypes=master, reason=f"{why}; accumulated and clipped in the master's dtype"),
        "reduce": Role(
            dtypes=(regime.reduce,),
            reason=f"precision.overrides.reduce: {precision.overrides.reduce}"
            if precision.overrides.reduce
            else f"{why}; what crosses the ranks",
        ),
        "moments": Role(dtypes=master, reason=f"{why}; the optimizer works in the master's dtype"),
        "buffer": Role(dtypes=_dtypes(b.held for b in buffers), reason="buffers keep what the model gave them"),
        "frozen": Role(dtypes=frozen, reason=why_frozen),
        "output": Role(dtypes=compute, reason="logits leave the model in the compute dtype; the loss is fp32"),
        "export": Role(dtypes=export, reason=f"precision.export_dtype: {precision.export_dtype}"),
    }


def described(plan: Plan) -> dict[str, Any]:
    """The plan as plain data for JSON: roles, parameter counts, what is upcast and what that costs."""
    return {
        "regime": plan.regime,
        "roles": {
            role: {"dtype": [dtype_name(d) for d in entry.dtypes], "reason": entry.reason}
            for role, entry in plan.roles.items()
        },
        "parameters": {
            "total": sum(p.numel for p in plan.parameters),
            "trainable": sum(p.numel for p in plan.trainable),
            "upcast": [p.name for p in plan.upcast],
            "upcast_bytes": plan.upcast_bytes,
            "rounded": [p.name for p in plan.rounded],
            "quantised": [p.name for p in plan.quantised],
        },
        "float8": {"layers": list(plan.float8.names), "left_out": dict(plan.float8.left_out)},
    }


def _dtypes(found: Iterable[torch.dtype]) -> tuple[torch.dtype, ...]:
    return tuple(sorted(set(found), key=str))
