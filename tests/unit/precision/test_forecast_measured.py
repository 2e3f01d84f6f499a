"""The forecast of unseen updates against a real model that a plain loop trains in mixed precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from samestep.precision.forecast import Rounding, Weights, forecast

SHARED = Path(__file__).parents[4] / "shared"
MODEL = SHARED / "models" / "stories260K"
ROWS = SHARED / "data" / "llmfs_instruct_1100.jsonl"
STEPS = 20
MIXED = Rounding(
    master=torch.float32,
    compute=torch.bfloat16,
    update="nearest",
    cast="nearest",
    export=None,
    export_rounding="nearest",
)

pytestmark = pytest.mark.skipif(not MODEL.is_dir() or not ROWS.is_file(), reason="needs the shared model and data")


def batches(size: int) -> list[torch.Tensor]:
    """Token ids [8, size], a new batch for every step."""
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()[:400]]
    ids = [i for row in rows for i in tokenizer(f"{row['instruction']}\n{row['output']}")["input_ids"]]
    return list(torch.tensor(ids[: STEPS * 8 * size]).reshape(STEPS, 8, size))


def trained(lr: float) -> tuple[list[Weights], dict[int, tuple[float, float]]]:
    """The loaded weights, and after some steps the share of that step's updates that its copy does not show and the
    share of copies that are as they were loaded."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    named = dict(model.named_parameters())
    loaded = [
        Weights(name=name, numel=p.numel(), dimensions=p.dim(), values=p.detach().flatten().clone())
        for name, p in named.items()
    ]
    start = [w.values for w in loaded]
    masters = [p.detach().float().requires_grad_() for p in named.values()]
    optimizer = torch.optim.AdamW(masters, lr=lr, weight_decay=0.0)
    found = {}
    for step, ids in enumerate(batches(96), 1):
        model(input_ids=ids, labels=ids).loss.backward()
        before = torch.cat([m.detach().flatten() for m in masters]).clone()
        for master, parameter in zip(masters, named.values(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        after = torch.cat([m.detach().flatten() for m in masters])
        moved = before != after
        unseen = (before.bfloat16() == after.bfloat16()) & moved
        touched = torch.cat(start).float() != after
        unchanged = (after.bfloat16() == torch.cat(start))[touched]
        found[step] = unseen.sum().item() / moved.sum().item(), unchanged.float().mean().item()
        with torch.no_grad():
            for master, parameter in zip(masters, named.values(), strict=True):
                parameter.copy_(master)
    return loaded, found


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-5, 1e-4])
def test_forecast_is_near_what_happens(lr: float) -> None:
    loaded, measured = trained(lr)
    for shares in forecast(loaded, [lr] * STEPS, MIXED).after:
        unseen, unchanged = measured[shares.steps]
        first = shares.steps == 1
        assert shares.unseen == pytest.approx(unseen, abs=0.02 if first else 0.05)
        assert shares.copy_unchanged == pytest.approx(unchanged, abs=0.02 if first else 0.08)
