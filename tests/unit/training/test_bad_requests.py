"""Requests that cannot be met, through the real command: one short message, an exit code, nothing half-written."""

from __future__ import annotations

import builtins
import io
import json
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from samestep import world
from samestep.cli import main
from samestep.engines import build
from samestep.training import folder as training_folder
from tests.small_runs import (
    assert_short_message,
    change,
    half_written,
    make_folder,
    make_model,
    make_tokenizer,
    steps_of,
    write_rows,
)

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return make_folder(tmp_path)


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs `samestep train r.yaml` with changed fields; gives exit code and standard error."""

    def run(changes: dict[str, Any] | None = None, *arguments: str) -> tuple[int, str]:
        change(folder, changes or {})
        capfd.readouterr()
        code = main(["train", "r.yaml", "--out", "out", *arguments])
        return code, capfd.readouterr().err

    threads = torch.get_num_threads()
    yield run
    world.stop()
    torch.set_num_threads(threads)


def expect(result: tuple[int, str], code: int, *parts: str) -> None:
    assert result[0] == code, result[1]
    assert_short_message(result[1], *parts)
    assert half_written(Path("out")) == []


def test_the_unchanged_recipe_runs(folder: Path, run: Run) -> None:
    code, err = run()
    assert code == 0, err
    assert len(steps_of(folder / "out")) == 2


# -- the model's folder


def _without(*names: str) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        for name in names:
            (model / name).unlink()

    return damage


def _cut(name: str, keep: float) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: int(len(content) * keep)])

    return damage


def _written(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda model: (model / name).write_bytes(content) and None  # type: ignore[func-returns-value]


def _pickled(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch unpickled'\ntR.")


DAMAGES = {
    "no folder": (shutil.rmtree, "no folder"),
    "empty folder": (lambda model: [path.unlink() for path in model.iterdir()] and None, "cannot be loaded"),
    "no config": (_without("config.json"), "cannot be loaded"),
    "no weights": (_without("model.safetensors"), "cannot be loaded"),
    "cut weights": (_cut("model.safetensors", 0.5), "model.safetensors: cannot be read"),
    "cut header": (_cut("model.safetensors", 0.01), "model.safetensors: cannot be read"),
    "empty weights": (_cut("model.safetensors", 0.0), "model.safetensors: cannot be read"),
    "weights that are text": (_written("model.safetensors", b"x" * 999), "model.safetensors: cannot be read"),
    "weights to unpickle": (_pickled, "safetensors"),
    "broken config": (_written("config.json", b'{"model_type": "llama"'), "the config of"),
    "config without type": (_written("config.json", b"{}"), "cannot be loaded"),
    "config of an unknown type": (_written("config.json", b'{"model_type": "nothing"}'), "cannot be loaded"),
    "no tokenizer": (_without("tokenizer.json", "tokenizer_config.json"), "the tokenizer of"),
    "broken tokenizer": (_cut("tokenizer.json", 0.5), "the tokenizer of"),
    "tokenizer that is a list": (_written("tokenizer.json", b"[]"), "the tokenizer of"),
    "empty tokenizer": (_written("tokenizer.json", b""), "the tokenizer of"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_model_folder_that_is_damaged(folder: Path, run: Run, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(folder / "model")
    expect(run(), 2, message)
    assert not (folder / "unpickled").exists()


def test_a_weight_that_the_file_lacks(folder: Path, run: Run) -> None:
    weights = load_file(folder / "model" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    expect(run(), 2, "model.layers.1.mlp.up_proj.weight")


def test_a_weight_of_another_shape(folder: Path, run: Run) -> None:
    make_model(intermediate_size=20).save_pretrained(folder / "other")
    shutil.copy(folder / "other" / "model.safetensors", folder / "model" / "model.safetensors")
    expect(run(), 2, "model.path")


# -- tokenizers


def _tokenizer(folder: Path, **special: str) -> None:
    (folder / "model" / "tokenizer.json").unlink()
    (folder / "model" / "tokenizer_config.json").unlink()
    make_tokenizer(**special).save_pretrained(folder / "model")


def test_a_tokenizer_without_pad_token_changes_nothing(folder: Path, run: Run) -> None:
    """Pads never count, so it does not matter that there is no token for them."""
    assert run()[0] == 0
    _tokenizer(folder, eos_token="</s>", unk_token="<unk>")
    (folder / "out").rename(folder / "with")
    assert run()[0] == 0
    kept = ("loss", "grad_norm", "tokens", "label_tokens")
    with_pad, without = steps_of(folder / "with"), steps_of(folder / "out")
    assert [[s[key] for key in kept] for s in with_pad] == [[s[key] for key in kept] for s in without]
    weights = [json.loads((folder / name / "summary.json").read_text())["weights_sha256"] for name in ("with", "out")]
    assert weights[0] == weights[1]


def test_a_tokenizer_without_end_token(folder: Path, run: Run) -> None:
    _tokenizer(folder, pad_token="<pad>", unk_token="<unk>")
    expect(run(), 2, "data.append_end_token: the tokenizer has no end token", "Set it to false")
    code, err = run({"data.append_end_token": False}, "--overwrite")
    assert code == 0, err


def test_a_tokenizer_with_tokens_that_the_model_lacks(folder: Path, run: Run) -> None:
    make_model(vocab_size=9).save_pretrained(folder / "small")
    make_tokenizer().save_pretrained(folder / "small")
    expect(run({"model.path": "small"}), 2, "the model's vocabulary has 9", "model.tokenizer")


def test_a_tokenizer_folder_that_is_not_there(run: Run) -> None:
    expect(run({"model.tokenizer": "nowhere"}), 2, "model.tokenizer: nowhere is no folder, nor a hub id")


# -- data


ROWS = {
    "no file": (None, "no such file or folder"),
    "empty file": ("", "holds no rows"),
    "blank lines": ("\n\n\n", "holds no rows"),
    "broken line": ('{"text": "a b"}\n{"text": "a\n', "rows.jsonl:2"),
    "a line that is a list": ('{"text": "a b"}\n["a"]\n', "rows.jsonl:2"),
    "another column": ('{"words": "a b"}\n', "text"),
    "empty texts": ('{"text": ""}\n{"text": ""}\n', "no row is left to train on"),
    "an object for a text": ('{"text": {"a": 1}}\n', "rows.jsonl:1"),
    "fewer rows than ranks": ('{"text": "a b"}\n', "2 ranks are more than the 1 rows of data"),
}


@pytest.mark.parametrize("name", ROWS)
def test_data_that_cannot_train(folder: Path, run: Run, name: str) -> None:
    content, message = ROWS[name]
    (folder / "rows.jsonl").unlink()
    if content is not None:
        (folder / "rows.jsonl").write_text(content)
    expect(run(), 2, message)


def test_all_rows_held_out(folder: Path, run: Run) -> None:
    write_rows(folder, 3)
    expect(run({"data.held_out": 3}), 2, "leaves 0 to train on")


# -- what a model, an engine or a device cannot do


FIELDS = [
    ({"model.freeze": ["nothing.*"]}, "no parameter matches 'nothing.*'"),
    ({"model.freeze": ["*"]}, "every parameter is frozen"),
    ({"model.lora": {"target_modules": ["nothing_proj"]}}, "nothing_proj"),
    ({"engine.unit_classes": ["NoSuchLayer"]}, "no module of class NoSuchLayer"),
    ({"engine.unit_classes": ["Embedding"]}, "tied"),
    ({"engine.unit_classes": ["LlamaDecoderLayer", "Linear"]}, "tied"),
    ({"engine.ignored_modules": ["nothing"]}, "no module matches 'nothing'"),
    ({"engine.ignored_modules": ["model.layers.0"]}, "trains, but an ignored module must not"),
    ({"model.attention": "flash_attention_2"}, "use sdpa"),
    ({"model.path": None, "model.config": {"model_type": "no_such"}, "model.tokenizer": "model"}, "model.config"),
    (
        {"model.path": None, "model.config": {"model_type": "llama", "hidden_size": "x"}, "model.tokenizer": "model"},
        "hidden_size",
    ),
    (
        {"model.path": None, "model.config": {"model_type": "llama", "hiden_size": 8}, "model.tokenizer": "model"},
        "model.config: llama has no setting `hiden_size` - did you mean hidden_size?",
    ),
    (
        {
            "model.path": None,
            "model.config": {
                "model_type": "gpt2",
                "n_positions": 2,
                "n_embd": 8,
                "n_layer": 1,
                "n_head": 2,
                "vocab_size": 64,
            },
            "model.tokenizer": "model",
        },
        "tokens, but the model has learned 2 positions. Set it to 2 or less",
    ),
]


@pytest.mark.parametrize(("changes", "message"), FIELDS)
def test_a_field_that_the_model_does_not_fit(run: Run, changes: dict[str, Any], message: str) -> None:
    expect(run(changes), 2, message)


def test_fp16_on_a_device_without_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_multiplies", lambda dtype, device: dtype != torch.float16)
    expect(run({"precision.low_dtype": "float16"}), 2, "cannot multiply in float16", "Use bfloat16")


@pytest.fixture
def one_rank_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the one rank that a launcher started."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


ZERO_LIMITS = [
    ({"engine.offload": "cpu", "precision.regime": "low"}, "offloads the optimizer only with fp32 masters"),
    ({"engine.offload": {"optimizer": "cpu"}, "precision.regime": "low"}, "Use precision.regime: mixed or full"),
    ({"engine.offload": {"optimizer": "nvme", "nvme_path": "."}}, "Use optimizer: cpu"),
]


@pytest.mark.usefixtures("one_rank_of_zero")
@pytest.mark.parametrize(("changes", "message"), ZERO_LIMITS)
def test_what_zero_cannot_do(run: Run, changes: dict[str, Any], message: str) -> None:
    pytest.importorskip("deepspeed")
    expect(run({"engine.name": "zero3", "engine.ranks": 1, **changes}), 2, message)


@pytest.mark.usefixtures("one_rank_of_zero")
def test_parameters_on_nvme_without_async_io(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_has_async_io", lambda: False)
    offload = {"parameters": "nvme", "optimizer": "none", "nvme_path": "."}
    changes = {"engine.name": "zero3", "engine.ranks": 1, "engine.offload": offload}
    expect(run(changes), 2, "NVMe offload needs DeepSpeed's async_io operator")


@pytest.mark.usefixtures("one_rank_of_zero")
def test_without_deepspeed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    expect(run({"engine.name": "zero1", "engine.ranks": 1}), 2, "DeepSpeed, which is not installed", "or choose single")


@pytest.mark.usefixtures("one_rank_of_zero")
def test_a_launcher_with_another_number_of_ranks(run: Run) -> None:
    expect(run({"engine.name": "fsdp", "engine.ranks": 2}), 2, "asks for 2 ranks, but 1 were started")


@pytest.mark.parametrize(
    ("package", "changes", "message"),
    [
        ("peft", {"model.lora": {}}, "Install samestep[lora]"),
        ("torch.utils.tensorboard", {"log.trackers": ["tensorboard"]}, "tensorboard is not installed"),
        ("trackio", {"log.trackers": ["trackio"]}, "Install samestep[trackers]"),
    ],
)
def test_a_package_that_is_not_installed(
    run: Run, monkeypatch: pytest.MonkeyPatch, package: str, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    expect(run(changes), 2, message)


# -- places that cannot be written


def test_a_file_where_the_run_folder_should_be(folder: Path, run: Run) -> None:
    (folder / "out").write_text("mine")
    code, err = run()
    assert code == 2
    assert_short_message(err, "is a file, not a folder")
    assert (folder / "out").read_text() == "mine"


def test_a_run_folder_that_holds_something_else(folder: Path, run: Run) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "thesis.txt").write_text("mine")
    expect(run(), 2, "the folder is not empty", "--overwrite")
    expect(run(None, "--overwrite"), 2, "thesis.txt, which is not of a run")
    assert (folder / "out" / "thesis.txt").read_text() == "mine"


def test_a_second_run_into_the_same_folder(folder: Path, run: Run) -> None:
    assert run()[0] == 0
    steps, summary = (folder / "out" / "steps.jsonl").read_bytes(), (folder / "out" / "summary.json").read_bytes()
    code, err = run()
    assert code == 2
    assert_short_message(err, "the folder is not empty")
    assert (folder / "out" / "steps.jsonl").read_bytes() == steps
    assert (folder / "out" / "summary.json").read_bytes() == summary
    code, err = run({"train.steps": 1}, "--overwrite")
    assert code == 0, err
    assert len(steps_of(folder / "out")) == 1


def test_a_request_that_is_refused_leaves_no_folder(folder: Path, run: Run) -> None:
    expect(run({"model.path": "nowhere"}), 2, "nowhere")
    assert not (folder / "out").exists()


def test_a_folder_that_another_run_is_writing_to(folder: Path, run: Run) -> None:
    with training_folder.held(folder / "out", overwrite=False):
        code, err = run(None, "--overwrite")
        assert code == 2
        assert_short_message(err, "another run is writing to this folder")
    assert run()[0] == 0
    assert not (folder / "out" / ".lock").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_may_not_be_written(folder: Path, run: Run) -> None:
    (folder / "out").mkdir(mode=0o555)
    expect(run(), 2, "cannot be written: Permission denied")


def test_a_disk_that_is_full(folder: Path, run: Run) -> None:
    """steps.jsonl on a device where every write fails as on a full disk."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    original = builtins.open

    def open_full(file: Any, *arguments: Any, **options: Any) -> Any:
        return original("/dev/full" if str(file).endswith("steps.jsonl") else file, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", open_full)
        result = run()
    expect(result, 2, "steps.jsonl: cannot be written: No space left on device")


@pytest.mark.parametrize("limit", [100, 1500, 3000, 6000])
def test_a_file_that_may_grow_no_further(folder: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota: files end at so many bytes, wherever the run is by then. Whole files or none."""
    change(folder, {"train.steps": 8})
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        code = main(["train", "r.yaml", "--out", "out"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
        world.stop()
    assert code == 2
    assert_short_message(said.getvalue(), "cannot be written: File too large")
    assert half_written(folder / "out") == []
    for path in (folder / "out").glob("*.json"):
        json.loads(path.read_text())


# -- numbers


def test_updates_that_would_be_lost(folder: Path, run: Run) -> None:
    changes = {"precision.regime": "low", "precision.max_lost_update_share": 0.5, "train.optimizer.lr": 1e-7}
    expect(run(changes), 2, "of the updates would be lost", "precision.regime: mixed")
    assert not (folder / "out" / "steps.jsonl").exists()


def _poison(folder: Path) -> None:
    """A model whose logits are infinite wherever they are not zero."""
    model = make_model()
    model.model.norm.weight.data.fill_(3e38)
    model.save_pretrained(folder / "model")


def test_a_loss_that_is_not_finite_stops_the_run(folder: Path, run: Run) -> None:
    _poison(folder)
    expect(run({"precision.regime": "full"}), 1, "the loss of step 1 is not finite", "on_non_finite: skip")
    (step,) = steps_of(folder / "out")
    assert (step["step"], step["loss"], step["skipped"]) == (1, None, True)


def test_a_loss_that_is_not_finite_can_be_skipped(folder: Path, run: Run) -> None:
    _poison(folder)
    code, err = run({"precision.regime": "full", "train.on_non_finite": "skip"})
    assert code == 0, err
    assert [(s["loss"], s["skipped"]) for s in steps_of(folder / "out")] == [(None, True)] * 2
    assert "2 of 2 steps were skipped, since their loss or gradient was not finite. No weight has moved." in err
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert (summary["status"], summary["last_loss"]) == ("completed", None)
    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(folder / "out" / "export" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


# -- ports


def test_a_port_in_use(folder: Path, run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        expect(run({"engine.name": "fsdp"}, "--port", str(port)), 1, f"port {port} cannot be used", "Leave it out")
