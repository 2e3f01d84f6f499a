"""Checkpoints that other tools made, imported: every weight and moment is what it was in the live run."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from samestep.checkpoint.manifest import damages, read_manifest
from samestep.checkpoint.tensors import whole_tensors
from samestep.cli.app import app
from samestep.data import prepare
from samestep.errors import SamestepError
from samestep.models import load_tokenizer
from samestep.recipe import load
from samestep.recipe.schema import Recipe
from samestep.training import setup
from samestep.training.importing import Imported, import_checkpoint
from samestep.training.launch import train
from tests.small_runs import make_folder, make_model, steps_of
from tests.unit.checkpoint import foreign

RECIPE = """\
name: tiny
model: {path: model}
data: {path: rows.jsonl, format: text, max_tokens: 32}
precision: {regime: full, max_lost_update_share: null}
engine: {name: single, ranks: 1}
train:
  steps: 5
  micro_batch: 2
  optimizer: {lr: 1e-2, weight_decay: 0.1}
  schedule: {name: constant}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, its model and its rows."""
    return make_folder(tmp_path_factory.mktemp("recipe"), recipe=RECIPE)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, foreign.Live]]:
    """Gives a foreign checkpoint by kind, and its live tensors; made once."""
    makers: dict[str, Callable[[Path], foreign.Live]] = {
        "accelerate": foreign.accelerate,
        "accelerate, pickled": lambda out: foreign.accelerate(out, safe=False),
        "trainer": foreign.trainer,
        "torch": foreign.torch_file,
        "torch, named": lambda out: foreign.torch_file(out, named=True),
    }
    kept: dict[str, tuple[Path, foreign.Live]] = {}

    def make(kind: str) -> tuple[Path, foreign.Live]:
        if kind not in kept:
            out = tmp_path_factory.mktemp("foreign") / "it"
            kept[kind] = out, makers[kind](out)
        return kept[kind]

    return make


def recipe(folder: Path, *overrides: str) -> Recipe:
    return load(folder / "r.yaml", overrides)


def tensors(found: Imported) -> dict[str, torch.Tensor]:
    manifest = read_manifest(found.folder)
    assert damages(found.folder, manifest) == []
    return dict(whole_tensors(found.folder, manifest.tensors))


def assert_same(found: dict[str, torch.Tensor], live: foreign.Live) -> None:
    assert found.keys() == live.keys()
    assert [name for name in live if not torch.equal(found[name], live[name])] == []


@pytest.mark.parametrize("kind", ["accelerate", "accelerate, pickled", "trainer", "torch", "torch, named"])
def test_every_value_is_the_live_one(made: Any, folder: Path, tmp_path: Path, kind: str) -> None:
    """P71, P72: weights, both moments and the count of updates; the tie once."""
    path, live = made(kind)
    found = import_checkpoint(path, recipe(folder), tmp_path / "out")
    assert_same(tensors(found), live)
    assert (found.step, found.updates, found.parameters) == (3, 3, 29)
    assert read_manifest(found.folder).updates == 3


def test_a_run_goes_on_as_the_script_would_have(made: Any, folder: Path, tmp_path: Path) -> None:
    """The next step of a run from it, against torch's own optimizer with the state that the script had. P80: the first
    loss is that of the trained weights."""
    path, _ = made("torch, named")
    checked = recipe(folder)
    found = import_checkpoint(path, checked, tmp_path / "out")
    train(checked, tmp_path / "run", resume_from=tmp_path / "out", keep_masters=True, stop_after=4)
    (record,) = steps_of(tmp_path / "run")
    assert record["step"] == found.step + 1 == 4

    content = torch.load(path, weights_only=True)
    model = make_model()
    model.load_state_dict(content["model"])
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for n, p in named if "norm" in n]}, {"params": [p for n, p in named if "norm" not in n]}]
    )
    optimizer.load_state_dict(content["optimizer"])
    tokenizer = load_tokenizer(checked.model)
    rows = setup.training_loader(prepare(checked.data, tokenizer, seed=0), checked, tokenizer).step(3)
    given = rows.batch(0, 0)
    ids, labels = given.input_ids, given.labels
    logits = model(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    optimizer.step()
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-6)
    masters = load_file(tmp_path / "run" / "masters.safetensors")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(masters[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_the_command_lists_what_is_left(made: Any, folder: Path, tmp_path: Path) -> None:
    path, _ = made("trainer")
    command = ["checkpoint", "import", str(path), "--recipe", str(folder / "r.yaml"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["kind"] == "transformers Trainer"
    assert said["left"] == [
        "the random states (rng_state.pth)",
        "the learning rate schedule (scheduler.pt)",
        "the trainer's arguments (training_args.bin)",
        "the data position: the run goes on with row order and step 4 of the recipe",
    ]
    assert said["changed"] == []


def test_settings_of_the_recipe_that_differ_are_said(made: Any, folder: Path, tmp_path: Path) -> None:
    changes = ("train.optimizer.betas=[0.9, 0.95]", "train.optimizer.weight_decay=0.2", "train.steps=3")
    found = import_checkpoint(made("accelerate")[0], recipe(folder, *changes), tmp_path / "out")
    assert found.changed == [
        "weight_decay was 0.1, the recipe's 0.2 counts",
        "betas was (0.9, 0.999), the recipe's (0.9, 0.95) counts",
    ]


def refusal(path: Path, recipe: Recipe, tmp_path: Path, **options: Any) -> str:
    """The message of an import that is refused; it must leave nothing."""
    with pytest.raises(SamestepError) as caught:
        import_checkpoint(path, recipe, tmp_path / "refused", **options)
    assert not (tmp_path / "refused").exists()
    return str(caught.value)


def torch_file(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    foreign.torch_file(tmp_path / "changed.pt", change=change)
    return tmp_path / "changed.pt"


def test_positions_that_could_mean_several_parameters_are_refused(folder: Path, tmp_path: Path) -> None:
    """A group per layer: shapes do not tell the layers apart, so the user must."""
    model = make_model()
    named = list(model.named_parameters())
    layers = [[p for p in named if f".{i}." in p[0]] for i in range(3)]
    rest = [p for p in named if ".layers." not in p[0]]
    groups = [layers[2], layers[0], layers[1], rest]
    optimizer = torch.optim.AdamW([{"params": [p for _, p in group]} for group in groups], lr=1e-2)
    foreign.plain_steps(model, optimizer)
    path = tmp_path / "layers.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    assert "more than one way to give the positions to parameters fits" in refusal(path, recipe(folder), tmp_path)
    order = tmp_path / "order.txt"
    order.write_text("\n".join(name for group in groups for name, _ in group))
    found = import_checkpoint(path, recipe(folder), tmp_path / "out", order=order)
    assert_same(tensors(found), foreign.live_torch(model, optimizer))
    order.write_text("\n".join(name for group in reversed(groups) for name, _ in group))
    assert "exp_avg of" in refusal(path, recipe(folder), tmp_path, order=order)
    order.write_text("lm_head.weight")
    assert "has 29 parameters in its optimizer, but --order names 1" in refusal(
        path, recipe(folder), tmp_path, order=order
    )


def test_optimizers_with_other_state_are_refused(folder: Path, tmp_path: Path) -> None:
    """P81: state that the recipe's optimizer has no place for is neither dropped nor guessed at."""

    def amsgrad(content: dict[str, Any]) -> None:
        for entry in content["optimizer"]["state"].values():
            entry["max_exp_avg_sq"] = entry["exp_avg_sq"].clone()

    def eight_bit(content: dict[str, Any]) -> None:
        for entry in content["optimizer"]["state"].values():
            entry["state1"] = entry.pop("exp_avg").to(torch.int8)

    assert "keeps max_exp_avg_sq of" in refusal(torch_file(tmp_path, amsgrad), recipe(folder), tmp_path)
    assert "keeps state1 of" in refusal(torch_file(tmp_path, eight_bit), recipe(folder), tmp_path)


