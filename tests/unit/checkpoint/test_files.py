"""What is on the disk: complete or not there, checked by digest, and never trusted."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from samestep.checkpoint import store
from samestep.checkpoint.difference import differences
from samestep.checkpoint.manifest import damages, read_manifest
from samestep.checkpoint.metadata import read_metadata
from samestep.checkpoint.tensors import read_tensors, whole_tensors
from samestep.engines.protocol import Shard
from samestep.errors import CheckpointError, OutputError
from tests.unit.checkpoint.small import manifest, save, shards, tensors


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    found = dict(whole_tensors(folder, read_manifest(folder).tensors))
    assert found.keys() == tensors(3).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(3).items())
    assert read_manifest(folder).moved == ["w"]
    assert (tmp_path / "latest").read_text() == "step-00000003\n"


def test_a_slice_is_read_from_the_middle(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    part = torch.zeros(17)
    read_tensors(folder, [Shard(name="model.w", shape=(5, 7), start=9, values=part)])
    assert torch.equal(part, tensors(1)["model.w"].reshape(-1)[9:26])


def test_torch_reads_it_without_us(tmp_path: Path) -> None:
    """It is plain DCP, with the tensors' own names and shapes."""
    folder = save(tmp_path, 1)
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(1).items())


def test_old_ones_go_when_a_new_one_is_complete(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert [path.name for path in store.complete(tmp_path)] == ["step-00000003", "step-00000004"]
    assert store.newest(tmp_path / "step-00000003").name == "step-00000003"


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 5)
    folder = save(tmp_path, 1, tensors(9))
    assert [path.name for path in store.complete(tmp_path)] == ["step-00000001"]  # what came after is another course
    assert torch.equal(dict(whole_tensors(folder, read_manifest(folder).tensors))["model.w"], tensors(9)["model.w"])


def _flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("place", [0, 100, -1])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_flipped_bit_is_found_and_named(tmp_path: Path, name: str, place: int) -> None:
    folder = save(tmp_path, 1)
    assert damages(folder, read_manifest(folder)) == []
    _flip(folder / name, place)
    (found,) = damages(folder, read_manifest(folder))
    assert found.startswith(f"{name}: other contents")


