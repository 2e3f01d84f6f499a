"""The verdict of a cross-check, and what it runs, without ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from samestep.crosscheck.check import check, compared
from samestep.crosscheck.configs import launcher, runnable
from samestep.crosscheck.side import Observed
from samestep.migrate import MigrationError, migrate, read, read_as
from samestep.recipe import parse

SEEN = Observed(master="float32", moments="float32", compute="bfloat16", reduce="float32", gradient="float32",
                optimizer={"eps": 1e-8}, clip=0.5,
                accumulation=2, rates=[1e-3, 1e-3], losses=[4.0, 3.9], updates=2)  # fmt: skip
GIVEN = {"model.path": "m", "data.path": "d", "engine.ranks": 2, "train.steps": 5, "train.micro_batch": 1}
RECIPE = parse("model: {path: m}\ndata: {path: d}\ntrain: {steps: 5, micro_batch: 3}\n")


def verdicts(
    lossy: set[str] | None = None, *, sixteen_bit: bool = True, same_rates: Any = None, **changes: Any
) -> dict[str, str]:
    other = dataclasses.replace(SEEN, **changes)
    rows = compared(SEEN, other, lossy=lossy or set(), sixteen_bit=sixteen_bit, same_rates=same_rates)
    return {row.quantity: row.verdict for row in rows}


def test_the_same_is_equal() -> None:
    assert set(verdicts().values()) == {"equal"}


def test_no_clipping_against_clipping_is_a_difference() -> None:
    assert verdicts(clip=None)["clip"] == "different"
    assert verdicts({"clipping"}, clip=None)["clip"] == "reported"
    assert verdicts({"schedule"}, clip=None)["clip"] == "different"


def test_a_schedule_that_is_late_is_found() -> None:
    assert verdicts(rates=[0.0, 1e-3])["rates"] == "different"
    assert verdicts({"schedule"}, rates=[0.0, 1e-3])["rates"] == "reported"


def test_a_dtype_that_nobody_saw_is_neither() -> None:
    assert verdicts(moments=None)["moments"] == "unseen"
    assert verdicts(moments="bfloat16")["moments"] == "different"


def test_rates_are_held_to_more_than_losses() -> None:
    assert verdicts(rates=[1e-3, 1.001e-3])["rates"] == "different"


def test_another_optimizer_is_found_by_what_it_was_built_with() -> None:
    assert verdicts(optimizer={"eps": 1e-6})["optimizer"] == "different"


def test_precision_excuses_what_rounding_allows_and_no_more() -> None:
    assert verdicts({"precision"}, sixteen_bit=False, losses=[4.0, 3.902])["losses"] == "reported"
    assert verdicts({"precision"}, losses=[4.0, 3.8])["losses"] == "different"


def test_losses_are_held_to_the_precision_of_the_regime() -> None:
    assert verdicts(losses=[4.0, 3.901])["losses"] == "equal"
    assert verdicts(losses=[4.0, 3.901], sixteen_bit=False)["losses"] == "different"


def test_other_rates_excuse_losses_only_where_equal_rates_make_them_equal() -> None:
    late = {"rates": [0.0, 1e-3], "losses": [4.0, 3.0]}
    assert verdicts({"schedule"}, **late)["losses"] == "different"
    assert verdicts({"schedule"}, same_rates=([4.0, 3.9], [4.0, 3.901]), **late)["losses"] == "reported"
    assert verdicts({"schedule"}, same_rates=([4.0, 3.9], [4.0, 3.8]), **late)["losses"] == "different"


@pytest.mark.parametrize(
    ("topic", "change"), [("optimizer", {"optimizer": {"eps": 1e-6}}), ("clipping", {"clip": None})]
)
def test_another_optimizer_or_norm_excuses_losses_only_where_it_was_seen(topic: str, change: dict[str, Any]) -> None:
    assert verdicts({topic}, losses=[4.0, 3.0], **change)["losses"] == "reported"
    assert verdicts({topic}, losses=[4.1, 3.0], **change)["losses"] == "different"
    assert verdicts({topic}, losses=[4.0, 3.0])["losses"] == "different"


class Sides:
    """Runs nothing: each side's losses are its rates, and a script takes the rates that it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[float] | None]] = []

    def __call__(self, tool: Any, recipe: Any, config: Any, rates: list[float] | None = None) -> Observed:
        self.calls.append((tool, rates))
        own = [0.0, 0.0, 0.1, 0.2, 0.3] if "scheduler" in config else [0.0, 0.1, 0.2, 0.3, 0.3]
        taken = rates or own
        return dataclasses.replace(SEEN, rates=taken, losses=taken)