def test_an_optimizer_that_lacks_a_setting_is_read(folder: Path, tmp_path: Path) -> None:
    """P82: versions of torch differ in the settings that a parameter group has."""

    def drop(content: dict[str, Any]) -> None:
        for group in content["optimizer"]["param_groups"]:
            for key in ("decoupled_weight_decay", "foreach", "betas", "fused"):
                group.pop(key, None)

    foreign.torch_file(tmp_path / "old.pt", change=drop)
    assert import_checkpoint(tmp_path / "old.pt", recipe(folder), tmp_path / "out").updates == 3


REFUSALS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no optimizer state": (lambda c: c["optimizer"]["state"].clear(), "has no optimizer state"),
    "no optimizer": (
        lambda c: c.pop("optimizer"),
        "has 'model' for a model's state dict and nothing for an optimizer's",
    ),
    "one state lacks": (lambda c: c["optimizer"]["state"].pop(3), "does not fit the recipe's model"),
    "another shape": (
        lambda c: c["model"].update({"model.norm.weight": torch.ones(13)}),
        "has model.norm.weight in the shape [13], the recipe's model [12]",
    ),
    "a weight lacks": (lambda c: c["model"].pop("model.norm.weight"), "has no model.norm.weight among its weights"),
    "ties that differ": (
        lambda c: c["model"].update({"lm_head.weight": c["model"]["lm_head.weight"] + 1}),
        "twice, as tied weights are stored, with different values",
    ),
    "two sets of weights": (
        lambda c: c["model"].update({f"ema.{name}": value for name, value in c["model"].items()}),
        "has several sets of weights: under '' and 'ema.'",
    ),
    "no count of updates": (
        lambda c: [entry.pop("step") for entry in c["optimizer"]["state"].values()],
        "does not say how many updates",
    ),
    "updates that differ": (
        lambda c: c["optimizer"]["state"][0].update({"step": torch.tensor(2.0)}),
        "has parameters with 2 and with 3 updates",
    ),
    "no state dict": (
        lambda c: c.update({"optimizer": {"state": [], "param_groups": 3}}),
        "no state dict of one torch",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_refused_by_name(folder: Path, tmp_path: Path, name: str) -> None:
    change, said = REFUSALS[name]
    assert said in refusal(torch_file(tmp_path, change), recipe(folder), tmp_path)


def test_wrappers_leave_no_trace_in_names(folder: Path, tmp_path: Path) -> None:
    """P76: names out of compiled, checkpointed, parallel modules."""

    def wrap(content: dict[str, Any]) -> None:
        names = {
            n: "module._orig_mod." + n.replace(".layers.", ".layers._checkpoint_wrapped_module.")
            for n in content["model"]
        }
        content["model"] = {names[name]: value for name, value in content["model"].items()}

    live = foreign.torch_file(tmp_path / "wrapped.pt", change=wrap)
    assert_same(tensors(import_checkpoint(tmp_path / "wrapped.pt", recipe(folder), tmp_path / "out")), live)


def test_bf16_weights_become_masters_and_fp32_ones_never_lose_bits(folder: Path, tmp_path: Path) -> None:
    def low(content: dict[str, Any]) -> None:
        content["model"] = {name: value.bfloat16() for name, value in content["model"].items()}

    live = foreign.torch_file(tmp_path / "low.pt", change=low)
    found = import_checkpoint(tmp_path / "low.pt", recipe(folder), tmp_path / "out")
    assert found.changed[0] == "masters are float32 now, of the values that were bfloat16"
    weights = tensors(found)
    assert all(torch.equal(weights[n], live[n].bfloat16().float()) for n in live if n.startswith("model."))
    foreign.torch_file(tmp_path / "full.pt")
    said = refusal(tmp_path / "full.pt", recipe(folder, "precision.regime=low"), tmp_path)
    assert "is float32, and bfloat16 cannot hold its values" in said


def test_frozen_weights_must_be_those_of_the_recipes_model(folder: Path, tmp_path: Path) -> None:
    model = make_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" not in name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # frozen ones have a position, and no state
    foreign.plain_steps(model, optimizer)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "frozen.pt")
    frozen = recipe(folder, 'model.freeze=["*embed*"]')
    found = import_checkpoint(tmp_path / "frozen.pt", frozen, tmp_path / "out")
    assert_same(tensors(found), foreign.live_torch(model, optimizer))
    assert found.parameters == 28
    assert "does not fit the recipe's model" in refusal(tmp_path / "frozen.pt", recipe(folder), tmp_path)
    changed = copy.deepcopy(content)
    changed["model"]["model.embed_tokens.weight"] += 0.5
    torch.save(changed, tmp_path / "other.pt")
    said = refusal(tmp_path / "other.pt", frozen, tmp_path)
    assert "has another model.embed_tokens.weight than the recipe's model, and the recipe freezes it" in said


