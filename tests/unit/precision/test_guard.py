"""The guard refuses runs whose updates would be lost, says how to go on, and keeps out of the way of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep import world
from samestep.cli import main
from samestep.engines.protocol import Shard
from samestep.errors import PrecisionError
from samestep.recipe import load
from samestep.training.guard import refuse_lost_updates, refuse_recipe
from samestep.world import World
from tests.small_runs import assert_short_message, change, half_written, make_folder, steps_of

HERE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
BF16 = torch.bfloat16


def shard(values: torch.Tensor) -> Shard:
    return Shard(name="w", shape=tuple(values.shape), start=0, values=values)


def test_it_refuses_above_the_limit_and_not_at_it() -> None:
    """Three of four weights are ones, which 1e-3 cannot move; zeros move by anything."""
    masters = [shard(torch.ones(300, dtype=BF16)), shard(torch.zeros(100, dtype=BF16))]
    for limit in (0.75, 0.9, 1.0, None):
        refuse_lost_updates(masters, peak_lr=1e-3, limit=limit, world=HERE)
    for limit in (0.0, 0.5, 0.749):
        with pytest.raises(PrecisionError) as caught:
            refuse_lost_updates(masters, peak_lr=1e-3, limit=limit, world=HERE)
        assert "75%" in str(caught.value)
        assert "0.001" in str(caught.value)


def test_it_names_the_ways_out() -> None:
    with pytest.raises(PrecisionError) as caught:
        refuse_lost_updates([shard(torch.ones(10, dtype=BF16))], peak_lr=1e-3, limit=0.5, world=HERE)
    assert caught.value.exit_code == 2
    text = str(caught.value) + (caught.value.remedy or "")
    for way in ("mixed", "mixed-stochastic", "low-stochastic", "low-kahan", "max_lost_update_share: null"):
        assert way in text


def test_float8_with_bf16_masters_names_its_own_way_out() -> None:
    masters = [shard(torch.ones(10, dtype=BF16))]
    with pytest.raises(PrecisionError, match=r"Set precision\.fp8\.master: float32\."):
        refuse_lost_updates(masters, peak_lr=1e-3, limit=0.5, world=HERE, regime="mixed-fp8")


def test_fp32_masters_pass() -> None:
    refuse_lost_updates([shard(torch.ones(1000))], peak_lr=1e-5, limit=0.01, world=HERE)


def test_parameters_count_by_their_samples() -> None:
    """A large parameter is sampled: half of this one, in an alternating pattern that samples do not fall into."""
    values = torch.ones(300_000, dtype=BF16)
    values[torch.rand(300_000, generator=torch.Generator().manual_seed(0)) < 0.5] = 0.0
    refuse_lost_updates([shard(values)], peak_lr=1e-3, limit=0.52, world=HERE)
    with pytest.raises(PrecisionError):
        refuse_lost_updates([shard(values)], peak_lr=1e-3, limit=0.48, world=HERE)


Run = Callable[[dict[str, Any]], tuple[int, str, Path]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a bf16 model in regime low at 1e-6 with changed fields; exit code, standard error, run folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = make_folder(tmp_path, dtype=BF16)

    def go(changes: dict[str, Any]) -> tuple[int, str, Path]:
        base = {"precision.regime": "low", "precision.max_lost_update_share": 0.5, "train.optimizer.lr": 1e-6}
        change(folder, base | changes)
        capfd.readouterr()
        code = main(["train", "r.yaml", "--out", "out"])
        return code, capfd.readouterr().err, folder / "out"

    threads = torch.get_num_threads()
    yield go
    world.stop()
    torch.set_num_threads(threads)


def test_a_refused_run_takes_no_step(run: Run) -> None:
    code, err, out = run({})
    assert code == 2
    assert_short_message(err, "would be lost", "bfloat16", "1e-06", "mixed-stochastic", "max_lost_update_share: null")
    assert half_written(out) == []
    assert not (out / "steps.jsonl").exists()


def test_the_message_names_the_field(run: Run) -> None:
    _, err, _ = run({})
    assert "precision.regime" in err


@pytest.mark.parametrize(
    "changes",
    [
        {"precision.max_lost_update_share": None},
        {"precision.max_lost_update_share": 1.0},
        {"precision.regime": "low-stochastic"},
        {"precision.regime": "low-kahan"},
        {"precision.regime": "mixed"},
        {"precision.regime": "mixed-stochastic"},
        {"train.optimizer": {"name": "sgd", "lr": 1e-6}},
        {"train.optimizer.lr": 0.01},
    ],
    ids=str,
)
def test_these_run(run: Run, changes: dict[str, Any]) -> None:
    code, err, out = run(changes)
    assert (code, len(steps_of(out))) == (0, 2), err


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision.max_lost_update_share": None},
        {"precision.regime": "low-kahan"},
        {"precision.regime": "mixed"},
        {"train.optimizer": {"name": "sgd", "lr": 1e-6}},
        {"train.optimizer.lr": 0.01},
        {"train.steps": None, "train.epochs": 0.5, "train.schedule": {"name": "linear", "warmup_steps": 100}},
    ],
    ids=str,
)
def test_asked_beforehand_it_says_what_the_run_would(run: Run, changes: dict[str, Any]) -> None:
    code, err, out = run(changes)
    said = ""
    try:
        refuse_recipe(load(out.parent / "r.yaml"))
    except PrecisionError as error:
        said = f"error: {error}\n"
    assert (code, err if code else "") == (2 if said else 0, said)


def test_the_override_says_what_is_lost(run: Run) -> None:
    """With the guard off, the share of lost updates is still measured and recorded."""
    code, _, out = run({"precision.max_lost_update_share": None})
    assert code == 0
    assert steps_of(out)[0]["lost_update_share"] > 0.9


def test_the_highest_rate_of_the_schedule_counts(run: Run) -> None:
    """A warm-up starts far below; a schedule whose warm-up never ends would be judged by what it reaches."""
    schedule = {"name": "linear", "warmup_steps": 2}
    code, _, _ = run({"train.schedule": schedule, "train.optimizer.lr": 0.01})
    assert code == 0
