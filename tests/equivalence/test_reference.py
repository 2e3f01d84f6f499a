"""`single` against an independent plain-torch loop. The other engines are then compared with `single`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.equivalence import reference
from tests.equivalence.against_reference import BF16, batches_of, check_equal, reference_run
from tests.equivalence.cases import make_examples, make_recipe

pytestmark = pytest.mark.timeout(180)


def check(run, ranks, recipe: dict[str, Any], rows: int, *, windows: set[int]) -> None:
    examples = make_examples(rows)
    assert {len(window) for window in batches_of(recipe, examples)} == windows
    check_equal(run(recipe, examples), reference_run(ranks, recipe, examples))


@pytest.mark.parametrize("max_grad_norm", [None, 2.5, 1e-4])
@pytest.mark.parametrize("regime", ["full", "mixed", "low"])
def test_accumulation_with_a_short_last_window(run, ranks, model_folder, regime, max_grad_norm):
    """30 rows, 12 a step: windows of 3, 3 and 2 micro-batches, the last with one idle rank."""
    changes = {"train__accumulation": 3, "train__max_grad_norm": max_grad_norm}
    recipe = make_recipe("single", model_folder(), regime=regime, steps=6, **changes)
    check(run, ranks, recipe, 30, windows={3, 2})


@pytest.mark.parametrize("regime", ["full", "mixed", "low"])
def test_reduction_once_per_step(run, ranks, model_folder, regime):
    changes = {"train__accumulation": 3, "engine__reduce_every": "step"}
    recipe = make_recipe("single", model_folder(), regime=regime, steps=4, **changes)
    check(run, ranks, recipe, 30, windows={3, 2})


@pytest.mark.parametrize("count", [1, 3, 4, 5])
@pytest.mark.parametrize("regime", ["mixed", "low"])
def test_other_numbers_of_ranks(run, ranks, model_folder, regime, count):
    recipe = make_recipe("single", model_folder(), regime=regime, steps=3, engine__ranks=count)
    check(run, ranks, recipe, 30, windows={1})


@pytest.mark.parametrize("regime", ["full", "mixed", "low"])
def test_forty_steps_untied_from_bf16(run, ranks, model_folder, regime):
    folder = model_folder(tie_word_embeddings=False, dtype=BF16)
    check(run, ranks, make_recipe("single", folder, regime=regime, steps=40), 103, windows={1})


def test_the_reference_is_short_and_knows_nothing_of_the_product():
    source = Path(reference.__file__).read_text(encoding="utf-8")
    imports = [line for line in source.splitlines() if line.startswith(("import", "from"))]
    assert imports and not any("samestep" in line or "tests" in line for line in imports)
    loop = source[source.index("def train") :]
    assert sum(bool(line.strip()) for line in loop.splitlines()) <= 60