def test_adapters_of_a_trainer(folder: Path, tmp_path: Path) -> None:
    """peft leaves the adapter's name out of the file; the base model is not in it at all."""
    from peft import LoraConfig, get_peft_model

    base = make_model()
    adapted = get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    live = foreign.trainer(tmp_path / "lora", model=adapted)
    assert (tmp_path / "lora" / "checkpoint-3" / "adapter_model.safetensors").is_file()
    adapters = recipe(folder, "model.lora={rank: 2, alpha: 4.0, target_modules: [q_proj]}")
    found = import_checkpoint(tmp_path / "lora", adapters, tmp_path / "out")
    assert_same(tensors(found), live)
    assert any(
        line.endswith("frozen parameters are not in it; the run has those of the recipe's model") for line in found.left
    )


def test_kinds_that_cannot_be_told_apart(made: Any, folder: Path, tmp_path: Path) -> None:
    path, live = made("accelerate")
    both = tmp_path / "both"
    both.mkdir()
    for name in ("model.safetensors", "optimizer.bin"):
        (both / name).write_bytes((path / name).read_bytes())
    (both / "optimizer.pt").write_bytes((path / "optimizer.bin").read_bytes())
    assert "can be read as accelerate and as trainer" in refusal(both, recipe(folder), tmp_path)
    found = import_checkpoint(both, recipe(folder), tmp_path / "out", kind="trainer")
    assert_same(tensors(found), live)
    assert "is no checkpoint of the kind deepspeed" in refusal(both, recipe(folder), tmp_path, kind="deepspeed")
    weights = load_file(both / "model.safetensors")
    torch.save(weights, both / "pytorch_model.bin")
    (both / "optimizer.pt").unlink()
    assert "has weights in model.safetensors and in pytorch_model.bin" in refusal(both, recipe(folder), tmp_path)
    (both / "pytorch_model.bin").unlink()
    save_file(weights, both / "model_1.safetensors")
    assert "holds several models or optimizers: model_1.safetensors" in refusal(both, recipe(folder), tmp_path)


