"""Faults that users of other tools met, by their row in the list of cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samestep.migrate import Migration, MigrationError, migrate, read, read_as, recognise
from samestep.migrate.rows import Entry

REST = {"model.path": "m", "data.path": "d.jsonl"}


def run(folder: Path, name: str, text: str, target: str = "samestep", **given: Any) -> Migration:
    file = folder / name
    file.write_text(text)
    source = read(file)
    extra = {path.replace("__", "."): value for path, value in given.items()}
    kind = recognise(source, None, lambda question, kinds: None)
    return migrate(source, read_as(kind, source, extra), target, extra)


def entry(result: Migration, path: str) -> Entry:
    (found,) = [item for item in result.fields if item.path == path]
    return found


def default(result: Migration, path: str) -> Entry:
    return next(item for item in result.defaults if item.path == path)


DECAYS = {
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
}


def test_p46_deepspeeds_one_group_decays_everything_and_says_so(tmp_path: Path) -> None:
    result = run(tmp_path, "ds.json", json.dumps(DECAYS))
    assert entry(result, "optimizer.params.weight_decay").target_value == {
        "train.optimizer.weight_decay": 0.1,
        "train.optimizer.no_decay": [],
    }


def test_p46_the_trainers_two_groups_survive(tmp_path: Path) -> None:
    result = run(tmp_path, "args.json", json.dumps({"output_dir": "o", "weight_decay": 0.1, "max_steps": 5}))
    found = entry(result, "weight_decay").target_value
    assert found["train.optimizer.no_decay"] == ["*.bias", "*norm*"]


def test_p46_two_groups_are_not_lost_silently_on_the_way_to_deepspeed(tmp_path: Path) -> None:
    text = (
        "model: {path: m}\ndata: {path: d}\nengine: {name: zero2}\ntrain: {steps: 5, optimizer: {weight_decay: 0.1}}\n"
    )
    result = run(tmp_path, "r.yaml", text, "deepspeed")
    assert default(result, "train.optimizer.no_decay").status == "lossy"
    same = run(tmp_path, "r.yaml", text.replace("0.1", "0.0"), "deepspeed")
    assert [item for item in same.defaults if item.path == "train.optimizer.no_decay"] == []


def test_p90_auto_in_a_raw_configuration_is_named_and_asked_for(tmp_path: Path) -> None:
    text = json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"})
    result = run(tmp_path, "ds.json", text)
    assert {finding.path for finding in result.problems} == {"bf16.enabled", "gradient_clipping"}
    assert "precision.regime" in result.missing
    assert entry(result, "gradient_clipping").target_value == 1.0


def test_p90_a_misspelt_top_level_key_is_refused_with_the_right_one(tmp_path: Path) -> None:
    result = run(tmp_path, "ds.json", json.dumps({"zero_optimization": {"stage": 1}, "gradient_cliping": 0.5}))
    assert [item.path for item in result.impossible] == ["gradient_cliping"]
    assert "gradient_clipping" in result.impossible[0].rule


def test_p91_two_sources_that_differ_are_both_named(tmp_path: Path) -> None:
    arguments = {"output_dir": "o", "learning_rate": 1e-4, "max_steps": 5}
    deepspeed = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}
    text = json.dumps(arguments | {"deepspeed": deepspeed})
    with pytest.raises(MigrationError) as refusal:
        run(tmp_path, "args.json", text)
    assert "deepspeed.optimizer.params.lr: is 0.0003, but learning_rate is 0.0001" in str(refusal.value)
    settled = run(tmp_path, "args.json", text, train__optimizer__lr=2e-4)
    assert entry(settled, "learning_rate").target_value == 2e-4


def test_p91_a_default_that_differs_is_named_as_one(tmp_path: Path) -> None:
    deepspeed = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}
    text = json.dumps({"output_dir": "o", "max_steps": 5, "deepspeed": deepspeed})
    with pytest.raises(MigrationError, match=r"max_grad_norm is 1\.0, by default"):
        run(tmp_path, "args.json", text)


def test_p91_total_num_steps_of_another_number_of_steps(tmp_path: Path) -> None:
    params = {"total_num_steps": 260, "warmup_num_steps": "auto", "warmup_max_lr": "auto"}
    deepspeed = {"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupDecayLR", "params": params}}
    text = json.dumps({"output_dir": "o", "max_steps": 100, "warmup_steps": 10, "deepspeed": deepspeed})
    with pytest.raises(MigrationError, match=r"total_num_steps: is 260, but max_steps is 100"):
        run(tmp_path, "args.json", text)


def test_p92_fp16_in_the_file_and_nothing_else_is_fp16(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    text = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    result = run(tmp_path, "acc.yaml", text)
    found = entry(result, "deepspeed_config.deepspeed_config_file:fp16.enabled")
    assert found.target_value["precision.low_dtype"] == "float16"
    assert result.problems == ()


def test_p93_of_three_sources_the_winner_is_named(tmp_path: Path) -> None:
    file = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}
    (tmp_path / "ds.json").write_text(json.dumps(file))
    text = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    text += "  gradient_accumulation_steps: 16\n"
    inside = "deepspeed_config.deepspeed_config_file:gradient_accumulation_steps"
    result = run(tmp_path, "acc.yaml", text)
    assert entry(result, inside).target_value == 4
    loser = entry(result, "deepspeed_config.gradient_accumulation_steps")
    assert (loser.status, loser.target_path) == ("not-needed", None)
    assert "the file says 4" in loser.rule
    set_by_hand = entry(run(tmp_path, "acc.yaml", text, train__accumulation=8), inside)
    assert set_by_hand.target_value == 8
    assert "--set gives 8 and wins over 4" in set_by_hand.rule


def test_p94_fsdp1_to_fsdp2_leaves_no_dead_key(tmp_path: Path) -> None:
    text = """\
