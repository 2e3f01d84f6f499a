"""The variants of a comparison, checked before any of them starts. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.compare.fields import differences, unequal_work
from samestep.errors import Problem, RecipeError, SamestepError
from samestep.recipe import Recipe, override

# A name is also the name of a folder.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run the recipe. `overrides` are more "a.b=value" settings, set after engine and precision. Variants
    that differ in the seed alone have one `arm`."""

    name: str
    engine: str
    precision: str
    overrides: tuple[str, ...] = ()
    arm: str = ""
    seed: int | None = None


def variant(engine: str, precision: str) -> Variant:
    """The variant ENGINE+PRECISION."""
    name = f"{engine}+{precision}"
    return Variant(name=name, engine=engine, precision=precision, arm=name)


def recipes(recipe: Recipe, variants: Sequence[Variant]) -> list[Recipe]:
    """The recipe of each variant, all checked. RecipeError with the problems of all variants at once.

    SamestepError when there are fewer than two variants, or two of one name or one content.
    """
    _check_set(variants)
    checked: list[Recipe] = []
    problems: list[Problem] = []
    for each in variants:
        settings = [f"engine.name={each.engine}", f"precision.regime={each.precision}", *each.overrides]
        try:
            checked.append(override(recipe, settings))
        except RecipeError as error:
            problems += [Problem(field=f"{each.name}: {p.field}", what=p.what) for p in error.problems]
    if problems:
        raise RecipeError("variants", problems)
    return checked


def should_agree(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes must give the same steps: they differ in the engine and in its settings for speed only."""
    return not unequal_work(differences(one.model_dump(), other.model_dump()))


def _check_set(variants: Sequence[Variant]) -> None:
    if len(variants) < 2:
        raise SamestepError(
            f"a comparison needs at least two variants; number given: {len(variants)}.",
            where="variants",
            remedy="Name two engines, such as fsdp,zero3, or two regimes, such as mixed,low.",
        )
    names: set[str] = set()
    contents: set[tuple[str, str, tuple[str, ...]]] = set()
    for each in variants:
        if not _NAME.fullmatch(each.name):
            raise SamestepError(
                f"{each.name!r} cannot be the name of a variant.",
                where="variants",
                remedy="Use letters, digits and . _ + = -, a letter or digit first.",
            )
        content = (each.engine, each.precision, tuple(each.overrides))
        # Names that differ in case only are one folder on some file systems.
        if each.name.lower() in names or content in contents:
            raise SamestepError(f"{each.name} is given twice.", where="variants", remedy="Remove one of them.")
        names.add(each.name.lower())
        contents.add(content)
