"""What dtypes a live run really has: read from tensors and from what crossed the ranks, never from settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from samestep.dtypes import dtype_name
from samestep.precision import float8
from samestep.precision.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Observed dtypes by role, and of every buffer by name. A role that nothing has is an empty tuple. `float8` names
    the linear layers that computed in float8, `idle` those that did not run (an expert that no token reached)."""

    roles: dict[str, tuple[torch.dtype, ...]]
    buffers: dict[str, torch.dtype] = field(default_factory=dict)
    float8: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A role, buffer or layer whose observed dtypes are not the planned ones."""

    role: str
    planned: tuple[torch.dtype, ...]
    observed: tuple[torch.dtype, ...]
    what: str

    def __str__(self) -> str:
        planned, observed = (
            " and ".join(map(dtype_name, dtypes)) or "none" for dtypes in (self.planned, self.observed)
        )
        return f"{self.what}: planned {planned}, observed {observed}"


class ComputeObserver:
    """Watches the parameters that modules see inside one forward pass: the dtype they compute in. `float8` names the
    linear layers that made float8 tensors, `idle` those that have not run."""

    def __init__(self, model: nn.Module) -> None:
        self.dtypes: set[torch.dtype] = set()
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self.idle = set(linear)
        owners = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        self._hooks = [module.register_forward_pre_hook(self._look) for module in owners]
        self.float8: set[str] = set()
        self._hooks += float8.watch(model, self.float8)
        self._hooks += [
            module.register_forward_pre_hook(lambda _module, _inputs, name=name: self.idle.discard(name))
            for name, module in linear.items()
        ]

    def _look(self, module: nn.Module, _inputs: object) -> None:
        self.dtypes.update(p.dtype for p in module.parameters(recurse=False) if p.is_floating_point())

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def observe(
    model: nn.Module,
    *,
    masters: Iterable[torch.Tensor],
    gradients: Iterable[torch.dtype],
    moments: Iterable[torch.Tensor],
    reduced: Iterable[torch.dtype],
    computed: Iterable[torch.dtype],
    logits: torch.dtype,
    float8_layers: Iterable[str] = (),
    idle_layers: Iterable[str] = (),
) -> Facts:
    """The facts of a run after its first optimizer step."""
    buffers = {name: buffer.dtype for name, buffer in model.named_buffers()}
    return Facts(
        roles={
            "master": _sorted(t.dtype for t in masters),
            "compute": _sorted(computed),
            "gradient": _sorted(gradients),
            "reduce": _sorted(reduced),
            "moments": _sorted(t.dtype for t in moments),
            "buffer": _sorted(buffers.values()),
            "frozen": _sorted(p.dtype for p in model.parameters() if not p.requires_grad),
            "output": (logits,),
        },
        buffers=buffers,
        float8=frozenset(float8_layers),
        idle=frozenset(idle_layers),
    )


def violations(plan: Plan, facts: Facts, *, several_ranks: bool) -> list[Violation]:
    """Every role, and every buffer, whose observed dtypes differ from the plan."""
    found = []
    for role, observed in facts.roles.items():
        planned = plan.roles[role].dtypes
        if role == "reduce" and not several_ranks:
            continue  # nothing crosses ranks
        if role == "moments" and not observed:
            continue  # an optimizer without moments
        if role != "buffer" and observed != planned:
            found.append(Violation(role=role, planned=planned, observed=observed, what=role))
    for buffer in plan.buffers:
        seen = (facts.buffers[buffer.name],) if buffer.name in facts.buffers else ()
        if seen != (buffer.held,):
            what = f"buffer {buffer.name}"
            found.append(Violation(role="buffer", planned=(buffer.held,), observed=seen, what=what))
    for name in sorted((facts.float8 ^ set(plan.float8.names)) - facts.idle):
        did, did_not = (torch.float8_e4m3fn,), (plan.compute,)
        planned, observed = (did, did_not) if name in plan.float8.names else (did_not, did)
        found.append(Violation(role="float8", planned=planned, observed=observed, what=f"layer {name}"))
    return found


def _sorted(dtypes: Iterable[torch.dtype]) -> tuple[torch.dtype, ...]:
    return tuple(sorted(set(dtypes), key=str))
