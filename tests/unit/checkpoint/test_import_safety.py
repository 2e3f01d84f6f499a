"""No file of a foreign checkpoint gets to run anything: one that tries is refused, whatever its place in the folder."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.checkpoint.importing import pickles, recognise
from samestep.errors import CheckpointError
from tests.unit.checkpoint import foreign
from tests.unit.checkpoint.zero_layouts import KEYS, build


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._marker}",)


def zero_folder(stage: int) -> Callable[[Path], Any]:
    values = {"p": {key: torch.randn(3, 2) for key in KEYS}}
    return lambda out: build(out, stage, values, [["p"]], ranks=2)


def universal(out: Path) -> None:
    place = out / "zero" / "p"
    place.mkdir(parents=True)
    for key in KEYS:
        torch.save({"param": torch.randn(3, 2)}, place / f"{key}.pt")
    torch.save(torch.tensor(3.0), place / "step.pt")
    torch.save({"param_groups": [{"params": [0], "lr": 1.0}]}, out / "zero" / "optimizer_state.pt")
    torch.save({"global_steps": 3}, out / "mp_rank_00_model_states.pt")


def fsdp_full(out: Path) -> None:
    out.mkdir()
    torch.save({"p": torch.randn(3, 2)}, out / "pytorch_model_fsdp.bin")
    state = {"p": {"step": torch.tensor(3.0), **{key: torch.randn(3, 2) for key in KEYS[1:]}}}
    torch.save({"state": state, "param_groups": [{"params": ["p"]}]}, out / "optimizer.bin")


def sharded(out: Path) -> None:
    import torch.distributed.checkpoint as dcp

    for name, content in (("pytorch_model_fsdp_0", "model"), ("optimizer_0", "optimizer")):
        dcp.save({content: {"p": torch.randn(3, 2), "param_groups": ["x"]}}, checkpoint_id=out / name)


MAKERS: dict[str, Callable[[Path], Any]] = {
    "zero2": zero_folder(2),
    "zero3": zero_folder(3),
    "universal": universal,
    "fsdp full": fsdp_full,
    "fsdp sharded": sharded,
    "accelerate, pickled": lambda out: foreign.accelerate(out, safe=False),
    "trainer": foreign.trainer,
}
# Never opened, so that what is in them does not matter.
UNREAD = ("random_states_0.pkl", "rng_state.pth", "scheduler.bin", "scheduler.pt", "training_args.bin")


@pytest.mark.parametrize("kind", MAKERS)
def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path, kind: str) -> None:
    """Every pickle of the folder in its turn is replaced."""
    marker = tmp_path / "ran"
    MAKERS[kind](tmp_path / "it")
    recognise.read(tmp_path / "it")
    files = [
        p for p in sorted((tmp_path / "it").rglob("*")) if p.is_file() and p.suffix in (".pt", ".bin", ".pth", ".pkl")
    ]
    files += list((tmp_path / "it").rglob(".metadata"))
    assert files
    for path in files:
        before = path.read_bytes()
        for protocol in (2, 4):
            if path.name == ".metadata":
                path.write_bytes(pickle.dumps(Payload(marker), protocol=protocol))
            else:
                torch.save({"x": Payload(marker)}, path, pickle_protocol=protocol)
            if path.name in UNREAD:
                recognise.read(tmp_path / "it")
            else:
                with pytest.raises(CheckpointError, match=r"posix\.system|cannot be read") as caught:
                    recognise.read(tmp_path / "it")
                assert path.name in str(caught.value)
        path.write_bytes(before)
    assert not marker.exists()
    recognise.read(tmp_path / "it")


def test_a_tensor_file_of_a_sharded_checkpoint_that_would_run_something(tmp_path: Path) -> None:
    sharded(tmp_path / "it")
    source = recognise.read(tmp_path / "it")
    torch.save(Payload(tmp_path / "ran"), tmp_path / "bad")
    for path in (tmp_path / "it").rglob("*.distcp"):
        path.write_bytes((tmp_path / "bad").read_bytes().ljust(path.stat().st_size, b"\0"))
    with pytest.raises(CheckpointError):
        source.weights["model.p"].read()
    assert not (tmp_path / "ran").exists()


def test_old_formats_are_held_to_the_same(tmp_path: Path) -> None:
    """A bare pickle, and torch's format from before zip files, which cannot be mapped."""
    marker = tmp_path / "ran"
    (tmp_path / "bare.pt").write_bytes(pickle.dumps({"x": Payload(marker)}, protocol=2))
    torch.save({"x": Payload(marker)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("bare.pt", "old.pt"):
        with pytest.raises(CheckpointError):
            pickles.load(tmp_path / name)
    torch.save({"x": torch.arange(3)}, tmp_path / "good.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(pickles.load(tmp_path / "good.pt")["x"], torch.arange(3))
    assert not marker.exists()


def test_stand_ins_are_inert(tmp_path: Path) -> None:
    """DeepSpeed's objects come in as what they hold, without DeepSpeed's code; others of its names do not come in."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    scaler = DynamicLossScaler(16.0, 5, 1.0, 1, False, dtype=torch.float16)
    torch.save({"a": fragment_address(numel=4, start=2), "s": scaler, "z": ZeroStageEnum(2)}, tmp_path / "good.pt")
    found = pickles.load(tmp_path / "good.pt")
    assert (found["a"].start, found["a"].numel, found["s"].cur_scale, found["z"]) == (2, 4, 16.0, 2)
    assert {type(value).__module__ for value in found.values()} == {"samestep.checkpoint.importing.pickles", "builtins"}
    torch.save({"c": DeepSpeedZeroConfig()}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match=r"asks for deepspeed\.runtime\.zero\.config\.DeepSpeedZeroConfig"):
        pickles.load(tmp_path / "bad.pt")


def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    fsdp_full(tmp_path / "it")
    (tmp_path / "it" / "pytorch_model_fsdp.bin").unlink()
    index = tmp_path / "it" / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"p": "../secret.bin"}}')
    with pytest.raises(CheckpointError, match="points outside of its folder"):
        recognise.read(tmp_path / "it")
