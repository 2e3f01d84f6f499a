"""A small invented world, the same for everyone who names the same seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

NAMES = ["Ada", "Bruno", "Cleo", "Dario", "Edda", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Leo"]
TOWNS = ["Talven", "Morrow Bay", "Oskel", "Penhallow", "Sarn", "Veldig"]
JOBS = ["baker", "sailor", "teacher", "gardener", "potter", "doctor"]
ANIMALS = ["cat", "dog", "goat", "parrot", "pony", "hen"]
COLOURS = ["red", "green", "blue", "yellow", "white", "brown"]
FOODS = ["soup", "bread", "plums", "rice", "cheese", "fish"]


@dataclass(frozen=True, kw_only=True)
class Person:
    """One inhabitant and all that is known about them."""

    name: str
    town: str
    job: str
    animal: str
    colour: str
    food: str


def people(seed: int) -> list[Person]:
    """Return the inhabitants; who lives where and does what depends on `seed` alone."""
    random = Random(f"people/{seed}")
    return [
        Person(
            name=name,
            town=random.choice(TOWNS),
            job=random.choice(JOBS),
            animal=random.choice(ANIMALS),
            colour=random.choice(COLOURS),
            food=random.choice(FOODS),
        )
        for name in NAMES
    ]
