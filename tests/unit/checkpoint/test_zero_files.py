"""DeepSpeed's flat partitions, as named tensors: every element where it belongs, whatever the ranks and shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from samestep.checkpoint.importing import match, recognise
from samestep.checkpoint.importing.match import Target
from samestep.errors import CheckpointError
from tests.unit.checkpoint.zero_layouts import KEYS, build

SHAPES = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6)


def values_of(shapes: list[tuple[int, ...]]) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {f"p{i}": {key: torch.randn(shape, generator=generator) for key in KEYS} for i, shape in enumerate(shapes)}


@settings(max_examples=30, deadline=None)
@given(shapes=SHAPES, ranks=st.integers(1, 5), stage=st.sampled_from([1, 2, 3]), cut=st.integers(0, 6))
def test_every_element_is_found(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], ranks: int, stage: int, cut: int
) -> None:
    """Two groups, in another order than the names; the second may be empty, and then there is one."""
    values = values_of(shapes)
    names = list(values)[::-1]
    groups = [group for group in (names[:cut], names[cut:]) if group]
    folder = build(tmp_path_factory.mktemp("zero"), stage, values, groups, ranks=ranks)
    source = recognise.read(folder)
    assert source.kind == f"DeepSpeed ZeRO-{stage}"
    assert (source.updates, source.step, source.ranks) == ({7}, 9, ranks)
    for name, tensors in values.items():
        assert torch.equal(source.weights[name].read(), tensors["fp32"])
        for key in KEYS[1:]:
            assert torch.equal(source.states[name][key].read(), tensors[key])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_weights_are_complete(tmp_path: Path, stage: int) -> None:
    frozen = {"f": torch.arange(7.0).bfloat16()}
    source = recognise.read(build(tmp_path, stage, values_of([(3, 2)]), [["p0"]], ranks=2, frozen=frozen))
    assert torch.equal(source.weights["f"].read(), frozen["f"])
    assert "f" not in source.states


@pytest.mark.parametrize("step", [7, torch.tensor(7.0), 7.0])
def test_a_step_of_any_type(tmp_path: Path, step: Any) -> None:
    """Fused optimizers count in ints, torch's in tensors."""
    assert recognise.read(build(tmp_path, 2, values_of([(3, 2)]), [["p0"]], ranks=2, step=step)).updates == {7}


def target(values: dict[str, dict[str, torch.Tensor]]) -> Target:
    return Target(
        trainable={name: tuple(tensors["fp32"].shape) for name, tensors in values.items()},
        frozen={},
        aliases={},
        keys=frozenset(KEYS[1:]),
        dtype=torch.float32,
    )


def test_masters_and_not_their_rounded_copies(tmp_path: Path) -> None:
    values = values_of([(5, 3), (4,)])
    matched = match.match(recognise.read(build(tmp_path, 1, values, [["p1", "p0"]], ranks=2)), target(values))
    weight = matched.weights["p0"].read()
    assert weight.dtype == torch.float32
    assert torch.equal(weight, values["p0"]["fp32"])
    assert not torch.equal(weight, values["p0"]["fp32"].bfloat16().float())


def test_masters_in_another_order_than_said_are_refused(tmp_path: Path) -> None:
    """P77: a master that does not round to the weight beside it belongs to another parameter."""
    values = values_of([(3, 2), (3, 2)])
    folder = build(tmp_path, 2, values, [["p0", "p1"]], ranks=2)
    path = folder / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    content["param_shapes"] = [dict(reversed(content["param_shapes"][0].items()))]
    torch.save(content, path)
    matched = match.match(recognise.read(folder), target(values))
    with pytest.raises(CheckpointError, match="a master of p0 that does not round to the weight beside it"):
        matched.weights["p0"].read()


def changed(folder: Path, pattern: str, **changes: Any) -> None:
    for path in folder.glob(pattern):
        torch.save({**torch.load(path, weights_only=False), **changes}, path)


def test_folders_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    values = values_of([(3, 2), (4,)])

    def fresh(name: str, stage: int = 3) -> Path:
        return build(tmp_path / name, stage, values, [["p0", "p1"]], ranks=3)

    folder = fresh("missing")
    (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks the file optim_states\.pt of rank 1"):
        recognise.read(folder)
    folder = fresh("last")
    (folder / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="has 3 model files for 2 ranks"):
        recognise.read(folder)
    folder = fresh("last of two", 2)
    (folder / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="was saved by 3 ranks, but has files of 2"):
        recognise.read(folder)
    folder = fresh("parallel")
    (folder / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt").touch()
    with pytest.raises(CheckpointError, match="tensor, pipeline and expert parallel checkpoints are not supported"):
        recognise.read(folder)
    folder = fresh("shapes")
    changed(folder, "*_model_states.pt", param_shapes=[{"p0": torch.Size([3, 2])}])
    with pytest.raises(CheckpointError, match="has 2 elements in sub-group 0 by its shapes"):
        recognise.read(folder)
    folder = fresh("short", 1)
    changed(folder, "*_model_states.pt", param_shapes=[{"p0": torch.Size([30, 2]), "p1": torch.Size([4])}])
    with pytest.raises(CheckpointError, match="p0 does not lie in the 2 elements that rank 2 has"):
        recognise.read(folder)
    folder = fresh("elastic", 1)
    changed(folder, "*_optim_states.pt", optimizer_state_dict={"base_optimizer_state": []})
    with pytest.raises(CheckpointError, match="not the layout of a ZeRO optimizer file"):
        recognise.read(folder)
    folder = fresh("cut")
    path = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(CheckpointError, match="cannot be read"):
        recognise.read(folder)


def test_updates_that_differ_are_refused(tmp_path: Path) -> None:
    values = values_of([(3, 2)])
    folder = build(tmp_path, 2, values, [["p0"]], ranks=2)
    path = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(path, weights_only=False)
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] = 8
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="parameters with 7 and with 8 updates"):
        match.match(recognise.read(folder), target(values))


def test_what_is_left_behind_is_said(tmp_path: Path) -> None:
    folder = build(tmp_path, 2, values_of([(3, 2)]), [["p0"]], ranks=1, lr_scheduler={"last_epoch": 9}, mine={"a": 1})
    assert set(recognise.read(folder).left) == {"lr_scheduler, in the model file", "mine, in the model file"}


def test_inside_the_folders_of_a_trainer_and_of_accelerate(tmp_path: Path) -> None:
    """The engine's masters are taken, not the 16-bit model beside them, with a Trainer's own count of steps."""
    values = values_of([(3, 2)])
    inner = tmp_path / "output" / "checkpoint-11"
    build(inner, 2, values, [["p0"]], ranks=2)
    (inner / "trainer_state.json").write_text('{"global_step": 11}')
    save_file({"p0": values["p0"]["fp32"].bfloat16()}, inner / "model.safetensors")
    (inner / "rng_state_0.pth").touch()
    for path in (tmp_path / "output", inner):
        source = recognise.read(path)
        assert (source.kind, source.step) == ("DeepSpeed ZeRO-2", 11)
        assert torch.equal(source.weights["p0"].read(), values["p0"]["fp32"])
        assert "the random states (rng_state_0.pth)" in source.left
    build(tmp_path / "state", 3, values, [["p0"]], ranks=2).rename(tmp_path / "state" / "pytorch_model")
    (tmp_path / "state" / "latest").write_text("pytorch_model\n")
    (tmp_path / "state" / "random_states_0.pkl").touch()
    source = recognise.read(tmp_path / "state")
    assert (source.kind, source.step) == ("DeepSpeed ZeRO-3", 9)
    assert source.left == ["the random states (random_states_0.pkl)"]
