"""Reported failures of checkpoints, one test each, in one process. Rows that need ranks are in tests/distributed."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep import models, world
from samestep.checkpoint import store
from samestep.checkpoint.manifest import encoded, read_manifest, stored_file
from samestep.checkpoint.state import state_of, stored
from samestep.checkpoint.tensors import read_tensors, whole_tensors, write_tensors
from samestep.data import Examples, Loader
from samestep.engines import build
from samestep.engines.protocol import Engine, Shard
from samestep.errors import CheckpointError, EngineError
from samestep.recipe import Recipe
from samestep.training import folder as run_folder
from samestep.training import machine
from samestep.training.checkpoints import Checkpoints, Course
from samestep.training.loss_scale import DynamicScale
from samestep.training.rank import run
from samestep.training.request import Request
from tests.small_runs import make_folder, make_model

LR = 0.1


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_folder(tmp_path, rows=32)


def recipe_of(source: Path, **changes: Any) -> Recipe:
    content: dict[str, Any] = {
        "model": {"path": str(source / "model")},
        "data": {"path": str(source / "rows.jsonl"), "format": "text"},
        "precision": {"max_lost_update_share": None},
        "engine": {"name": "single", "ranks": 2},
        "train": {"steps": 6, "micro_batch": 2, "optimizer": {"lr": LR}},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        content.setdefault(section, {})[key] = value
    return Recipe.model_validate(content)


def go(recipe: Recipe, out: Path, *, resume: Path | None = None, stop_after: int | None = None) -> list[dict[str, Any]]:
    """A run, or the rest of one; its lines."""
    out.mkdir(exist_ok=True)
    if resume == out:
        run_folder.reopen(out)
    run(Request(recipe=recipe, out=out, resume=resume and store.newest(resume), stop_after=stop_after))
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    measured = ("step_seconds", "tokens_per_second_per_device", "peak_memory_bytes")
    return [{key: value for key, value in line.items() if key not in measured} for line in lines]


class Held:
    """An engine of one process, its checkpoints in `out`, and one backward pass and update on demand."""

    def __init__(self, source: Path, out: Path, **changes: Any) -> None:
        recipe, here = recipe_of(source, engine__ranks=1, **changes), world.start(timeout_seconds=60)
        model = models.load_model(recipe.model, seed=0)
        plan = build.resolve_plan(recipe, model)
        self.engine: Engine = build.build(recipe, model, plan, here)
        self.scale = DynamicScale(recipe.precision.loss_scale)
        self.monitor = self
        self.moved: list[str] = []
        examples = Examples(
            tokens=np.zeros(4, dtype=np.int32), counts=np.ones(4, dtype=bool), row_starts=np.array([0, 2, 4])
        )
        shape: dict[str, Any] = {"ranks": 1, "micro_batch": 2, "accumulation": 1, "seed": 0}
        loader = Loader(examples, **shape, shuffle=False, drop_last=False, pad_id=0)
        stepper: Any = self
        self.checkpoints = Checkpoints(Course(recipe=recipe, plan=plan, loader=loader), stepper, out, here)

    def restore(self, moved: list[str]) -> None:
        self.moved = moved

    def update(self) -> None:
        self.backward()
        self.engine.apply(LR)

    def backward(self) -> None:
        ids = torch.tensor([[3, 9, 4, 15, 1]])
        inputs = models.Inputs(input_ids=ids, labels=ids, position_ids=None, document_ids=None)
        for turn in self.engine.turns(1):
            self.engine.backward(models.loss_sum(self.engine.model, inputs, attention="sdpa")[0], turn, 1)

    def masters(self) -> dict[str, torch.Tensor]:
        return {shard.name: shard.values.clone() for shard in self.engine.masters()}


def test_p60_saved_at_step_0_the_first_update_is_still_the_rate(source: Path, tmp_path: Path) -> None:
    """AdamW's first update is lr * sign(gradient), whatever the gradient; a step too many makes it smaller."""
    saved, never, resumed = (Held(source, tmp_path / name) for name in ("saved", "never", "resumed"))
    before = never.masters()
    saved.checkpoints.save(0)
    resumed.checkpoints.resume(store.newest(tmp_path / "saved"), allow_changes=False)
    for held in (saved, never, resumed):
        held.update()
    after = never.masters()
    for name, values in before.items():
        change = (after[name] - values).abs()
        assert change.max() == pytest.approx(LR, rel=1e-4)
        assert torch.equal(saved.masters()[name], after[name])
        assert torch.equal(resumed.masters()[name], after[name])
    assert saved.engine.updates == resumed.engine.updates == 1


