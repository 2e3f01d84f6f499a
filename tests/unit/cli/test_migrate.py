"""`samestep migrate` as people meet it: exit codes, one short message, nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from samestep import cli
from samestep.recipe import load

GOOD = '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'
REST = ("model.path=m", "data.path=d.jsonl", "train.steps=10", "train.optimizer.lr=1e-4", "engine.ranks=2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(GOOD)
    return tmp_path


def sets(*fields: str) -> list[str]:
    return [part for field in fields for part in ("--set", field)]


def failed(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int = 2) -> str:
    assert cli.main(["migrate", *arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Traceback" not in error
    return error


def test_a_recipe_is_written_and_loads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["migrate", "ds.json", "--out", "r.yaml", *sets(*REST)]) == 0
    assert "Wrote r.yaml" in capsys.readouterr().out
    recipe = load(folder / "r.yaml")
    assert (recipe.engine.name, recipe.train.max_grad_norm) == ("zero2", 1.0)


def test_without_out_the_report_and_the_file_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["migrate", "ds.json"]) == 0
    out = capsys.readouterr().out
    assert "zero_optimization.stage" in out
    assert "To be given: --set model.path=..." in out
    assert "# model.path is not said: give --set model.path=..." in out
    assert sorted(path.name for path in folder.iterdir()) == ["ds.json"]


def test_what_is_missing_is_named_and_nothing_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = failed(capsys, ["ds.json", "--out", "r.yaml", *sets("model.path=m")])
    assert "--set data.path=..." in error
    assert "--set model.path" not in error
    assert not (folder / "r.yaml").exists()


def test_a_file_is_not_replaced_unless_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "r.yaml").write_text("mine\n")
    assert "--overwrite" in failed(capsys, ["ds.json", "--out", "r.yaml", *sets(*REST)])
    assert (folder / "r.yaml").read_text() == "mine\n"
    assert cli.main(["migrate", "ds.json", "--out", "r.yaml", "--overwrite", *sets(*REST)]) == 0
    assert load(folder / "r.yaml").engine.ranks == 2


def test_what_is_impossible_is_refused_unless_allowed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}}')
    arguments = ["ds.json", "--out", "r.yaml", *sets(*REST, "train.micro_batch=1")]
    error = failed(capsys, arguments)
    assert "zero_optimization.zero_quantized_weights" in error
    assert "--allow-lossy" in error
    assert not (folder / "r.yaml").exists()
    assert cli.main(["migrate", *arguments, "--allow-lossy"]) == 0


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("a.json", '{"zero_optimization": {"stage": 3}', "a.json:1: not valid JSON"),
        ("a.json", '{"fp16": {}, "fp16": {"enabled": true}}', "the key 'fp16' is given twice"),
        ("a.json", "[1, 2]", "holds no keys and values"),
        ("a.json", "", "is empty"),
        ("a.toml", "", "is empty"),
        ("a.yaml", "distributed_type: FSDP\nbogus: [.nan]\n", "bogus: expected finite numbers, got [nan]"),
        ("a.toml", "[training]\nsteps = 2020-01-01\n", "2020-01-01 is read as a date"),
        ("a.json", r'{"zero_optimization": {"stage": 2}, "\ud800": 1}', "a lone surrogate"),
        ("a.json", '{"bf16": {"enabled": true}, "bf16.enabled": false, "zero_optimization": {}}', "holds a dot"),
        ("a.yaml", "", "is empty"),
        ("a.yaml", "distributed_type: NO\ndistributed_type: FSDP\n", "is given twice, first on line 1"),
        ("a.yaml", "fsdp_config: [\n", "not valid YAML"),
        ("a.yaml", "- 1\n", "holds a list"),
        ("a.yaml", "key: !!python/object/apply:os.system [ls]\n", "is not allowed"),
        ("a.toml", "[training\n", "not valid TOML"),
        ("a.json", '{"hello": 1}', "belongs to no tool that is known here"),
        ("a.json", '{"gradient_accumulation_steps": 2}', "Say which: --from deepspeed or --from transformers"),
        ("a.json", '{"zero_optimization": {"stage": [3]}}', "expected a number, got [3]"),
        ("a.json", '{"zero_optimization": 3, "bf16": true}', "expected keys under it"),
        ("a.yaml", "distributed_type: FSPD\n", "did you mean FSDP?"),
        ("a.yaml", "model: {path: m}\ndata: {path: d}\ntrain: {stepz: 5}\n", "did you mean train.steps?"),
    ],
)
def test_a_bad_file_is_one_short_message(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, what: str
) -> None:
    (folder / name).write_text(text)
    assert what in failed(capsys, [name, "--out", "out.yaml"])
    assert not (folder / "out.yaml").exists()


def test_bytes_that_are_no_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.json").write_bytes(b"{\xff\xfe")
    assert "is not UTF-8 text" in failed(capsys, ["a.json"])
    assert "no such file" in failed(capsys, ["b.json"])
    assert "is a folder" in failed(capsys, ["."])


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("engine.nam=fsdp", "did you mean engine.name?"),
        ("engine.name=fsdpp", "got 'fsdpp'"),
        ("train.steps='10'", "got '10'"),
        ("train.steps", "needs a value"),
    ],
)
def test_a_bad_setting_is_one_short_message(
    folder: Path, capsys: pytest.CaptureFixture[str], setting: str, what: str
) -> None:
    assert what in failed(capsys, ["ds.json", *sets(setting)])


def test_an_ambiguous_file_is_settled_by_from(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.json").write_text('{"gradient_accumulation_steps": 2}')
    assert cli.main(["migrate", "a.json", "--from", "deepspeed", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["source"]["kind"] == "deepspeed"


def test_json_has_the_shape_of_the_design(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["migrate", "ds.json", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) >= {"source", "target", "fields", "defaults", "problems"}
    for entry in report["fields"]:
        assert set(entry) == {"path", "value", "status", "target_path", "target_value", "rule"}


def test_lint_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["migrate", "ds.json", "--lint"]) == 0
    assert "a sound deepspeed configuration" in capsys.readouterr().out
    (folder / "ds.json").write_text('{\n  "zero_optimization": {\n    "stage": "2",\n    "overlap_com": true\n  }\n}\n')
    assert cli.main(["migrate", "ds.json", "--lint"]) == 1
    out = capsys.readouterr().out
    assert "ds.json:3: warning: zero_optimization.stage: '2' is a text" in out
    assert "ds.json:4: warning: zero_optimization.overlap_com: unknown key - did you mean overlap_comm?" in out


def test_comments_survive_where_the_field_does(folder: Path) -> None:
    (folder / "acc.yaml").write_text(
        "# eight GPUs of the blue node\ndistributed_type: MULTI_GPU  # no sharding\nmixed_precision: bf16\n"
        "num_processes: 8  # all 'of' them\ngpu_ids: all  # gone\n"
    )
    fields = ("model.path=m", "data.path=d.jsonl", "train.steps=10", "train.optimizer.lr=1e-4", "train.micro_batch=1")
    assert cli.main(["migrate", "acc.yaml", "--out", "r.yaml", *sets(*fields)]) == 0
    text = (folder / "r.yaml").read_text()
    assert "  # eight GPUs of the blue node\n  name: ddp  # no sharding\n" in text
    assert "ranks: 8  # all 'of' them" in text
    assert "gone" not in text
    assert cli.main(["migrate", "acc.yaml", "--to", "accelerate-fsdp", "--out", "b.yaml"]) == 0
    assert "gpu_ids: all  # gone" in (folder / "b.yaml").read_text()


def test_no_tool_is_imported(folder: Path) -> None:
    code = "import sys; from samestep import cli; cli.main(['migrate', 'ds.json', '--json']); "
    code += (
        "print([m for m in ('torch', 'transformers', 'deepspeed', 'accelerate') if m in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False)
    assert result.stderr.strip() == "[]"


def test_one_field_under_two_names_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_offload_params: true, offload_params: false}\n"
    )
    assert "is given twice" in failed(capsys, ["a.yaml"])


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("a.json", '{"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": -2}', "is -2; DeepSpeed needs"),
        ("a.json", '{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 0}', "is 0; DeepSpeed needs"),
        (
            "a.json",
            '{"zero_optimization": {}, "optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}',
            "two numbers",
        ),
        ("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: 0\n", "a run needs at least one process"),
        ("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: -3\n", "a run needs at least one process"),
    ],
)
def test_a_number_that_the_tool_cannot_use_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, what: str
) -> None:
    (folder / name).write_text(text)
    assert what in failed(capsys, [name])
    assert cli.main(["migrate", name, "--lint"]) == 1
    assert what in capsys.readouterr().out


def test_the_configuration_is_not_written_over_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "link.json").symlink_to("ds.json")
    for out in ("ds.json", "link.json"):
        assert "is the file that is migrated" in failed(capsys, ["ds.json", "--out", out, "--overwrite", *sets(*REST)])
    assert (folder / "ds.json").read_text() == GOOD


def test_what_yaml_allows_and_a_configuration_does_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.yaml").write_text("distributed_type: !!python/name:os.system x\n")
    assert "is not allowed in a configuration" in failed(capsys, ["a.yaml"])
    (folder / "a.yaml").write_text("- distributed_type\n")
    assert "lines of a configuration" in failed(capsys, ["a.yaml"])
    (folder / "a.yaml").write_text("distributed_type: NO\nnum_machines: &one 1\nnum_processes: *one\n")
    assert cli.main(["migrate", "a.yaml", "--json"]) == 0
    fields = {entry["path"]: entry["value"] for entry in json.loads(capsys.readouterr().out)["fields"]}
    assert fields["num_processes"] == 1
