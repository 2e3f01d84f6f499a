"""The command line as people meet it: exit codes, one short message, no traceback."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

from samestep import __version__, cli
from samestep.errors import RunError
from samestep.recipe.schema import EngineName, Recipe, RegimeName

GOOD = """\
name: story
model: {path: ./m}
data: {path: d.jsonl}
train: {steps: 10}
"""
HEAVY = ("torch", "transformers", "deepspeed", "datasets", "matplotlib", "peft", "numpy")


class Calls(list[dict[str, Any]]):
    """What a command asked the layer below to do, and what that answers."""

    answer: Any = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.append({"arguments": arguments, **options})
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def stand_in(monkeypatch: pytest.MonkeyPatch, package: str, module: str, function: str) -> Calls:
    calls = Calls()
    fake = ModuleType(f"samestep.{package}.{module}")
    setattr(fake, function, calls)
    monkeypatch.setitem(sys.modules, f"samestep.{package}", ModuleType(f"samestep.{package}"))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    return calls


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(GOOD)
    return tmp_path


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return stand_in(monkeypatch, "training", "launch", "train")


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Calls:
    importlib.import_module("samestep.compare.sets")  # the real one, which the stand-in would hide
    calls = stand_in(monkeypatch, "compare", "run", "compare_variants")
    calls.answer = {"ok": True, "verdict": "equal"}
    return calls


def command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "samestep", *arguments]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom samestep.cli import main\ncode = main(['--help'])\n"
        f"print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED []"
    assert "Usage: samestep" in done.stdout


def test_importing_samestep_imports_nothing_heavy() -> None:
    program = f"import samestep, samestep.recipe, sys\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


BAD_LINES = [
    ([], "Usage: samestep"),
    (["trian", "r.yaml"], "Did you mean 'train'?"),
    (["train", "r.yaml", "--ste", "a=b"], "--set"),
    (["train"], "Missing argument 'RECIPE'"),
    (["train", "r.yaml", "more"], "more"),
    (["train", "r.yaml", "--ranks", "two"], "--ranks"),
    (["train", "r.yaml", "--ranks", "0"], "--ranks"),
    (["train", "r.yaml", "--port", "70000"], "--port"),
    (["train", "r.yaml", "--engine", "fdsp"], "did you mean fsdp?"),
    (["train", "r.yaml", "--precision", "mixd"], "did you mean mixed?"),
    (["train", "no.yaml"], "no.yaml: no such file"),
    (["train", "."], "is a folder"),
    (["train", "r.yaml", "--set", "train.lr=1"], "--set train.lr: unknown key - did you mean train.optimizer.lr?"),
    (["train", "r.yaml", "--set", "train.steps"], "--set train.steps: expected FIELD=VALUE"),
    (["train", "r.yaml", "--engine", "hsdp"], "hsdp needs at least 2 ranks"),
    (["train", "r.yaml", "--out", "r.yaml"], "is a file, not a folder"),
    (["train", "r.yaml", "--out", "r.yaml/x"], "is a file, not a folder"),
    (["compare", "r.yaml"], "give --engines (and --precisions), or --variants"),
    (["compare", "r.yaml", "--engines", "fsdp", "--variants", "fsdp+mixed,zero3+mixed"], "or --variants"),
    (["compare", "r.yaml", "--precisions", "low", "--variants", "fsdp+mixed,zero3+mixed"], "or --variants"),
    (["compare", "r.yaml", "--variants", "fsdp,zero3"], "'fsdp' is not ENGINE+REGIME"),
    (["compare", "r.yaml", "--variants", "fsdp+mixed,zero+mixed"], "'zero' is not one of"),
    (["compare", "r.yaml", "--variants", "fsdp+mixed,fsdp+mixd"], "did you mean mixed?"),
    (["compare", "r.yaml", "--variants", "fsdp+mixed,fsdp+mixed"], "fsdp+mixed is given twice"),
    (["compare", "r.yaml", "--engines", "fsdp,zero4"], "'zero4' is not one of"),
    (["compare", "r.yaml", "--engines", "fsdp,fsdp"], "fsdp is given twice"),
    (["compare", "r.yaml", "--engines", ","], "at least one name"),
    (["compare", "r.yaml", "--engines", "fsdp", "--precisions", "mixed,lo"], "did you mean low?"),
    (["init", "new.yaml", "--format", "alpacca"], "did you mean alpaca?"),
    (["init", "new.yaml", "--steps", "0"], "--steps"),
    (["init", "new.yaml", "--lr", "nan"], "lr"),
    (["init", "new.yaml", "--engine", "hsdp", "--ranks", "1"], "hsdp needs at least 2 ranks"),
    (["init", "new.yaml", "--model", ""], "model.path: is an empty text"),
    (["init", "r.yaml"], "exists already"),
    (["init", "."], "is a folder"),
    (["init", "no/new.yaml"], "no: is not a folder"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_LINES)
def test_a_bad_request_is_exit_code_2(
    arguments: list[str],
    message: str,
    folder: Path,
    trained: Calls,
    compared: Calls,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(folder.rglob("*"))
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert not trained
    assert not compared
    assert sorted(folder.rglob("*")) == before
    assert (folder / "r.yaml").read_text() == GOOD


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "missing.yaml"],
        ["train", "broken.yaml"],
        ["train", "r.yaml", "--set", "engine.name=fdsp"],
        ["trian", "r.yaml"],
        ["compare", "r.yaml", "--engines", "zer3"],
    ],
)
def test_a_bad_request_in_a_process_of_its_own(arguments: list[str], folder: Path) -> None:
    (folder / "broken.yaml").write_text("model: [a\n")
    done = command(*arguments, cwd=folder)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_several_problems_are_listed_under_a_headline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "r.yaml", "--set", "train.lr=1", "--set", "checkpoint.evry=2"]) == 2
    headline, *rows = capsys.readouterr().err.splitlines()
    assert headline == "error: 2 problems in r.yaml"
    assert [row.split(":")[1] for row in rows] == [" --set train.lr", " --set checkpoint.evry"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"samestep {__version__}\n"


@pytest.mark.parametrize("name", ["init", "train", "compare", "env", "schema"])
def test_every_command_has_help_and_debug(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    assert "--debug" in capsys.readouterr().out


def test_help_names_every_engine_and_regime(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for name in (*get_args(EngineName), *get_args(RegimeName)):
        assert name in text


NOTHING_ASKED: dict[str, Any] = {
    "port": None,
    "json_output": False,
    "overwrite": False,
    "resume": False,
    "resume_from": None,
    "allow_changes": False,
    "stop_after": None,
}


def test_train_hands_over_the_checked_recipe(folder: Path, trained: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "train",
        "r.yaml",
        "--set",
        "train.steps=3",
        "--engine",
        "zero2",
        "--precision",
        "full",
        "--ranks",
        "4",
    ]
    assert cli.main(arguments) == 0
    ((recipe, out),) = [call.pop("arguments") for call in trained]
    assert isinstance(recipe, Recipe)
    assert (recipe.train.steps, recipe.engine.name, recipe.engine.ranks) == (3, "zero2", 4)
    assert recipe.precision.regime == "full"
    assert recipe.model.path == str(folder / "m")
    assert out == folder / "runs" / "story"
    assert trained == [NOTHING_ASKED]
    assert capsys.readouterr().out == ""


def test_train_options(folder: Path, trained: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    trained.answer = {"loss": 0.1, "status": "completed"}
    assert cli.main(["train", "--out", "o/p", "--port", "29511", "--overwrite", "--json", "--debug", "r.yaml"]) == 0
    assert trained[0].pop("arguments")[1] == folder / "o" / "p"
    assert trained == [NOTHING_ASKED | {"port": 29511, "json_output": True, "overwrite": True}]
    assert json.loads(capsys.readouterr().out) == {"loss": 0.1, "status": "completed"}


def test_train_goes_on(folder: Path, trained: Calls) -> None:
    trained.answer = {"status": "stopped"}
    assert cli.main(["train", "r.yaml", "--resume-from", "runs/a", "--allow-changes", "--stop-after", "7"]) == 0
    assert cli.main(["train", "r.yaml", "--resume"]) == 0
    first, second = ({k: v for k, v in call.items() if k != "arguments"} for call in trained)
    assert first == NOTHING_ASKED | {"resume_from": Path("runs/a"), "allow_changes": True, "stop_after": 7}
    assert second == NOTHING_ASKED | {"resume": True}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--resume", "--resume-from", "x"], "two places to go on from"),
        (["--resume", "--overwrite"], "would delete the checkpoint"),
        (["--allow-changes"], "there is nothing to go on from"),
        (["--stop-after", "0"], "--stop-after"),
    ],
)
def test_options_that_contradict_are_refused(
    folder: Path, trained: Calls, capsys: pytest.CaptureFixture[str], options: list[str], what: str
) -> None:
    assert cli.main(["train", "r.yaml", *options]) == 2
    assert what in capsys.readouterr().err
    assert not trained


def test_compare_hands_over_names(folder: Path, compared: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "r.yaml", "--engines", "fsdp, zero3", "--precisions", "mixed,low", "--json"]) == 0
    recipe, variants, out = compared[0].pop("arguments")
    assert [v.name for v in variants] == ["fsdp+mixed", "zero3+mixed", "fsdp+low", "zero3+low"]
    assert recipe.name == "story"
    assert out == folder / "runs" / "story-compare"
    assert json.loads(capsys.readouterr().out) == {"ok": True, "verdict": "equal"}


def test_compare_takes_the_recipes_regime_by_default(folder: Path, compared: Calls) -> None:
    assert cli.main(["compare", "r.yaml", "--engines", "fsdp,ddp", "--set", "precision.regime=full"]) == 0
    assert {v.precision for v in compared[0]["arguments"][1]} == {"full"}


def test_a_bad_verdict_is_exit_code_1(folder: Path, compared: Calls) -> None:
    compared.answer = {"ok": False, "verdict": "not equal"}
    assert cli.main(["compare", "r.yaml", "--engines", "fsdp,ddp"]) == 1


ENDINGS = [
    (RunError("rank 1 died.", remedy="See its log."), 1, "error: rank 1 died. See its log.\n"),
    (KeyboardInterrupt(), 130, ""),
    (OSError(28, "No space left on device", "x"), 1, "error: x: No space left on device."),
    (ZeroDivisionError("division by zero\nmore"), 1, "error: unexpected ZeroDivisionError: division by zero."),
    (ValueError(), 1, "error: unexpected ValueError: no message."),
    (SystemExit(3), 3, ""),
]


@pytest.mark.parametrize(("ending", "code", "message"), ENDINGS)
def test_how_a_run_ends(
    ending: BaseException,
    code: int,
    message: str,
    folder: Path,
    trained: Calls,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained.answer = ending
    assert cli.main(["train", "r.yaml"]) == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert len(error.splitlines()) <= 1


@pytest.mark.parametrize("arguments", [["--debug", "train", "r.yaml"], ["train", "r.yaml", "--debug"]])
def test_debug_shows_the_traceback(
    arguments: list[str], folder: Path, trained: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    trained.answer = ZeroDivisionError("division by zero")
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "Run it again" not in error


def test_schema_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    assert set(json.loads(capsys.readouterr().out)["properties"]) == set(Recipe.model_fields)


def test_a_name_of_a_folder_that_is_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.yaml").write_text(GOOD)
    assert cli.main(["train", str(tmp_path / "r.yaml"), "--out", str(tmp_path / ("x" * 300))]) == 2
    assert "File name too long. Choose another --out." in capsys.readouterr().err