@pytest.mark.parametrize("regime", ["mixed", "low-kahan"])
def test_saved_between_backward_and_update_it_is_of_the_step_before(source: Path, tmp_path: Path, regime: str) -> None:
    """Complete: what was loaded takes the same next step; and inert: so does what was saved."""
    saved, never, resumed = (
        Held(source, tmp_path / n, precision__regime=regime) for n in ("saved", "never", "resumed")
    )
    for held in (saved, never):
        held.update()
        held.backward()
    saved.checkpoints.save(1)
    resumed.checkpoints.resume(store.newest(tmp_path / "saved"), allow_changes=False)
    resumed.backward()
    for held in (saved, never, resumed):
        held.engine.apply(LR)
    expected = {shard.name: shard.values for shard in state_of(never.engine)}
    for held in (saved, resumed):
        for shard in state_of(held.engine):
            assert torch.equal(shard.values, expected[shard.name]), shard.name


def test_p62_the_loss_scale_is_taken_up_as_it_was(source: Path, tmp_path: Path) -> None:
    one, other = (Held(source, tmp_path / name) for name in ("one", "other"))
    for _ in range(6):
        one.scale.overflowed()
    one.scale.went_well()
    one.checkpoints.save(1)
    assert one.scale.state() == {"value": 1024.0, "good_steps": 1}
    other.checkpoints.resume(store.newest(tmp_path / "one"), allow_changes=False)
    assert other.scale.state() == one.scale.state()


def test_p66_tied_weights_are_one_tensor_or_refused(source: Path, tmp_path: Path) -> None:
    held = Held(source, tmp_path / "run")
    names = [shard.name for shard in state_of(held.engine)]
    assert "model.model.embed_tokens.weight" in names
    assert not any("lm_head" in name for name in names)
    with pytest.raises(EngineError, match=r"embed_tokens\.weight and lm_head\.weight are one tied weight"):
        models.unit_modules(make_model(), ["LlamaDecoderLayer", "Embedding"])


SIZES = {"a": (7, 5), "odd": (13,), "one": (1, 1), "cube": (3, 2, 5)}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.booleans())
def test_p69_p73_any_number_of_ranks_reads_what_any_other_wrote(
    tmp_path_factory: pytest.TempPathFactory, writers: int, readers: int, flat: bool, reads_flat: bool
) -> None:
    """Cut by rows as FSDP does, which leaves some ranks with less, or through one flat buffer as ZeRO does."""
    folder = tmp_path_factory.mktemp("checkpoint")
    whole = {name: torch.randn(shape) for name, shape in SIZES.items()}
    write_tensors(folder, [shard for rank in range(writers) for shard in _part(whole, rank, writers, flat=flat)])
    for rank in range(readers):
        wanted = _part(whole, rank, readers, flat=reads_flat)
        found = [replace(shard, values=torch.full_like(shard.values, torch.nan)) for shard in wanted]
        read_tensors(folder, found, alone=True)
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.equal(mine.values, theirs.values)


