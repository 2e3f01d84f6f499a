"""docs/cluster.md and the calibrated numbers are what the published results give."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import published_throughput as published
from samestep.planning.cluster import calibration

PAGE = (Path(__file__).parents[4] / "docs" / "cluster.md").read_text(encoding="utf-8")


def _mpt(published: int, layers: int, hidden: int) -> int:
    """llm-foundry's models have 2,048 learned positions and biases (queries, keys, values, the MLP's 4 + 1, attention's
    output and two norms, the last norm), which transformers' MPT has not."""
    return published - 2048 * hidden - (layers * 11 + 1) * hidden


# Parameters as llm-foundry's table and the models' own pages give them.
PARAMETERS = {
    "Llama 2 7B": 6_738_415_616,
    "Llama 3 8B": 8_030_261_248,
    "MPT 7B": _mpt(6_658_859_008, 32, 4096),
    "MPT 13B": _mpt(12_853_954_560, 40, 5120),
    "MPT 30B": _mpt(29_975_214_080, 48, 7168),
    "MPT 70B": _mpt(64_862_437_376, 80, 8192),
}


@pytest.mark.slow
def test_the_page_has_the_tables_that_the_code_makes() -> None:
    found = published.results()
    for line in [*published.sources(), *published.table(found), published.summary(found)]:
        assert line in PAGE
    least, greatest = published.reached(found)
    assert (round(least, 2), round(greatest, 2)) == calibration.REACHED


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["A100", "H100"])
def test_the_efficiency_is_what_the_calibrating_rows_ask_for(kind: str) -> None:
    shares = {share for name, share in calibration.MATMUL_EFFICIENCY.items() if name.startswith(kind)}
    assert shares == {round(published.asked_for(kind), 2)}


def test_most_rows_are_held_out_and_the_first_of_each_source_calibrates() -> None:
    rows = [row for row in published.ROWS if row.source != published.ACCELERATE and row.device[:4] in ("A100", "H100")]
    first = {}
    for row in rows:
        first.setdefault((row.source, row.device[:4]), row)
    assert [row for row in published.ROWS if row.calibrates] == [row for row in rows if row in first.values()]
    assert sum(not row.calibrates for row in published.ROWS) >= 6


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_their_published_sizes(name: str) -> None:
    model = published._model(name)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
