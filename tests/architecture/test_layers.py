"""The layers of the design, as import-linter checks them, and a proof that the check can fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package in `folder`/src with the configuration in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    command = [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports_command as run; run()"]
    command += ["--no-logo", "--no-cache", str(folder / "pyproject.toml")]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def copy_of_package(folder: Path) -> Path:
    """Copy source and configuration to `folder` and return the copied package."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "src" / "samestep"


def test_imports_go_downward() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_an_upward_import_is_found(tmp_path: Path) -> None:
    errors = copy_of_package(tmp_path) / "errors.py"
    errors.write_text(errors.read_text() + "\nimport samestep.recipe.schema\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    assert "samestep.errors is not allowed to import samestep.recipe" in result.stdout


def test_a_tensor_library_in_the_recipe_is_found(tmp_path: Path) -> None:
    schema = copy_of_package(tmp_path) / "recipe" / "schema.py"
    schema.write_text(schema.read_text() + "\nimport torch\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    assert "samestep.recipe is not allowed to import torch" in result.stdout


def test_a_module_without_a_level_is_found(tmp_path: Path) -> None:
    (copy_of_package(tmp_path) / "stray.py").write_text("")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    assert "samestep.stray" in result.stdout
