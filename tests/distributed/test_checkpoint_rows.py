"""Reported failures of checkpoints that need ranks, one test each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from samestep.checkpoint import store
from samestep.checkpoint.manifest import read_manifest
from samestep.checkpoint.tensors import whole_tensors
from samestep.training.exporting import export_checkpoint
from tests.distributed import checkpoint_jobs
from tests.distributed.checkpoint_jobs import LR, UPDATES, Tied, inputs
from tests.small_runs import make_folder

if TYPE_CHECKING:
    from tests.distributed.ranks import RankPools

pytest.importorskip("deepspeed")


def recipe_of(model: dict[str, Any], engine: str, regime: str) -> dict[str, Any]:
    return {
        "model": model,
        "data": {"path": "none"},
        "precision": {"regime": regime, "max_lost_update_share": None},
        "engine": {"name": engine, "ranks": 2},
        "train": {"steps": 9, "micro_batch": 1, "optimizer": {"lr": LR}},
    }


def stored_in(out: Path) -> dict[str, torch.Tensor]:
    folder = store.newest(out)
    return dict(whole_tensors(folder, read_manifest(folder).tensors))


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3", "fsdp"])
def test_p67_a_weight_that_layers_share_is_in_the_checkpoint(ranks: RankPools, tmp_path: Path, engine: str) -> None:
    """Whole, once, and with the values and moments that plain AdamW gives it."""
    recipe = recipe_of({"path": "none"}, engine, "full")
    if engine == "zero3":
        recipe["engine"]["persistent_elements"] = 1
    ranks.run(2, checkpoint_jobs.tied, recipe=recipe, out=str(tmp_path))
    plain = Tied()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.0)
    for update in range(UPDATES):
        optimizer.zero_grad()
        (2 * plain(inputs(update))).backward()  # the sum of both ranks
        optimizer.step()
    expected = {}
    for name, parameter in plain.named_parameters():
        expected[f"model.{name}"] = parameter.detach()
        for key in ("exp_avg", "exp_avg_sq"):
            expected[f"optim.state.{name}.{key}"] = optimizer.state[parameter][key]
    found = stored_in(tmp_path)
    assert found.keys() == expected.keys()
    assert len(found) == 9
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ["zero1", "zero2"])
def test_p77_the_exported_weights_are_those_that_the_model_ran_with(
    ranks: RankPools, tmp_path: Path, engine: str
) -> None:
    """fp32 masters rounded to bf16 are the live bf16 weights, tied ones included."""
    source = make_folder(tmp_path)
    recipe = recipe_of({"path": str(source / "model")}, engine, "mixed")
    live, other = ranks.run(2, checkpoint_jobs.live, recipe=recipe, out=str(tmp_path / "run"))
    assert {values.dtype for values in live.values()} == {torch.bfloat16}
    export_checkpoint(store.newest(tmp_path / "run"), tmp_path / "out", dtype="float32")
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before = load_file(source / "model" / "model.safetensors")
    names = [name for name, _ in exported.named_parameters(remove_duplicate=False)]
    assert sorted(names) == sorted(live)
    for name in names:
        values = exported.get_parameter(name)
        assert torch.equal(values.bfloat16(), live[name]), name
        assert torch.equal(live[name], other[name])
        assert name == "lm_head.weight" or not torch.equal(values, before[name])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says how much memory a process had")
def test_p84_the_memory_that_saving_and_loading_takes(ranks: RankPools, tmp_path: Path) -> None:
    """24 tensors of 8 MB, half of each on either rank: far less than the 96 MB of a rank are needed on top."""
    for grown in ranks.run(
        2, checkpoint_jobs.memory_of_a_state, folder=str(tmp_path / "c"), tensors=24, elements=1 << 21
    ):
        assert grown["save"] < 40e6
        assert grown["load"] < 40e6
