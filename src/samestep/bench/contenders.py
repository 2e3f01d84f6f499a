"""Who takes part in a benchmark, and whether all of them would do the same work. No torch but for the plans."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from samestep.compare.fields import differences, unequal_work
from samestep.errors import EngineError, SamestepError
from samestep.recipe import Recipe, override

if TYPE_CHECKING:
    from samestep.precision.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A training loop that is not ours. `engine` is the one of ours whose work it does; it needs any of `packages`,
    names to import."""

    name: str
    title: str
    engine: str
    packages: tuple[str, ...]

    @property
    def installed(self) -> bool:
        return any(find_spec(package) is not None for package in self.packages) and (
            self.engine != "zero3" or find_spec("deepspeed") is not None
        )


PEERS = {
    peer.name: peer
    for peer in (
        Peer(name="fsdp2", title="raw torch FSDP2", engine="fsdp", packages=("torch",)),
        Peer(name="deepspeed", title="raw DeepSpeed ZeRO-3", engine="zero3", packages=("deepspeed",)),
        Peer(name="accelerate-fsdp", title="accelerate, FSDP2", engine="fsdp", packages=("accelerate",)),
        Peer(name="accelerate-deepspeed", title="accelerate, ZeRO-3", engine="zero3", packages=("accelerate",)),
        Peer(
            name="fabric",
            title="Lightning Fabric, FSDP2",
            engine="fsdp",
            packages=("lightning", "lightning_fabric"),
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One that takes turns: an engine of ours, or a peer, with the recipe of its work."""

    name: str
    title: str
    recipe: Recipe
    peer: str | None = None

    @property
    def processes(self) -> int:
        return 1 if self.recipe.engine.name == "single" else self.recipe.engine.ranks


def contenders(
    recipe: Recipe, pairs: Sequence[tuple[str, str]], against: Sequence[str] = ()
) -> tuple[list[Contender], list[Peer]]:
    """The contenders of a benchmark and the peers that are not installed. `pairs` are engines with their regimes.

    SamestepError when two of them would not do the same work.
    """
    ours = [
        Contender(name=engine, title=f"samestep {engine}", recipe=_recipe(recipe, engine, regime))
        for engine, regime in pairs
    ]
    _refuse_unequal(ours)
    wanted = [PEERS[name] for name in against]
    missing = [peer for peer in wanted if not peer.installed]
    regime = pairs[0][1]
    theirs = [
        Contender(name=peer.name, title=peer.title, recipe=_recipe(recipe, peer.engine, regime), peer=peer.name)
        for peer in wanted
        if peer not in missing
    ]
    return [*ours, *theirs], missing


def refuse_unequal_plans(found: Sequence[Contender], plans: Sequence[Plan]) -> None:
    """EngineError when a tensor or a role is in another dtype for one contender than for the first, or when a peer's
    loop does not realise its plan."""
    first, wanted = found[0], _described(plans[0])
    for each, plan in zip(found, plans, strict=True):
        for what, value in _described(plan).items():
            if value != wanted.get(what):
                raise EngineError(
                    f"a benchmark is of equal plans, and {what} is {wanted.get(what)} for {first.name} but {value} for "
                    f"{each.name}",
                    where="bench",
                    remedy="Choose a regime and engines that hold the model alike; samestep plan shows them.",
                )
        if each.peer:
            _refuse_for_peer(each, plan)


def _described(plan: Plan) -> dict[str, Any]:
    """Everything in which plans must not differ, by name."""
    found: dict[str, Any] = {f"the role {name}": sorted(map(str, role.dtypes)) for name, role in plan.roles.items()}
    found |= {"the cast": plan.cast, "the rounding of updates": plan.update, "float8": sorted(plan.float8.names)}
    found |= {f"the dtype of {tensor.name}": str(tensor.held) for tensor in plan.trainable}
    return found


def _refuse_for_peer(each: Contender, plan: Plan) -> None:
    recipe = each.recipe
    # DeepSpeed casts all weights, as its plan says; a loop around fully_shard has frozen ones as they were loaded.
    frozen = [] if recipe.engine.name == "zero3" else [p for p in plan.parameters if not p.trainable]
    reasons = {
        f"the regime {recipe.precision.regime}": plan.regime not in ("full", "mixed"),
        "a regime with overrides": {str(d) for d in (plan.master, plan.gradient, plan.reduce, plan.moments)}
        != {"torch.float32"},
        f"low_dtype {recipe.precision.low_dtype}": str(plan.compute) == "torch.float16",
        "offload": recipe.engine.offload != "none",
        "frozen weights in another dtype than they were loaded in": any(p.held != p.loaded for p in frozen),
        "frozen weights in low precision under full": plan.regime == "full"
        and any(p.held.itemsize < 4 for p in frozen if not p.quantised),
        "ignored modules": bool(recipe.engine.ignored_modules),
        "accumulation": recipe.train.accumulation > 1,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise EngineError(
            f"the hand-written loops do not do {reason}",
            where="--against",
            remedy="They do full and mixed (bfloat16) without offload and accumulation; or leave out --against.",
        )


def _recipe(recipe: Recipe, engine: str, regime: str) -> Recipe:
    """The recipe of one contender. Every step has the same number of rows, so short ones are dropped."""
    return override(recipe, [f"engine.name={engine}", f"precision.regime={regime}", "data.drop_last=true"])


def _refuse_unequal(found: Sequence[Contender]) -> None:
    names = [each.name for each in found]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise SamestepError(
            f"{doubled} is given twice; a benchmark is of several engines under one regime.",
            where="bench",
            remedy="Give every engine once.",
        )
    for one, other in itertools.pairwise(found):
        if unequal := unequal_work(differences(one.recipe.model_dump(), other.recipe.model_dump())):
            raise SamestepError(
                f"a benchmark is of equal work, and for {one.name} and {other.name} {unequal[0]}.",
                where=unequal[0].field,
                remedy="Benchmark each by itself, or compare what they compute with samestep compare.",
            )
