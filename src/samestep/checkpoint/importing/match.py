"""A foreign checkpoint's tensors and the recipe's parameters: every one of them, or a refusal that names what is amiss.

Nothing is guessed. Names must fit under one prefix, shapes must be equal, an optimizer's positions must mean one
parameter each, masters must round to the weights beside them, and values that are in two places must be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from samestep.checkpoint.importing.positions import Ambiguous, Impossible, Shape, names_of
from samestep.checkpoint.importing.source import Source, Stored
from samestep.dtypes import dtype_name
from samestep.errors import CheckpointError

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_T = TypeVar("_T")
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the recipe trains: shapes by name in the model's order, and what its optimizer keeps of each.

    `aliases` are the other names under which a parameter may be stored: of ties, and of adapters.
    """

    trainable: Mapping[str, Shape]
    frozen: Mapping[str, Shape]
    aliases: Mapping[str, str]
    keys: frozenset[str]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Matched:
    """A source in the recipe's names. Every `read` checks what can only be checked by value, and may raise.

    `dtypes` are those that the trained weights have in the source.
    """

    weights: Mapping[str, Stored]
    states: Mapping[str, Mapping[str, Stored]]
    frozen: Mapping[str, Stored]
    updates: int | None
    dtypes: frozenset[torch.dtype]
    left: Sequence[str]


def target_of(model: nn.Module, *, keys: Iterable[str], dtype: torch.dtype) -> Target:
    """The target for a model as the recipe prepares it, also on the meta device; `dtype` is that of its masters."""
    parameters = dict(model.named_parameters())
    first = {id(parameter): name for name, parameter in parameters.items()}
    every = dict(model.named_parameters(remove_duplicate=False))
    aliases = {name: first[id(parameter)] for name, parameter in every.items() if name not in parameters}
    # peft leaves the adapter's own name out when it saves one.
    aliases |= {name.replace(".default.", "."): name for name in parameters if ".default." in name}
    return Target(
        trainable={name: tuple(p.shape) for name, p in parameters.items() if p.requires_grad},
        frozen={name: tuple(p.shape) for name, p in parameters.items() if not p.requires_grad},
        aliases=aliases,
        keys=frozenset(keys),
        dtype=dtype,
    )


def match(source: Source, target: Target, *, order: Sequence[str] | None = None) -> Matched:
    """The source in the target's names. `order` names the optimizer's parameters by position.

    Raises CheckpointError.
    """
    shapes = {**target.trainable, **target.frozen}
    named, strange = _named(source.weights, target, "weights")
    copies, _ = _named(source.copies, target, "weights") if source.copies else ({}, [])
    weights = {}
    for name, found in named.items():
        _check_shape(name, found[0], shapes[name])
        weights[name] = _agreeing(name, found, copies.get(name, []))
    if missing := [name for name in target.trainable if name not in weights]:
        raise CheckpointError(f"has no weight {missing[0]}", remedy="Give a recipe with the model that was trained.")
    states = _states(source, target, order)
    left = [*source.left]
    if strange:
        left.append(f"{len(strange)} tensors that the recipe's model has no parameter for: {strange[0]} first")
    if absent := [name for name in target.frozen if name not in weights]:
        left.append(f"{len(absent)} frozen parameters are not in it; the run has those of the recipe's model")
    return Matched(
        weights={name: exactly(name, weights[name], target.dtype) for name in target.trainable},
        states={
            name: {key: exactly(f"{key} of {name}", value, target.dtype) for key, value in states[name].items()}
            for name in states
        },
        frozen={name: weights[name] for name in target.frozen if name in weights},
        updates=_updates(source),
        dtypes=frozenset(weights[name].dtype for name in target.trainable),
        left=left,
    )


