"""How far lost and unseen updates reach: every regime at several learning rates, from one bf16 checkpoint.

python benchmarks/vanishing_updates.py MODEL DATA [--steps 1000] [--out runs/vanishing]

MODEL is a folder that transformers loads, DATA a file in the Alpaca format. One process, AdamW without decay, 4 rows a
step. A run whose folder is complete is not done again. Prints tables in Markdown, and leaves a picture in the folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

from samestep.recipe.schema import RegimeName

# Learning rate and schedule.
SETTINGS = (("1e-6", "constant"), ("1e-5", "constant"), ("1e-4", "constant"), ("1e-4", "linear"))
SHOWN = (0, 50, 100, 200, 500, 1000)


def main() -> None:
    asked = arguments()
    runs: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for lr, schedule in SETTINGS:
        for regime in asked.regimes:
            out = asked.out / f"{lr}-{schedule}-{regime}"
            if not (out / "summary.json").exists():
                train(asked, regime=regime, lr=lr, schedule=schedule, out=out)
            runs.setdefault((lr, schedule), {})[regime] = read(out)
    for (lr, schedule), regimes in runs.items():
        print(table(f"{lr}, {schedule}", regimes), flush=True)
    draw(runs, asked.out / "vanishing.png")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("runs/vanishing"))
    regimes = [name for name in get_args(RegimeName) if name != "mixed-fp8"]
    parser.add_argument("--regimes", type=lambda text: text.split(","), default=regimes)
    return parser.parse_args()


def train(asked: argparse.Namespace, *, regime: str, lr: str, schedule: str, out: Path) -> None:
    recipe = f"""
name: vanishing
model: {{path: {asked.model.resolve()}, load_dtype: bfloat16}}
data: {{path: {asked.data.resolve()}, held_out: 100, max_tokens: 256}}
precision: {{regime: {regime}, max_lost_update_share: null, measure_every: 50}}
engine: {{name: single}}
train:
  steps: {asked.steps}
  micro_batch: 4
  evaluate_every: 50
  optimizer: {{lr: {lr}}}
  schedule: {{name: {schedule}}}
log: {{every: 250}}
"""
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / "recipe.yaml"
    file.write_text(recipe)
    command = [sys.executable, "-m", "samestep", "train", str(file), "--out", str(out), "--overwrite"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def read(out: Path) -> dict[str, Any]:
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    evaluations = [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]
    return {
        "held_out": {e["step"]: e["loss"] for e in evaluations},
        "measured": {s["step"]: s for s in steps if s["lost_update_length"] is not None},
        "export": json.loads((out / "summary.json").read_text())["export"],
    }


def table(title: str, regimes: dict[str, dict[str, Any]]) -> str:
    """Held-out losses, then what was measured at one step early in the run and at a late one."""
    steps = [step for step in SHOWN if step in next(iter(regimes.values()))["held_out"]]
    heads = [
        "regime",
        *(str(s) for s in steps),
        "lost",
        "unseen",
        "length lost",
        "length unseen",
        "never moved",
        "export",
    ]
    lines = [f"\nlearning rate {title}\n", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for regime, run in regimes.items():
        first, last = run["measured"][1], run["measured"][max(run["measured"])]
        shares = [
            f"{share(first[key])} to {share(last[key])}"
            for key in ("lost_update_share", "unseen_update_share", "lost_update_length", "unseen_update_length")
        ]
        losses = [f"{run['held_out'][step]:.4f}" for step in steps]
        exported = run["export"].get("exported_loss")
        cells = [regime, *losses, *shares, str(last["tensors_never_moved"]), f"{exported:.4f}" if exported else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def draw(runs: dict[tuple[str, str], dict[str, dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(runs), figsize=(4.5 * len(runs), 4), layout="constrained")
    for axis, ((lr, schedule), regimes) in zip(axes, runs.items(), strict=True):
        for regime, run in regimes.items():
            axis.plot(list(run["held_out"]), list(run["held_out"].values()), label=regime, linewidth=1.2)
        axis.set(title=f"{lr}, {schedule}", xlabel="step", ylabel="held-out loss")
    axes[0].legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