def _part(whole: dict[str, torch.Tensor], rank: int, size: int, *, flat: bool) -> list[Shard]:
    shards, offset = [], 0
    total = sum(t.numel() for t in whole.values())
    for name, tensor in whole.items():
        if flat:
            bounds = [min(max(total * r // size - offset, 0), tensor.numel()) for r in (rank, rank + 1)]
        else:
            rows = -(-tensor.shape[0] // size)
            inner = tensor.numel() // tensor.shape[0]
            bounds = [min(rows * r, tensor.shape[0]) * inner for r in (rank, rank + 1)]
        values = tensor.reshape(-1)[bounds[0] : bounds[1]]
        if values.numel():
            shards.append(Shard(name=name, shape=tuple(tensor.shape), start=bounds[0], values=values))
        offset += tensor.numel()
    return shards


def test_p76_names_are_the_models_own_whatever_wraps_it(source: Path, tmp_path: Path) -> None:
    """Saved with activation checkpointing, taken up without; every bit as if it had never been there."""
    never = go(recipe_of(source), tmp_path / "never")
    out = tmp_path / "out"
    go(recipe_of(source, train__activation_checkpointing=True), out, stop_after=3)
    names = {name for name, p in make_model().named_parameters() if p.requires_grad}
    stored = read_manifest(store.newest(out)).tensors
    assert {name.removeprefix("model.") for name in stored if name.startswith("model.")} == names
    assert go(recipe_of(source), out, resume=out) == never


def test_p79_p80_six_steps_are_three_and_three(source: Path, tmp_path: Path) -> None:
    """32 rows, two epochs of 8 steps, stopped in the middle of the second: the same rows in the same order, and the
    same numbers to the last bit."""
    recipe = recipe_of(source, train__steps=16)
    whole = go(recipe, tmp_path / "whole")
    go(recipe, tmp_path / "out", stop_after=11)
    assert go(recipe, tmp_path / "out", resume=tmp_path / "out") == whole
    assert [line["epoch"] for line in whole] == [0] * 8 + [1] * 8


def test_p79_rows_after_a_resume_are_those_of_their_epoch() -> None:
    """A loader that never saw the steps before gives the lists of one that did."""
    shape: dict[str, Any] = {"ranks": 2, "micro_batch": 2, "accumulation": 1, "seed": 3}
    tokens = np.arange(64, dtype=np.int32)
    examples = Examples(tokens=tokens, counts=np.ones(64, dtype=bool), row_starts=np.arange(0, 65, 2))
    one, other = (Loader(examples, **shape, shuffle=True, drop_last=False, pad_id=0) for _ in range(2))
    whole = [one.step(index).rows.tolist() for index in range(16)]
    assert [other.step(index).rows.tolist() for index in range(12, 16)] == whole[12:]
    for epoch in (0, 1):
        assert sorted(row for rows in whole[8 * epoch : 8 * epoch + 8] for row in rows) == list(range(32))
    assert whole[:8] != whole[8:]


def _with_state(held: Held, out: Path, dtype: torch.dtype) -> Path:
    """The newest checkpoint of a run with one more tensor in the optimizer's state of every parameter."""
    folder = store.newest(out)
    manifest = read_manifest(folder)
    whole = dict(whole_tensors(folder, manifest.tensors))
    for shard in held.engine.masters():
        whole[f"optim.state.{shard.name}.scales"] = torch.ones(shard.shape, dtype=dtype)
    for path in folder.iterdir():
        path.unlink()
    listed = [Shard(name=n, shape=tuple(t.shape), start=0, values=t.reshape(-1)) for n, t in whole.items()]
    write_tensors(folder, listed)
    files = {path.name: stored_file(path) for path in folder.iterdir()}
    (folder / "manifest.json").write_text(encoded(replace(manifest, tensors=stored(listed), files=files)))
    return folder


def test_p81_state_that_the_optimizer_does_not_have_is_refused(source: Path, tmp_path: Path) -> None:
    held = Held(source, tmp_path / "run")
    held.update()
    held.checkpoints.save(1)
    folder = _with_state(held, tmp_path / "run", torch.int8)
    other = Held(source, tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"optim\.state\..*\.scales is torch\.int8 .* but the run's is"):
        other.checkpoints.resume(folder, allow_changes=False)


def test_p81_compensation_comes_back_bit_for_bit(source: Path, tmp_path: Path) -> None:
    """low-kahan keeps what its bf16 weights cannot hold."""
    one, other = (Held(source, tmp_path / name, precision__regime="low-kahan") for name in ("one", "other"))
    for _ in range(3):
        one.update()
    one.checkpoints.save(3)
    other.checkpoints.resume(store.newest(tmp_path / "one"), allow_changes=False)
    kept = {shard.name: shard.values for shard in state_of(one.engine)}
    assert any(name.endswith(".compensation") and values.abs().max() > 0 for name, values in kept.items())
    for shard in state_of(other.engine):
        assert torch.equal(shard.values, kept[shard.name]), shard.name


def test_a_checkpoint_in_the_background_is_of_its_step(source: Path, tmp_path: Path) -> None:
    """What the training changes while files are written is not in them."""
    held = Held(source, tmp_path / "run", checkpoint__asynchronous=True)
    states = []
    for step in (1, 2, 3):
        held.update()
        states.append({shard.name: shard.values.clone() for shard in state_of(held.engine)})
        held.checkpoints.save(step)
        held.update()
    held.checkpoints.finish()
    for folder in store.complete(tmp_path / "run" / "checkpoints"):
        manifest = read_manifest(folder)
        found = dict(whole_tensors(folder, manifest.tensors))
        assert found.keys() == states[manifest.step - 1].keys()
        for name, values in states[manifest.step - 1].items():
            assert torch.equal(found[name].reshape(-1), values)
    assert [folder.name for folder in store.complete(tmp_path / "run" / "checkpoints")] == [
        "step-00000002",
        "step-00000003",
    ]


def test_p84_one_tensor_at_a_time_is_copied_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of larger tensors, as ZeRO has them, are copied to be written: no more than one is there at a time."""
    whole = torch.randn(40, 1000)
    shards = [Shard(name=f"w{n}", shape=(1000,), start=0, values=whole[n]) for n in range(40)]
    written: list[weakref.ref[Any]] = []
    most = 0

    def note(tensor: torch.Tensor, file: Any) -> None:
        nonlocal most
        assert tensor.untyped_storage().size() == tensor.nbytes
        written.append(weakref.ref(tensor))
        most = max(most, sum(copy() is not None for copy in written))
        save(tensor, file)

    save = torch.save
    monkeypatch.setattr(torch, "save", note)
    write_tensors(tmp_path, shards)
    assert len(written) == 40
    assert most <= 2


def test_p112_the_numbers_of_memory_are_apart(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(recipe_of(source, train__steps=1), tmp_path / "out")
    found = json.loads((tmp_path / "out" / "summary.json").read_text())["memory_bytes"]
    assert found["peak_resident"] >= 0.9 * found["resident"] > 10**8
    numbers = {"memory_allocated": 1, "max_memory_allocated": 2, "memory_reserved": 3, "max_memory_reserved": 4}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    assert machine.memory(torch.device("cuda")) == {
        "allocated": 1,
        "peak_allocated": 2,
        "reserved": 3,
        "peak_reserved": 4,
    }