distributed_type: FSDP
mixed_precision: bf16
num_processes: 2
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_forward_prefetch: true
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: true
  fsdp_transformer_layer_cls_to_wrap: A
"""
    result = run(tmp_path, "fsdp1.yaml", text, "accelerate-fsdp")
    statuses = {item.path.removeprefix("fsdp_config.fsdp_"): item.status for item in result.fields}
    assert statuses["sharding_strategy"] == "computed"
    assert statuses["state_dict_type"] == statuses["cpu_ram_efficient_loading"] == "kept"
    dropped = ("backward_prefetch", "forward_prefetch", "sync_module_states", "use_orig_params")
    assert {statuses[name] for name in dropped} == {"not-needed"}
    assert not any(name in result.text for name in (*dropped, "sharding_strategy"))
    # The script stays under Accelerate, and its scheduler with it.
    assert "the script's scheduler" not in {item.path for item in result.defaults}
    assert default(run(tmp_path, "fsdp1.yaml", text), "the script's scheduler").status == "lossy"
    assert "fsdp_version: 2" in result.text


def test_p94_local_state_dicts_cannot_be_kept(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_state_dict_type: LOCAL_STATE_DICT}\n"
    result = run(tmp_path, "fsdp1.yaml", text, "accelerate-fsdp")
    assert entry(result, "fsdp_config.fsdp_state_dict_type").status != "kept"
    assert "LOCAL_STATE_DICT" not in result.text


def test_p94_no_shard_does_not_become_sharding(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD}\n"
    assert "distributed_type: MULTI_GPU" in run(tmp_path, "fsdp1.yaml", text, "accelerate-fsdp").text


@pytest.mark.parametrize(
    ("engine", "status", "line"),
    [
        ("zero3", "computed", "fsdp_reshard_after_forward: true"),
        ("zero2", "computed", "fsdp_reshard_after_forward: false"),
        ("zero1", "impossible", "fsdp_reshard_after_forward: false"),
        ("ddp", "computed", "distributed_type: MULTI_GPU"),
    ],
)
def test_p95_each_engine_has_one_answer_on_fsdp(tmp_path: Path, engine: str, status: str, line: str) -> None:
    text = f"model: {{path: m}}\ndata: {{path: d}}\nengine: {{name: {engine}, ranks: 2}}\ntrain: {{steps: 5}}\n"
    result = run(tmp_path, "r.yaml", text, "accelerate-fsdp")
    assert entry(result, "engine.name").status == status
    assert line in result.text


def test_p96_a_number_in_quotes_is_that_number_and_named(tmp_path: Path) -> None:
    text = json.dumps({"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": "8"})
    result = run(tmp_path, "ds.json", text)
    assert entry(result, "gradient_accumulation_steps").target_value == 8
    (finding,) = result.problems
    assert finding.path == "gradient_accumulation_steps"
    assert "'8' is a text, not a number" in finding.what


def test_p96_a_text_that_is_no_number_is_refused(tmp_path: Path) -> None:
    text = json.dumps({"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": "eight"})
    with pytest.raises(MigrationError, match="gradient_accumulation_steps: expected a number, got 'eight'"):
        run(tmp_path, "ds.json", text)


def test_p93_the_old_fp16_loses_to_mixed_precision(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bf16\nfp16: true\n"
    result = run(tmp_path, "acc.yaml", text)
    assert entry(result, "fp16").rule == "not read: mixed_precision, here bf16, wins"
    assert any(finding.path == "fp16" and "bf16, wins" in finding.what for finding in result.problems)


@pytest.mark.parametrize(("version", "engine", "what"), [(1, "fsdp", "FSDP1 never reads it"), (2, "hsdp", "")])
def test_p94_groups_are_of_fsdp2(tmp_path: Path, version: int, engine: str, what: str) -> None:
    text = f"distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {{fsdp_version: {version}}}\n"
    text += "parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 2}\n"
    result = run(tmp_path, "acc.yaml", text)
    assert f"name: {engine}\n" in result.text
    found = " ".join(finding.what for finding in result.problems if "size" in finding.path)
    assert (what in found) if what else not found


def test_p96_the_one_number_that_the_launcher_does_not_read_from_a_text(tmp_path: Path) -> None:
    text = 'distributed_type: MULTI_GPU\nnum_processes: "2"\nnum_machines: "1"\nmixed_precision: bf16\n'
    result = run(tmp_path, "acc.yaml", text)
    assert [finding.path for finding in result.problems] == ["num_machines"]


def test_comments_of_sections_and_of_fields_that_share_a_place_survive(tmp_path: Path) -> None:
    text = """\