def test_folders_that_are_no_checkpoints(made: Any, folder: Path, tmp_path: Path) -> None:
    checked = recipe(folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is no checkpoint of a kind that can be imported" in refusal(empty, checked, tmp_path)
    assert "is not there" in refusal(tmp_path / "nowhere", checked, tmp_path)
    (empty / "latest").write_text("../../etc")
    assert "there is no such folder beside it" in refusal(empty, checked, tmp_path)
    several = tmp_path / "several"
    for name in ("checkpoint-10", "checkpoint-20"):
        (several / name).mkdir(parents=True)
    assert "holds several checkpoints: checkpoint-10, checkpoint-20" in refusal(several, checked, tmp_path)
    local = tmp_path / "local"
    local.mkdir()
    (local / "pytorch_model_fsdp_0_rank1.bin").touch()
    assert "cannot be read without its ranks" in refusal(local, checked, tmp_path)
    ours = import_checkpoint(made("torch")[0], checked, tmp_path / "ours").folder
    assert "is a checkpoint of samestep already" in refusal(ours, checked, tmp_path)
    with pytest.raises(SamestepError, match="is not empty"):
        import_checkpoint(made("torch")[0], checked, tmp_path / "ours")


def test_damaged_files_beside_the_state(made: Any, folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "it"
    shutil.copytree(made("trainer")[0] / "checkpoint-3", source)
    for content in ("{", "[1]", "[" * 100_000, '{"global_step": "x"'):
        (source / "trainer_state.json").write_text(content)
        assert "trainer_state.json: cannot be read" in refusal(source, recipe(folder), tmp_path)
    (source / "trainer_state.json").unlink()
    for name in ("model.safetensors", "optimizer.pt"):
        before = (source / name).read_bytes()
        for damaged in (b"", before[:50], before[: len(before) // 2], b"\0" * 100):
            (source / name).write_bytes(damaged)
            said = refusal(source, recipe(folder), tmp_path)
            assert name in said
            assert len(said) < 500
        (source / name).write_bytes(before)
    assert import_checkpoint(source, recipe(folder), tmp_path / "out").updates == 3


def test_a_place_that_cannot_be_written(made: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SamestepError, match="cannot be written: Not a directory"):
        import_checkpoint(made("torch")[0], recipe(folder), tmp_path / "file" / "out")


@pytest.mark.parametrize("regime", ["low", "low-kahan", "low-stochastic"])
def test_a_script_in_pure_bf16_goes_on_in_a_low_regime(folder: Path, tmp_path: Path, regime: str) -> None:
    model = make_model(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    foreign.plain_steps(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "low.pt")
    checked = recipe(folder, f"precision.regime={regime}")
    found = import_checkpoint(tmp_path / "low.pt", checked, tmp_path / "out")
    values = tensors(found)
    zeros = {name: values.pop(name) for name in list(values) if name.endswith(".compensation")}
    assert_same(values, foreign.live_torch(model, optimizer))
    assert len(zeros) == (29 if regime == "low-kahan" else 0)
    assert not any(tensor.any() for tensor in zeros.values())
    assert ("the compensation of low-kahan starts at zero" in found.changed) == bool(zeros)
    train(checked, tmp_path / "run", resume_from=tmp_path / "out", stop_after=4)
    assert [record["step"] for record in steps_of(tmp_path / "run")] == [4]