def test_a_truncated_and_a_missing_file_are_found_and_named(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    data = folder / "__0_0.distcp"
    os.truncate(data, data.stat().st_size - 1)
    (folder / ".metadata").unlink()
    missing, short = damages(folder, read_manifest(folder))
    assert missing == ".metadata: No such file or directory"
    assert short.startswith("__0_0.distcp: has ")
    assert damages(folder, read_manifest(folder), part=1, parts=2) == [short]


def _changed(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_manifest_that_was_changed_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    _changed(folder, step=2)
    with pytest.raises(CheckpointError, match="is damaged: its own digest"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a manifest"),
        ('{"format": "samestep", "version": 99}', "has format version 99"),
        ('{"format": "samestep", "version": "1"}', "has format version 1"),
        ("\x00", "cannot be read"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: str, what: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=what):
        read_manifest(tmp_path)


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        store.newest(tmp_path)
    with pytest.raises(CheckpointError, match="is not a checkpoint of samestep"):
        read_manifest(tmp_path)


class _Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/samestep-must-not-exist",)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    marker = Path("/tmp/samestep-must-not-exist")
    marker.unlink(missing_ok=True)
    (folder / ".metadata").write_bytes(pickle.dumps(_Malicious()))
    with pytest.raises(CheckpointError, match=r"posix\.system has no place in a checkpoint"):
        read_metadata(folder)
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        read_tensors(folder, shards(tensors()), alone=True)
    assert not marker.exists()


def test_a_tensor_file_that_would_run_something_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    metadata = read_metadata(folder)
    place = next(iter(metadata.storage_data.values()))
    marker = Path("/tmp/samestep-must-not-exist")
    marker.unlink(missing_ok=True)
    torch.save(_Malicious(), folder / "bad")
    content = (folder / "bad").read_bytes()
    (folder / place.relative_path).write_bytes(content)
    for entry in metadata.storage_data.values():
        entry.offset, entry.length = 0, len(content)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="rank 0 cannot read it"):
        read_tensors(folder, shards(tensors()), alone=True)
    assert not marker.exists()


def test_metadata_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    metadata = read_metadata(folder)
    for entry in metadata.storage_data.values():
        entry.relative_path = "../../secret"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="points outside of its folder"):
        read_metadata(folder)


@pytest.mark.parametrize("with_end", [True, False])
def test_metadata_that_changes_a_class_is_refused(tmp_path: Path, with_end: bool) -> None:
    """Else it could tell the check of paths that every path has the name that it points to."""
    folder = save(tmp_path, 1)
    metadata = read_metadata(folder)
    for entry in metadata.storage_data.values():
        entry.relative_path = "../secret"
    content = pickle.dumps(metadata, protocol=2)
    # The class itself, then (None, {"name": ...}) as what to set on it.
    change = b"cpathlib\nPosixPath\nN}U\x04nameU\x09../secrets\x86b0"
    (folder / ".metadata").write_bytes(content[:2] + change + (content[2:] if with_end else b""))
    before = dict(vars(PosixPath))
    try:
        with pytest.raises(CheckpointError, match=r"changes pathlib\.PosixPath, which has no place in a checkpoint"):
            read_metadata(folder)
        assert dict(vars(PosixPath)) == before
    finally:
        if "name" in vars(PosixPath):
            del PosixPath.name


@pytest.mark.parametrize(
    ("shard", "what"),
    [
        (Shard(name="model.x", shape=(5, 7), start=0, values=torch.zeros(35)), "holds no tensor model.x"),
        (Shard(name="model.w", shape=(7, 5), start=0, values=torch.zeros(35)), r"is torch.float32 \[5, 7\]"),
        (Shard(name="model.w", shape=(5, 7), start=0, values=torch.zeros(35).bfloat16()), "but the run's is"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, shard: Shard, what: str) -> None:
    with pytest.raises(CheckpointError, match=what):
        read_tensors(save(tmp_path, 1), [shard], alone=True)


def test_differences_are_named(tmp_path: Path) -> None:
    one, other = tensors(), tensors()
    other["model.w"][2, 3] += 0.5
    del other["model.b"]
    other["optim.state.b.exp_avg"] = other["optim.state.b.exp_avg"].float()
    a, b = save(tmp_path / "a", 1, one), save(tmp_path / "b", 1, other)
    assert differences(a, a) == []
    found = {difference.name: difference for difference in differences(a, b)}
    assert found["model.b"].what == "only in the first"
    assert found["optim.state.b.exp_avg"].what == "bfloat16 [3] and float32 [3]"
    assert (found["model.w"].elements, found["model.w"].gap) == (1, 0.5)
    assert len(found) == 3


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written: Not a directory"):
        store.begin(tmp_path / "file" / "checkpoints", 1)


OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}


def _die_at(operation: int, folder: Path) -> None:
    """Kills this process at its n-th operation on files of the folder."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in OPERATIONS and (event in ("os.remove", "os.rmdir") or str(arguments[0]).startswith(str(folder))):
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _killed_at(operation: int, folder: Path, step: int, whole: dict[str, torch.Tensor] | None = None) -> bool:
    """Whether a process that saves was killed at this operation; otherwise it has saved and had no more of them."""
    child = os.fork()
    if not child:
        _die_at(operation, folder)
        try:
            save(folder, step, whole, keep=1)
        finally:
            os._exit(0 if sys.exception() is None else 1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_killed_at_any_operation_there_is_a_whole_one(tmp_path: Path) -> None:
    """A process that saves is killed at its first operation on files, at its second, and so on to its last."""
    save(tmp_path, 1, keep=1)
    step, operation, left_behind, killed = 1, 0, 0, True
    while killed:
        operation += 1
        killed = _killed_at(operation, tmp_path, step + 1)
        left_behind += any(path.name.endswith(".partial") for path in tmp_path.iterdir())
        found = store.complete(tmp_path)
        assert found
        for folder in found:
            assert damages(folder, read_manifest(folder)) == []
        newest = found[-1]
        assert read_manifest(newest).step >= step  # nothing that was complete is lost
        step = read_manifest(newest).step
        restored = dict(whole_tensors(newest, read_manifest(newest).tensors))
        assert all(torch.equal(restored[name], tensor) for name, tensor in tensors(step).items())
    assert left_behind > 5  # it was killed while writing
    assert operation - left_behind > 5  # and after
    save(tmp_path, step + 1)
    assert not list(tmp_path.glob(".*"))  # leftovers are cleared


def test_killed_while_the_same_step_is_saved_again(tmp_path: Path) -> None:
    """Between two renames no folder has the step's name; the one that was there gets it back."""
    save(tmp_path, 1, keep=1)
    operation, killed, nameless, replaced = 0, True, 0, 0
    while killed:
        operation += 1
        killed = _killed_at(operation, tmp_path, 1, tensors(operation + 1))
        nameless += not store.complete(tmp_path)
        newest = store.newest(tmp_path)
        assert damages(newest, read_manifest(newest)) == []
        found = dict(whole_tensors(newest, read_manifest(newest).tensors))["model.w"]
        replaced += torch.equal(found, tensors(operation + 1)["model.w"])
    assert nameless == 1
    assert replaced > 1
    save(tmp_path, 1)
    assert not list(tmp_path.glob(".*"))


def test_the_manifest_knows_its_tensors() -> None:
    described = manifest(1, tensors())
    assert described.tensors["model.b"].dtype == "bfloat16"
    assert described.tensors["model.w"].shape == [5, 7]
