"""Our checkpoints as those of others: torch loads them, and its next step is ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import set_state_dict
from typer.testing import CliRunner

from samestep.checkpoint.manifest import read_manifest
from samestep.checkpoint.store import newest
from samestep.checkpoint.tensors import whole_tensors
from samestep.cli.app import app
from samestep.data import prepare
from samestep.errors import SamestepError
from samestep.models import load_tokenizer
from samestep.recipe import load
from samestep.training import setup
from samestep.training.converting import convert
from samestep.training.importing import import_checkpoint
from samestep.training.launch import train
from tests.small_runs import make_folder, make_model, steps_of

RECIPE = """\
name: tiny
model: {path: model}
data: {path: rows.jsonl, format: text, max_tokens: 32}
precision: {regime: full, max_lost_update_share: null}
engine: {name: single, ranks: 1}
train:
  steps: 5
  micro_batch: 2
  optimizer: {lr: 1e-2, weight_decay: 0.1, betas: [0.8, 0.95]}
  schedule: {name: constant}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and a run of it in `out` that stopped after its third step."""
    folder = make_folder(tmp_path_factory.mktemp("run"), recipe=RECIPE)
    train(load(folder / "r.yaml"), folder / "out", stop_after=3)
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return dict(whole_tensors(folder, read_manifest(folder).tensors))


def test_torch_goes_on_as_the_run_does(run: Path, tmp_path: Path) -> None:
    """P71: out of samestep, with the moments."""
    assert convert(newest(run / "out"), tmp_path / "torch", to="torch", overwrite=False) == []
    assert [path.name for path in (tmp_path / "torch").iterdir()] == ["state.pt"]
    content = torch.load(tmp_path / "torch" / "state.pt", weights_only=True)
    model = make_model()
    named = list(model.named_parameters())
    # In other groups than the run's: state goes by name.
    groups = [{"params": [p for n, p in named if "norm" in n]}, {"params": [p for n, p in named if "norm" not in n]}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, weight_decay=0.7)
    names = dict(zip([id(p) for _, p in named], [n for n, _ in named], strict=True))
    state = content["optimizer"]
    for group in optimizer.param_groups:
        theirs = next(g for g in state["param_groups"] if names[id(group["params"][0])] in g["params"])
        assert {names[id(p)] for p in group["params"]} == set(theirs["params"])
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=state)
    ours = stored(newest(run / "out"))
    for name, parameter in named:
        assert torch.equal(parameter.detach(), ours[f"model.{name}"])
        assert torch.equal(optimizer.state[parameter]["exp_avg"], ours[f"optim.state.{name}.exp_avg"])
        assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], ours[f"optim.state.{name}.exp_avg_sq"])

    train(load(run / "r.yaml"), tmp_path / "next", resume_from=run / "out", keep_masters=True, stop_after=4)
    checked = load(run / "r.yaml")
    tokenizer = load_tokenizer(checked.model)
    given = setup.training_loader(prepare(checked.data, tokenizer, seed=0), checked, tokenizer).step(3).batch(0, 0)
    logits = model(input_ids=given.input_ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), given.labels.flatten(), ignore_index=-100)
    loss.backward()
    optimizer.step()
    (record,) = steps_of(tmp_path / "next")
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-6)
    masters = load_file(tmp_path / "next" / "masters.safetensors")
    for name, parameter in named:
        torch.testing.assert_close(parameter.detach(), masters[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("to", ["torch", "deepspeed-universal"])
def test_there_and_back(run: Path, tmp_path: Path, to: str) -> None:
    convert(newest(run / "out"), tmp_path / "there", to=to, overwrite=False)
    path = tmp_path / "there" / "state.pt" if to == "torch" else tmp_path / "there"
    back = import_checkpoint(path, load(run / "r.yaml"), tmp_path / "back", step=3)
    ours, again = stored(newest(run / "out")), stored(back.folder)
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    assert back.updates == 3
    assert back.changed == []


def test_frozen_weights_and_ties_are_complete(run: Path, tmp_path: Path) -> None:
    frozen = load(run / "r.yaml", ['model.freeze=["*q_proj*"]', "precision.regime=low-kahan"])
    train(frozen, tmp_path / "frozen", stop_after=2)
    left = convert(newest(tmp_path / "frozen"), tmp_path / "there", to="torch", overwrite=False)
    assert left == ["the compensation of low-kahan"]
    content = torch.load(tmp_path / "there" / "state.pt", weights_only=True)
    model = make_model()
    assert content["model"].keys() == model.state_dict().keys()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(content["model"][name], model.state_dict()[name])
    assert name not in content["optimizer"]["state"]
    embedding = content["model"]["model.embed_tokens.weight"]
    assert content["model"]["lm_head.weight"].data_ptr() == embedding.data_ptr()
    assert embedding.dtype == torch.bfloat16


def test_the_command(run: Path, tmp_path: Path) -> None:
    command = ["checkpoint", "convert", str(run / "out"), "--to", "torch", "--out", str(tmp_path / "t"), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["left"] == []
    assert (tmp_path / "t" / "state.pt").is_file()
    unknown = CliRunner().invoke(app, [*command[:4], "megatron", *command[5:]])
    assert unknown.exit_code == 2


def test_what_is_in_the_way_is_not_replaced(run: Path, tmp_path: Path) -> None:
    def refused(**options: Any) -> str:
        with pytest.raises(SamestepError) as caught:
            convert(newest(run / "out"), tmp_path / "there", to="torch", **options)
        return str(caught.value)

    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "precious").touch()
    assert "is there already" in refused(overwrite=False)
    assert "is not a converted checkpoint" in refused(overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["precious"]


def test_state_that_deepspeed_cannot_load_is_refused(run: Path, tmp_path: Path) -> None:
    sgd = load(run / "r.yaml", ["train.optimizer={name: sgd, lr: 0.1, momentum: 0.9}"])
    train(sgd, tmp_path / "sgd", stop_after=2)
    with pytest.raises(SamestepError, match="has momentum_buffer; universal checkpoints are of AdamW"):
        convert(newest(tmp_path / "sgd"), tmp_path / "there", to="deepspeed-universal", overwrite=False)
    assert not (tmp_path / "there").exists()
    convert(newest(tmp_path / "sgd"), tmp_path / "there", to="torch", overwrite=False)
    content = torch.load(tmp_path / "there" / "state.pt", weights_only=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    ours = stored(newest(tmp_path / "sgd"))
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], ours[f"optim.state.{name}.momentum_buffer"])


def test_a_damaged_checkpoint_is_not_converted(run: Path, tmp_path: Path) -> None:
    shutil.copytree(newest(run / "out"), tmp_path / "damaged")
    file = next((tmp_path / "damaged").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SamestepError, match="is damaged"):
        convert(tmp_path / "damaged", tmp_path / "there", to="torch", overwrite=False)
    assert not (tmp_path / "there").exists()