@pytest.mark.parametrize("target", ["samestep", "accelerate-fsdp"])
def test_the_side_whose_script_sets_the_rates_runs_again_under_the_others_schedule(tmp_path: Path, target: str) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}
    content = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}, "scheduler": scheduler}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    source = read(tmp_path / "ds.json")
    reading = read_as("deepspeed", source, GIVEN)
    run = Sides()
    rows = check(source, reading, migrate(source, reading, target, GIVEN), GIVEN, run)
    late = [0.0, 0.0, 0.1, 0.2, 0.3]
    tool = target.partition("-")[0]
    assert run.calls == [("deepspeed", None), (tool, None), (tool, late)]
    assert {row.quantity: row.verdict for row in rows}["losses"] == "reported"


def test_what_runs_has_no_auto_offload_or_logging() -> None:
    config = {
        "train_batch_size": 512,
        "tensorboard": {"enabled": True},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    run = runnable(config, RECIPE)
    assert "train_batch_size" not in run and "tensorboard" not in run
    assert run["train_micro_batch_size_per_gpu"] == 3
    assert run["bf16"] == {"enabled": True}
    assert run["gradient_clipping"] == 0.5
    assert "offload_optimizer" not in run["zero_optimization"]
    assert run["optimizer"]["params"] == {"lr": 1e-3, "torch_adam": True, "weight_decay": 0.0}


@pytest.mark.parametrize(("params", "decay"), [({}, 0.0), ({"weight_decay": 0.1}, 0.1), ({"torch_adam": True}, None)])
def test_the_optimizer_that_stands_in_decays_as_the_compiled_one(params: dict[str, Any], decay: float | None) -> None:
    run = runnable({"optimizer": {"type": "AdamW", "params": params}}, RECIPE)
    assert run["optimizer"]["params"].get("weight_decay") == decay


FSDP = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 8, "gpu_ids": "all",
        "dynamo_config": {"dynamo_backend": "INDUCTOR"},
        "fsdp_config": {"offload_params": True, "fsdp_version": 1, "transformer_layer_cls_to_wrap": "Block",
                        "fsdp_sharding_strategy": "SHARD_GRAD_OP"}}  # fmt: skip


def test_of_accelerates_file_only_what_needs_a_machine_is_left_out(tmp_path: Path) -> None:
    assert launcher(FSDP, RECIPE, tmp_path, "LlamaDecoderLayer") == {
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "num_processes": RECIPE.engine.ranks,
        "fsdp_config": {
            "fsdp_version": 1,
            "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "fsdp_sharding_strategy": "SHARD_GRAD_OP",
            "fsdp_sync_module_states": False,
            "fsdp_cpu_ram_efficient_loading": False,
        },
    }


def test_a_deepspeed_file_that_accelerate_names_is_found_and_its_autos_are_left_to_accelerate(tmp_path: Path) -> None:
    inside = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "train_batch_size": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps(inside))
    outside = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    run = launcher(outside, RECIPE, tmp_path, "LlamaDecoderLayer")
    assert run["deepspeed_json"]["bf16"] == {"enabled": "auto"}
    assert run["deepspeed_json"]["zero_optimization"]["stage"] == 2
    assert "train_batch_size" not in run["deepspeed_json"]


def test_groups_of_ranks_are_not_flattened_silently(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2}\n"
        "parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 2}\n"
    )
    source = read(tmp_path / "a.yaml")
    reading = read_as("accelerate", source, {})
    with pytest.raises(MigrationError, match="dp_replicate_size: more groups than the 2 ranks"):
        check(source, reading, migrate(source, reading, "samestep", {}), {}, never)


@pytest.mark.parametrize("kind", ["TPU", "MEGATRON_LM"])
def test_what_cannot_be_run_is_refused_before_anything_runs(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.yaml").write_text(f"distributed_type: {kind}\nnum_processes: 2\n")
    source = read(tmp_path / "a.yaml")
    reading = read_as("accelerate", source, {})
    with pytest.raises(MigrationError, match=f"does not run Accelerate with distributed_type {kind}"):
        check(source, reading, migrate(source, reading, "samestep", {}), {}, never)


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.json", '{"output_dir": "o", "max_steps": 5}', "transformers"),
        ("a.toml", "[training]\nsteps = 5\n", "torchtitan"),
    ],
)
def test_the_trainer_and_torchtitan_are_not_run(tmp_path: Path, name: str, text: str, kind: str) -> None:
    (tmp_path / name).write_text(text)
    source = read(tmp_path / name)
    reading = read_as(kind, source, GIVEN)
    with pytest.raises(MigrationError, match=f"not {kind}"):
        check(source, reading, migrate(source, reading, "samestep", GIVEN), GIVEN, never)


def never(*_: object) -> Observed:
    raise AssertionError("nothing may run")
