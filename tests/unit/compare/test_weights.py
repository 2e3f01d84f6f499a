"""Gaps between files of masters, worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from samestep.compare import weights
from samestep.compare.weights import compare_weights
from samestep.errors import OutputError


def saved(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path)
    return path


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.0, -2.0]), "c": torch.tensor(3.0)}


def test_equal_files(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    gap = compare_weights(saved(tmp_path / "x", **tensors), saved(tmp_path / "y", **tensors))
    assert (gap.equal_bits, gap.largest, gap.tensor) == (True, 0.0, None)


def test_the_largest_gap_and_its_tensor(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    other = {**tensors, "a": tensors["a"] + 0.25, "b": tensors["b"] - torch.tensor([0.0, 0.5])}
    gap = compare_weights(saved(tmp_path / "x", **tensors), saved(tmp_path / "y", **other))
    assert (gap.equal_bits, gap.largest, gap.tensor) == (False, 0.5, "b")


def test_one_unit_in_the_last_place_of_one_element(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    other = {**tensors, "b": torch.tensor([1.0 + 2.0**-23, -2.0])}
    gap = compare_weights(saved(tmp_path / "x", **tensors), saved(tmp_path / "y", **other))
    assert (gap.equal_bits, gap.largest, gap.tensor) == (False, 2.0**-23, "b")


def test_large_tensors_are_compared_to_their_ends(
    tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_SLICE", 4)
    changed = tensors["a"].clone()
    changed[1, 2] += 1.0
    gap = compare_weights(saved(tmp_path / "x", **tensors), saved(tmp_path / "y", **{**tensors, "a": changed}))
    assert (gap.largest, gap.tensor) == (1.0, "a")


def test_the_same_values_in_another_dtype_are_not_the_same_bits(tmp_path: Path) -> None:
    ours, theirs = torch.tensor([1.0, 0.5]), torch.tensor([1.0, 0.5], dtype=torch.bfloat16)
    gap = compare_weights(saved(tmp_path / "x", a=ours), saved(tmp_path / "y", a=theirs))
    assert (gap.equal_bits, gap.largest) == (False, 0.0)


def test_the_gap_between_dtypes_is_exact(tmp_path: Path) -> None:
    # 1 + 2**-10 is no bfloat16: the nearest one is 1.
    value = torch.tensor([1.0 + 2.0**-10])
    gap = compare_weights(saved(tmp_path / "x", a=value), saved(tmp_path / "y", a=value.to(torch.bfloat16)))
    assert gap.largest == 2.0**-10


def test_zeros_of_both_signs(tmp_path: Path) -> None:
    gap = compare_weights(saved(tmp_path / "x", a=torch.tensor([0.0])), saved(tmp_path / "y", a=torch.tensor([-0.0])))
    assert (gap.equal_bits, gap.largest) == (False, 0.0)


def test_equal_bits_that_are_not_numbers(tmp_path: Path) -> None:
    value = torch.tensor([math.nan, math.inf])
    assert compare_weights(saved(tmp_path / "x", a=value), saved(tmp_path / "y", a=value.clone())).equal_bits


def test_a_gap_that_is_not_finite_has_no_size(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    other = {**tensors, "b": torch.tensor([1.0, math.nan])}
    gap = compare_weights(saved(tmp_path / "x", **tensors), saved(tmp_path / "y", **other))
    assert (gap.equal_bits, gap.largest, gap.tensor) == (False, None, "b")


def test_a_tensor_of_one_side_only(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    fewer = {name: tensor for name, tensor in tensors.items() if name != "b"}
    gap = compare_weights(saved(tmp_path / "x", **tensors), saved(tmp_path / "y", **fewer))
    assert (gap.equal_bits, gap.largest, gap.tensor) == (False, None, "b")


def test_another_shape(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    other = {**tensors, "a": tensors["a"].reshape(3, 2).contiguous()}
    gap = compare_weights(saved(tmp_path / "x", **tensors), saved(tmp_path / "y", **other))
    assert (gap.equal_bits, gap.largest, gap.tensor) == (False, None, "a")


@pytest.mark.parametrize("content", [None, b"", b"not safetensors at all"])
def test_a_file_that_cannot_be_read(tmp_path: Path, tensors: dict[str, torch.Tensor], content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "y").write_bytes(content)
    with pytest.raises(OutputError, match="cannot be compared"):
        compare_weights(saved(tmp_path / "x", **tensors), tmp_path / "y")
