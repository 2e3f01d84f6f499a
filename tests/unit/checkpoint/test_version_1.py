"""Checkpoints of the first version of the format stay readable: one is stored in version_1, with how it was made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from samestep.checkpoint import manifest as manifests
from samestep.checkpoint.manifest import damages, read_manifest
from samestep.checkpoint.tensors import whole_tensors
from samestep.errors import CheckpointError
from samestep.recipe import Recipe
from samestep.training.exporting import export_checkpoint
from samestep.training.rank import run
from samestep.training.request import Request
from tests.unit.checkpoint.version_1.make import RECIPE

STORED = Path(__file__).parent / "version_1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the current folder: its recipe names the model that lies beside it."""
    shutil.copytree(STORED, tmp_path / "stored")
    monkeypatch.chdir(tmp_path / "stored")
    return tmp_path / "stored" / "step-00000002"


def test_it_is_of_version_1() -> None:
    assert json.loads((STORED / "step-00000002" / "manifest.json").read_text())["version"] == 1


def test_it_is_read(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert damages(folder, manifest) == []
    assert (manifest.step, manifest.updates, manifest.engine, manifest.ranks) == (2, 2, "fsdp", 2)
    masters = load_file(STORED / "masters.safetensors")
    found = dict(whole_tensors(folder, manifest.tensors))
    assert len(found) == 3 * len(masters)
    for name, values in masters.items():
        assert torch.equal(found[f"model.{name}"], values)
        assert found[f"optim.state.{name}.exp_avg"].abs().max() > 0
        assert found[f"optim.state.{name}.exp_avg_sq"].min() >= 0


def test_it_is_exported(folder: Path, tmp_path: Path) -> None:
    export_checkpoint(folder, tmp_path / "out")
    masters, exported = load_file(STORED / "masters.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() - masters.keys() == {"model.norm.weight"}
    assert all(torch.equal(exported[name], values) for name, values in masters.items())


def test_a_run_goes_on_from_it(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    recipe = Recipe.model_validate(RECIPE | {"engine": {"name": "single", "ranks": 2}})
    run(Request(recipe=recipe, out=out, resume=folder))
    losses = [json.loads(line)["loss"] for line in (out / "steps.jsonl").read_text().splitlines()]
    assert losses == pytest.approx(json.loads((STORED / "losses.json").read_text())[2:], rel=1e-6)


@pytest.mark.parametrize("version", [2, 99])
def test_p82_a_newer_one_is_refused_with_one_message(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """As a later samestep would write it: everything fits but the version."""
    with monkeypatch.context() as later:
        later.setattr(manifests, "VERSION", version)
        (folder / "manifest.json").write_text(manifests.encoded(read_manifest(folder)))
    (tmp_path / "out").mkdir()
    recipe = Recipe.model_validate(RECIPE | {"engine": {"name": "single", "ranks": 2}})
    uses: list[Any] = [
        lambda: read_manifest(folder),
        lambda: export_checkpoint(folder, tmp_path / "model"),
        lambda: run(Request(recipe=recipe, out=tmp_path / "out", resume=folder)),
    ]
    for use in uses:
        with pytest.raises(CheckpointError) as caught:
            use()
        assert str(caught.value) == (
            f"{folder}/manifest.json: has format version {version}, but this samestep reads versions up to 1. "
            "Update samestep."
        )
    assert list((tmp_path / "out").iterdir()) == []


def test_p82_a_recipe_without_a_field_of_today_is_taken(folder: Path) -> None:
    """Its fields of then, but for one: the default of that field is what it meant."""
    manifest = read_manifest(folder)
    content = {**manifest.recipe, "train": {k: v for k, v in manifest.recipe["train"].items() if k != "max_grad_norm"}}
    assert Recipe.model_validate(content) == Recipe.model_validate(manifest.recipe)