def exactly(what: str, stored: Stored, dtype: torch.dtype) -> Stored:
    """The same tensor in `dtype`; reading it raises CheckpointError when that changes a value."""
    if stored.dtype == dtype:
        return stored

    def converted() -> torch.Tensor:
        original = stored.read()
        result = original.to(dtype)
        widened = torch.promote_types(stored.dtype, dtype) == dtype
        if not widened and not _equal_in(stored.dtype, result, original):
            raise CheckpointError(
                f"{what} is {dtype_name(stored.dtype)}, and {dtype_name(dtype)} cannot hold its values",
                remedy="Give a recipe whose masters are float32: precision.regime mixed or full.",
            )
        return result

    return Stored(shape=stored.shape, dtype=dtype, read=converted)


def same_value(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two copies of a weight are equal in the narrower of their dtypes."""
    return _equal_in(min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize), one, other)


def _equal_in(dtype: torch.dtype, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape are equal once they are of a dtype; compares small chunks."""
    pairs = zip(one.reshape(-1).split(_CHUNK), other.reshape(-1).split(_CHUNK), strict=True)
    return all(_equal(a.to(dtype), b.to(dtype)) for a, b in pairs)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _clean(name: str) -> str:
    """A name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _named(found: Mapping[str, _T], target: Target, what: str) -> tuple[dict[str, list[_T]], list[str]]:
    """What was found, by the target's names (a tie may be stored under each of its own), and the names of the rest."""
    cleaned: dict[str, _T] = {}
    for name, value in found.items():
        if _clean(name) in cleaned:
            raise CheckpointError(f"has {_clean(name)} twice, once as {name}")
        cleaned[_clean(name)] = value
    prefix = _prefix(cleaned.keys(), target, what)
    named: dict[str, list[_T]] = {}
    strange = []
    for name, value in cleaned.items():
        ours = name.removeprefix(prefix) if name.startswith(prefix) else name
        ours = target.aliases.get(ours, ours)
        if name.startswith(prefix) and (ours in target.trainable or ours in target.frozen):
            named.setdefault(ours, []).append(value)
        else:
            strange.append(name)
    return named, strange


def _prefix(names: Iterable[str], target: Target, what: str) -> str:
    """What stands before every parameter's name: nothing, `module.`, `model.`."""
    present = set(names)
    known: dict[str, list[str]] = {name: [name] for name in target.trainable}
    for alias, name in target.aliases.items():
        if name in known:
            known[name].append(alias)
    first = next(iter(known))
    candidates = {n[: -len(name)] for name in known[first] for n in present if n.endswith(name)}
    candidates = {p for p in candidates if not p or p.endswith(".")}
    missing = {p: [n for n, all_ in known.items() if not any(p + x in present for x in all_)] for p in candidates}
    complete = sorted(p for p in candidates if not missing[p])
    if len(complete) > 1:
        raise CheckpointError(
            f"has several sets of {what}: under {' and '.join(repr(p) for p in complete)}",
            remedy="Save the one that is to be trained on.",
        )
    if not complete:
        best = min(missing.values(), key=len, default=[first])
        raise CheckpointError(
            f"has no {best[0]} among its {what}",
            remedy="Give a recipe with the model, the freezing and the adapters that were trained.",
        )
    return complete[0]


def _check_shape(what: str, stored: Stored, shape: Shape) -> None:
    if stored.shape != shape:
        raise CheckpointError(
            f"has {what} in the shape {list(stored.shape)}, the recipe's model {list(shape)}",
            remedy="Give a recipe with the model that was trained.",
        )


def _agreeing(name: str, found: Sequence[Stored], copies: Sequence[Stored]) -> Stored:
    """The most precise of several copies of a weight, which reading compares with the others."""
    first, *others = sorted(found, key=lambda stored: -stored.dtype.itemsize)
    if not others and not copies:
        return first
    for other in (*others, *copies):
        _check_shape(name, other, first.shape)

    def checked() -> torch.Tensor:
        value = first.read()
        for other in others:
            if not same_value(value, other.read()):
                raise CheckpointError(f"has {name} twice, as tied weights are stored, with different values")
        for copy in copies:
            if not _equal_in(copy.dtype, value, copy.read()):
                raise CheckpointError(
                    f"has a master of {name} that does not round to the weight beside it",
                    remedy="Its flat partitions do not lie as its own description says; nothing was imported.",
                )
        return value

    return replace(first, read=checked)


def _states(source: Source, target: Target, order: Sequence[str] | None) -> dict[str, Mapping[str, Stored]]:
    """Optimizer state of every parameter that trains. Empty where the recipe's optimizer keeps none."""
    if not target.keys:
        return {}
    if source.groups:
        states = _by_position(source, target, order)
    elif any(source.states.values()):
        found = {name: state for name, state in source.states.items() if state}
        named, strange = _named(found, target, "optimizer states")
        if strange:
            raise CheckpointError(f"has optimizer state of {strange[0]}, which the recipe's model does not have")
        states = {name: all_[0] for name, all_ in named.items()}
    else:
        raise CheckpointError(
            "has no optimizer state",
            remedy="A model alone is not imported: start a run from it with model.path.",
        )
    for name, state in states.items():
        if name in target.frozen:
            raise CheckpointError(
                f"has trained {name}, which the recipe freezes", remedy="Change model.freeze or model.lora."
            )
        _check_keys(name, state, target)
    if missing := [name for name in target.trainable if name not in states]:
        raise CheckpointError(
            f"has no optimizer state of {missing[0]}, which the recipe trains", remedy="Freeze it with model.freeze."
        )
    return states


def _check_keys(name: str, state: Mapping[str, Stored], target: Target) -> None:
    if strange := sorted(state.keys() - target.keys):
        raise CheckpointError(
            f"keeps {strange[0]} of {name}, for which the recipe's optimizer has no place",
            remedy=f"It has {' and '.join(sorted(target.keys))}; other optimizers are not imported.",
        )
    if lacking := sorted(target.keys - state.keys()):
        raise CheckpointError(
            f"keeps no {lacking[0]} of {name}", remedy="Set train.optimizer to the one that it was trained with."
        )
    for key, value in state.items():
        _check_shape(f"{key} of {name}", value, target.trainable[name])


def _by_position(source: Source, target: Target, order: Sequence[str] | None) -> dict[str, Mapping[str, Stored]]:
    groups = [[state for state in group if state] for group in source.groups]
    if order is not None:
        every = [state for group in source.groups for state in group]
        if len(order) != len(every):
            raise CheckpointError(f"has {len(every)} parameters in its optimizer, but --order names {len(order)}")
        if strange := [name for name in order if name not in target.trainable and name not in target.frozen]:
            raise CheckpointError(f"the recipe's model has no {strange[0]}, which --order names")
        return {name: state for name, state in zip(order, every, strict=True) if state}
    if not any(groups):
        raise CheckpointError("has no optimizer state", remedy="Start a run from its model with model.path.")
    shapes = [[next(iter(state.values())).shape for state in group] for group in groups]
    try:
        names = names_of(shapes, list(target.trainable.items()))
    except Impossible as error:
        raise CheckpointError(
            f"keeps its optimizer state by position, which does not fit the recipe's model: {error}",
            remedy="Give a recipe that trains the same parameters, or their names by position with --order.",
        ) from error
    except Ambiguous as error:
        raise CheckpointError(
            "keeps its optimizer state by position, and more than one way to give the positions to parameters fits",
            remedy="Give a file of the names in the optimizer's order, one a line, with --order.",
        ) from error
    return {
        name: state
        for group, of_group in zip(groups, names, strict=True)
        for state, name in zip(group, of_group, strict=True)
    }


def _updates(source: Source) -> int | None:
    if len(source.updates) > 1:
        few, many = min(source.updates), max(source.updates)
        raise CheckpointError(
            f"has parameters with {few} and with {many} updates",
            remedy="A run has one number of updates for all its parameters; this state cannot be brought in.",
        )
    return next(iter(source.updates), None)
