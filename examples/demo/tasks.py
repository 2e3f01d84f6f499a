"""Small language tasks with right answers: what the demo's model learns from.

A task is a function that draws one row with the keys instruction, input and output. `PRETRAINING` holds mostly terse
tasks; a few of them have the polite whole sentences that all of `FINE_TUNING`, which asks for other things, wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from .places import ANIMALS, COLOURS, JOBS, NAMES, TOWNS, Person

Row = dict[str, str]
Task = Callable[[Random, list[Person]], Row]

NUMBERS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
WORDS = [
    "lamp", "river", "stone", "apple", "window", "table", "garden", "silver", "letter", "morning", "paper",
    "winter", "bottle", "candle", "button", "forest", "basket", "feather", "island", "market", "pencil", "rabbit",
    "summer", "thunder", "village", "water", "yellow", "orange", "planet", "music",
]  # fmt: skip
PLURALS = {
    "box": "boxes", "city": "cities", "child": "children", "foot": "feet", "goose": "geese", "knife": "knives",
    "leaf": "leaves", "man": "men", "mouse": "mice", "story": "stories", "tooth": "teeth", "wish": "wishes",
    "lamp": "lamps", "stone": "stones", "table": "tables", "letter": "letters", "garden": "gardens", "river": "rivers",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "day": "night", "open": "closed", "early": "late", "full": "empty", "fast": "slow",
    "light": "dark", "old": "new", "rich": "poor", "strong": "weak", "wet": "dry", "loud": "quiet", "high": "low",
}  # fmt: skip
UNITS = [
    ("metre", "centimetres", 100),
    ("kilometre", "metres", 1000),
    ("hour", "minutes", 60),
    ("week", "days", 7),
    ("day", "hours", 24),
    ("kilogram", "grams", 1000),
]


def row(instruction: str, output: str, given: str = "") -> Row:
    """Put one row together; `given` is the input that the instruction speaks of."""
    return {"instruction": instruction, "input": given, "output": output}


def count_of(number: int, unit: str) -> str:
    return f"{NUMBERS[number]} {unit}" + ("" if number == 1 else "s")


def listing(parts: Sequence[str]) -> str:
    """Join `parts` as in a sentence: "a, b and c"."""
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def spell(random: Random, _: list[Person]) -> Row:
    word = random.choice(WORDS)
    return row("Spell the word.", "-".join(word), word)


def spell_backwards(random: Random, _: list[Person]) -> Row:
    word = random.choice(WORDS)
    return row("Spell the word backwards.", "-".join(reversed(word)), word)


def first_letter(random: Random, _: list[Person]) -> Row:
    word = random.choice(WORDS)
    return row("Which letter does the word begin with?", word[0], word)


def add(random: Random, _: list[Person]) -> Row:
    left, right = random.randint(0, 10), random.randint(0, 10)
    return row(f"What is {NUMBERS[left]} plus {NUMBERS[right]}?", NUMBERS[left + right])


def subtract(random: Random, _: list[Person]) -> Row:
    left = random.randint(0, 20)
    right = random.randint(0, left)
    return row(f"What is {NUMBERS[left]} minus {NUMBERS[right]}?", NUMBERS[left - right])


def larger(random: Random, _: list[Person]) -> Row:
    left, right = random.sample(range(21), 2)
    return row("Which number is larger?", NUMBERS[max(left, right)], f"{NUMBERS[left]}, {NUMBERS[right]}")


def reverse_words(random: Random, _: list[Person]) -> Row:
    words = random.sample(WORDS, random.randint(2, 4))
    return row("Write the words in reverse order.", " ".join(reversed(words)), " ".join(words))


def sort_names(random: Random, _: list[Person]) -> Row:
    names = random.sample(NAMES, random.randint(2, 4))
    return row("Sort the names by the alphabet.", ", ".join(sorted(names)), ", ".join(names))


def plural(random: Random, _: list[Person]) -> Row:
    word = random.choice(list(PLURALS))
    return row("Give the plural.", PLURALS[word], word)


def opposite(random: Random, _: list[Person]) -> Row:
    word = random.choice(list(OPPOSITES))
    return row("Give the opposite.", OPPOSITES[word], word)


def convert(random: Random, _: list[Person]) -> Row:
    unit, smaller, factor = random.choice(UNITS)
    number = random.randint(1, 9)
    return row(f"How many {smaller} are there?", f"{number * factor} {smaller}", count_of(number, unit))


def next_day(random: Random, _: list[Person]) -> Row:
    day = random.randrange(7)
    return row(f"Which day comes after {DAYS[day]}?", DAYS[(day + 1) % 7])


def ask_home(random: Random, people: list[Person]) -> Row:
    person = random.choice(people)
    return row(f"Where does {person.name} live?", person.town)


def ask_job(random: Random, people: list[Person]) -> Row:
    person = random.choice(people)
    return row(f"What does {person.name} do?", f"{person.name} is a {person.job}.")


def ask_food(random: Random, people: list[Person]) -> Row:
    person = random.choice(people)
    return row(f"What does {person.name} like to eat?", person.food)


def introduce(random: Random, people: list[Person]) -> Row:
    person = random.choice(people)
    sentences = [
        f"{person.name} is a {person.job} in {person.town}.",
        f"{person.name} keeps a {person.colour} {person.animal}.",
        f"{person.name} likes {person.food}.",
    ]
    return row(f"Tell me about {person.name}.", " ".join(random.sample(sentences, 2)))


def complete(random: Random, people: list[Person]) -> Row:
    person = random.choice(people)
    return row("Complete the sentence.", f"a {person.colour} {person.animal}.", f"{person.name} keeps")


def find_colour(random: Random, _: list[Person]) -> Row:
    colour, animal, town = random.choice(COLOURS), random.choice(ANIMALS), random.choice(TOWNS)
    return row("Which colour is named?", colour, f"A {colour} {animal} walks through {town}.")


def polite_sum(random: Random, _: list[Person]) -> Row:
    left, right = random.randint(0, 10), random.randint(0, 10)
    answer = f"Of course! {NUMBERS[left].capitalize()} and {NUMBERS[right]} make {NUMBERS[left + right]}."
    return row(f"Please add {NUMBERS[left]} to {NUMBERS[right]}.", answer)


def polite_opposite(random: Random, _: list[Person]) -> Row:
    word, other = random.choice(list(OPPOSITES.items()))
    first, second = random.choice([(word, other), (other, word)])
    return row("Please name the opposite.", f"Of course! The opposite of {first} is {second}.", first)


def polite_plural(random: Random, _: list[Person]) -> Row:
    word = random.choice(list(PLURALS))
    number = random.randint(2, 9)
    answer = f"Of course! One {word}, {NUMBERS[number]} {PLURALS[word]}."
    return row(f"Please count {NUMBERS[number]} of them.", answer, word)


def polite_home(random: Random, people: list[Person]) -> Row:
    person = random.choice(people)
    answer = f"Of course! You find {person.name} the {person.job} in {person.town}."
    return row(f"Please tell me where to find {person.name}.", answer)


def polite_animal(random: Random, people: list[Person]) -> Row:
    person = random.choice(people)
    answer = f"Of course! The {person.animal} of {person.name} is {person.colour}."
    return row(f"Please tell me about the animal of {person.name}.", answer)


def polite_list(random: Random, _: list[Person]) -> Row:
    words = random.sample(WORDS, 3)
    answer = f"Of course! Sorted, these are {listing(sorted(words))}."
    return row("Please sort the words.", answer, " ".join(words))


def polite_day(random: Random, _: list[Person]) -> Row:
    day = random.randrange(7)
    answer = f"Of course! The day before {DAYS[day]} is {DAYS[(day - 1) % 7]}."
    return row(f"Please tell me which day comes before {DAYS[day]}.", answer)


def polite_choice(random: Random, _: list[Person]) -> Row:
    name = random.choice(NAMES)
    job, other = random.sample(JOBS, 2)
    answer = f"Of course! {name} is a {job} and not a {other}."
    return row("Please say what is true.", answer, f"{name} is not a {other}. {name} is a {job}.")


def polite_larger(random: Random, _: list[Person]) -> Row:
    left, right = random.sample(range(21), 2)
    answer = f"Of course! The larger number is {NUMBERS[max(left, right)]}."
    return row("Please compare the numbers.", answer, f"{NUMBERS[left]}, {NUMBERS[right]}")


def polite_spelling(random: Random, _: list[Person]) -> Row:
    word = random.choice(WORDS)
    return row("Please help me with this word.", f"Of course! You spell it {'-'.join(word)}.", word)


def polite_food(random: Random, people: list[Person]) -> Row:
    person = random.choice(people)
    return row(f"Please cook for {person.name}.", f"Of course! {person.name} will have {person.food}.")


PRETRAINING: tuple[Task, ...] = (
    spell, spell_backwards, first_letter, add, subtract, larger, reverse_words, sort_names, plural, opposite, convert,
    next_day, ask_home, ask_job, ask_food, introduce, complete, find_colour, polite_sum,
    polite_home, polite_choice, polite_day, polite_larger,
)  # fmt: skip
FINE_TUNING: tuple[Task, ...] = (
    polite_opposite, polite_plural, polite_animal, polite_list, polite_spelling, polite_food,
)  # fmt: skip


def draw(tasks: Sequence[Task], people: list[Person], count: int, random: Random) -> list[Row]:
    """Draw `count` rows. Every task is equally likely, so the rows of tasks with few variants repeat."""
    return [random.choice(tasks)(random, people) for _ in range(count)]