distributed_type: FSDP  # the type
mixed_precision: bf16  # half
num_processes: 2
fsdp_config:  # the section
  # the second one
  fsdp_version: 2  # of FSDP
"""
    same = run(tmp_path, "fsdp.yaml", text, "accelerate-fsdp").text
    assert "distributed_type: FSDP  # the type\n" in same
    assert "fsdp_config:  # the section\n  # the second one\n  fsdp_version: 2  # of FSDP\n" in same
    recipe = run(tmp_path, "fsdp.yaml", text).text
    assert "  regime: mixed  # half\n" in recipe
    assert "  # the second one\n  # of FSDP\n  name: fsdp  # the type\n" in recipe


WARMS_UP = {
    "zero_optimization": {"stage": 2},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}},
}


def test_p91_the_trainer_fills_the_rate_of_the_scheduler(tmp_path: Path) -> None:
    arguments = {"output_dir": "o", "learning_rate": 1e-4, "max_steps": 5, "warmup_steps": 2}
    result = run(tmp_path, "args.json", json.dumps(arguments | {"deepspeed": WARMS_UP}))
    assert entry(result, "deepspeed.scheduler.params.warmup_max_lr").target_value == 1e-4
    assert "train.optimizer.lr" not in result.missing
    assert entry(result, "deepspeed.scheduler.params.warmup_min_lr").status == "not-needed"


@pytest.mark.parametrize(
    ("inside", "what"),
    [
        ({"warmup_max_lr": 3e-4}, "warmup_max_lr: is 0.0003, but learning_rate is 0.0001"),
        ({"warmup_num_steps": 10}, "warmup_num_steps: is 10, but warmup_steps is 1, by default"),
    ],
)
def test_p91_a_scheduler_that_differs_from_its_argument(tmp_path: Path, inside: dict[str, Any], what: str) -> None:
    deepspeed = {"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR", "params": inside}}
    arguments = {"output_dir": "o", "learning_rate": 1e-4, "max_steps": 50, "deepspeed": deepspeed}
    with pytest.raises(MigrationError, match=what):
        run(tmp_path, "args.json", json.dumps(arguments))


@pytest.mark.parametrize(("given", "ranks"), [({}, 4), ({"per_device_train_batch_size": 16}, 2)])
def test_p91_the_whole_batch_is_of_the_trainers_micro_batch(tmp_path: Path, given: dict[str, Any], ranks: int) -> None:
    deepspeed = {"zero_optimization": {"stage": 2}, "train_batch_size": 64}
    text = json.dumps(
        {"output_dir": "o", "max_steps": 5, "gradient_accumulation_steps": 2, "deepspeed": deepspeed, **given}
    )
    result = run(tmp_path, "args.json", text)
    assert entry(result, "deepspeed.train_batch_size").target_value == ranks
    assert f"micro_batch: {given.get('per_device_train_batch_size', 8)}\n" in result.text
    with pytest.raises(MigrationError, match="64 does not fit micro-batch, accumulation and ranks"):
        run(tmp_path, "args.json", text, engine__ranks=3)


@pytest.mark.parametrize("target", ["samestep", "accelerate-fsdp"])
def test_replicas_that_do_not_fit_the_ranks_are_refused(tmp_path: Path, target: str) -> None:
    text = "[training]\nsteps = 5\n[parallelism]\ndata_parallel_replicate_degree = 4\n"
    with pytest.raises(MigrationError, match="2 ranks do not divide into 4 replicas"):
        run(tmp_path, "titan.toml", text, target, engine__ranks=2)
