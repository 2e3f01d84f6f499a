"""Every way to go on: saved by any engine at 1, 2 and 4 ranks, taken up by any engine at 1, 2 and 4 ranks.

PYTHONPATH=. python benchmarks/resume_matrix.py [--regimes full,mixed,low,low-kahan,low-stochastic]

A cell is `=` when masters and optimizer state are bit-equal after loading and, on the same number of ranks, the next
step is the unbroken run's in every bit; on another number, when the state is and the next loss within 1e-3 of it.
Prints tables in Markdown, the number of cells and the largest gap of losses; exit code 1 when a cell fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.distributed.ranks import RankFailure, RankPools
from tests.equivalence.cases import ENGINES, make_examples, make_recipe, save_model
from tests.equivalence.trajectories import Trajectory, first_difference, joined, rest_of, train

REGIMES = ("full", "mixed", "low", "low-kahan", "low-stochastic")
RANKS = (1, 2, 4)
SAVED, STEPS = 3, 4
ROWS = make_examples(14)
PLACES = [(engine, ranks) for engine in ENGINES for ranks in RANKS if not (engine == "hsdp" and ranks == 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regimes", type=lambda text: text.split(","), default=list(REGIMES))
    asked = parser.parse_args()
    pools, failed = RankPools(), 0
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model")
        for regime in asked.regimes:
            failed += matrix(pools, Path(folder), model, regime)
    pools.close()
    return int(failed > 0)


def matrix(pools: RankPools, folder: Path, model: str, regime: str) -> int:
    """Prints one regime's table; the number of cells that failed."""
    print(f"\n### {regime}\n\n| saved by | " + " | ".join(f"{e} {n}" for e, n in PLACES) + " |", flush=True)
    print("|---" * (len(PLACES) + 1) + "|")
    failed, gap = 0, 0.0
    for engine, ranks in PLACES:
        out = folder / f"{regime}-{engine}-{ranks}"
        whole = run(pools, recipe_of(engine, ranks, model, regime), save=str(out))
        cells = []
        for reader, count in PLACES:
            source = str(out / "checkpoints" / f"step-{SAVED:08d}")
            try:
                resumed = run(pools, recipe_of(reader, count, model, regime), resume=source)
                problem = difference(whole, resumed, same=ranks == count)
                gap = max(gap, abs(whole.steps[-1].loss - resumed.steps[-1].loss))
            except (RankFailure, AssertionError) as error:
                problem = str(error).strip().splitlines()[-1]
            failed += problem is not None
            cells.append("=" if problem is None else f"**{problem}**")
        print(f"| {engine} {ranks} | " + " | ".join(cells) + " |", flush=True)
    print(f"\n{len(PLACES) ** 2} cells, {failed} failed; largest gap of the next loss {gap:.2g}", flush=True)
    return failed


def recipe_of(engine: str, ranks: int, model: str, regime: str) -> dict[str, Any]:
    shape = {"engine__ranks": ranks, "train__micro_batch": 4 // ranks, "checkpoint__every": SAVED}
    return make_recipe(engine, model, regime=regime, steps=STEPS, **shape)


def run(pools: RankPools, recipe: dict[str, Any], **arguments: Any) -> Trajectory:
    engine = recipe["engine"]
    size = 1 if engine["name"] == "single" else engine["ranks"]
    name = f"{engine['name']} on {engine['ranks']}"
    return joined(name, pools.run(size, train, recipe=recipe, examples=ROWS, **arguments))


def difference(whole: Trajectory, resumed: Trajectory, *, same: bool) -> str | None:
    """What is wrong with a run that went on; None when nothing is."""
    if resumed.states[SAVED] != whole.states[SAVED]:
        return "state"
    if same:
        return first_difference(rest_of(whole, SAVED), resumed)
    near = abs(resumed.steps[0].loss - whole.steps[SAVED].loss) < 1e-3
    return None if near else f"loss {resumed.steps[0].loss} instead of {whole.steps[SAVED].loss}"


if __name__ == "__main__":
    sys.exit(main())
