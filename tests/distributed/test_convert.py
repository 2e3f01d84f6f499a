"""A DeepSpeed universal checkpoint made of ours: DeepSpeed loads it on two ranks, and goes on as we do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from samestep.checkpoint.manifest import read_manifest
from samestep.checkpoint.store import newest
from samestep.checkpoint.tensors import whole_tensors
from samestep.recipe import load
from samestep.training.converting import convert
from samestep.training.launch import train
from tests.distributed import foreign_jobs
from tests.small_runs import make_folder, steps_of

pytestmark = pytest.mark.timeout(240)

RECIPE = """\
name: tiny
model: {path: model}
data: {path: rows.jsonl, format: text, max_tokens: 32}
precision: {max_lost_update_share: null}
engine: {name: single, ranks: 2}
train:
  steps: 5
  micro_batch: 2
  optimizer: {lr: 1e-2, weight_decay: 0.1, betas: [0.8, 0.95]}
  schedule: {name: constant}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped after its third step, the same as a universal checkpoint, and the run's next step."""
    folder = make_folder(tmp_path_factory.mktemp("run"), recipe=RECIPE)
    recipe = load(folder / "r.yaml")
    train(recipe, folder / "out", stop_after=3)
    assert convert(newest(folder / "out"), folder / "universal", to="deepspeed-universal", overwrite=False) == []
    train(recipe, folder / "next", resume_from=folder / "out", stop_after=4, keep_masters=True)
    return folder


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_loads_it(ranks: Any, run: Path, stage: int) -> None:
    """P70: the first loss after loading is the one that the run has, bit for bit, and so is the state."""
    results = ranks.run(
        2,
        foreign_jobs.load_universal,
        folder=str(run / "universal"),
        stage=stage,
        recipe=str(run / "r.yaml"),
        index=3,
    )
    folder = newest(run / "out")
    ours = dict(whole_tensors(folder, read_manifest(folder).tensors))
    before = results[0]["before"]
    assert before.keys() == ours.keys()
    assert [name for name in ours if not torch.equal(before[name], ours[name])] == []
    (record,) = steps_of(run / "next")
    loss = torch.tensor([result["loss"] for result in results]).sum() / results[0]["label_tokens"]
    assert loss.item() == pytest.approx(record["loss"], rel=1e-6)
    assert results[0]["steps"] == 4
    masters = load_file(run / "next" / "masters.safetensors")
    for name, master in masters.items():
        # DeepSpeed 0.19.8's stage 3 shares one count of updates between parameter groups: the second one's is too high.
        slack = 1e-2 if stage == 3 and "norm" in name else 1e-5
        torch.testing.assert_close(results[0]["after"][f"model.{name}"], master, rtol=slack, atol=slack)
