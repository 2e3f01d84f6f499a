"""Reads Accelerate configurations: their own fields, and DeepSpeed's, which they name in two ways."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.migrate.accelerate_meaning import distributed_type, read_accelerate
from samestep.migrate.accelerate_table import ACCELERATE, OLD_NAMES, current_name
from samestep.migrate.deepspeed_meaning import read_deepspeed
from samestep.migrate.deepspeed_table import DEEPSPEED
from samestep.migrate.reading import Part, Reading, look_up
from samestep.migrate.rows import Finding, Meaning
from samestep.migrate.source import MigrationError, Source, flatten, read
from samestep.migrate.values import Values, readable

_D = "deepspeed_config."
_FILE = _D + "deepspeed_config_file"
# Fields of the launcher's section, and the fields of a DeepSpeed JSON that they become.
_INSIDE = {
    _D + "zero_stage": "zero_optimization.stage",
    _D + "gradient_accumulation_steps": "gradient_accumulation_steps",
    _D + "gradient_clipping": "gradient_clipping",
    _D + "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    _D + "offload_param_device": "zero_optimization.offload_param.device",
    _D + "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
# What Accelerate refuses beside a JSON file.
_REFUSED = (*_INSIDE, _D + "offload_optimizer_nvme_path", _D + "offload_param_nvme_path", "mixed_precision")


@dataclass
class DeepSpeedPart:
    """DeepSpeed's fields inside another tool's configuration."""

    given: dict[str, Any]
    """Under DeepSpeed's names, with what the other tool fills in."""
    names: dict[str, str]
    """Names of the fields in the source."""
    file: dict[str, Any] = field(default_factory=dict)
    """Fields of a JSON of its own, under the names of the source; they are part of the report."""


def read_accelerate_file(source: Source, given: dict[str, Any]) -> Reading:
    """An Accelerate configuration, of any version."""
    leaves = source.leaves()
    names = {current_name(path): path for path in leaves}
    under = {name: leaves[path] for name, path in names.items()}
    values = Values(ACCELERATE, under, names=names, extra=given)
    top = {path: value for path, value in under.items() if "." not in path}
    inner = {path: value for path, value in under.items() if "." in path}
    parts = [
        Part(table=ACCELERATE, leaves=top, names=names, texts_are_numbers=True, unknown_is="refuses it"),
        Part(table=ACCELERATE, leaves=inner, names=names, texts_are_numbers=True),
    ]
    for old, new in OLD_NAMES.items():
        if any(path.endswith(old.partition(".")[2]) for path in leaves):
            values.find(new, "warning", f"is called {new.rpartition('.')[2]} now")
    for path in [path for path in leaves if names[current_name(path)] != path]:
        values.find(path, "error", f"is given twice: {names[current_name(path)]} says the same")
    if isinstance(under.get("num_machines"), str):
        values.find("num_machines", "warning", "is a text, not a number: accelerate launch compares it and fails")
    part = None
    rows, findings, unknown = look_up(source, parts)
    if not _faulty(findings, values) and distributed_type(values) == "DEEPSPEED":
        part = _deepspeed_part(source, values)
        rows, findings, unknown = look_up(source, [*parts, _part_of_file(part)])
    if not _faulty(findings, values):
        read_accelerate(values)
        if part is not None:
            findings += _read_part(values, part)
    carried, origins = _carried(under, names)
    if part is not None:
        carried["deepspeed"] = {path: _plain(path, value) for path, value in part.given.items()}
        shown = {**leaves, **part.file}
        origins["deepspeed"] = {
            path: part.names[path] for path in part.given if part.names.get(path) in shown and DEEPSPEED.find(path)
        }
    meaning = Meaning(
        settings=tuple(values.settings), carried=carried, origins=origins, whole="deepspeed" if part else ""
    )
    return Reading(
        kind="accelerate",
        leaves={**leaves, **(part.file if part else {})},
        rows=rows,
        meaning=meaning,
        findings=findings + _placed(source, values.findings),
        asked=values.asked,
        unknown=unknown,
    )


def _faulty(findings: list[Finding], values: Values) -> bool:
    return any(found.severity == "error" for found in [*findings, *values.findings])


def json_of(value: Any, folder: Path) -> dict[str, Any]:
    """The DeepSpeed configuration that `value` names: a mapping, a file, a JSON text or one in base64.

    ValueError, with a reason, when it names none.
    """
    if isinstance(value, dict):
        return value
    text = str(value)
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"is not valid JSON: {error.msg}") from None
    for place in (Path(text), folder / text):
        if len(text) < 1024 and place.is_file():
            try:
                return read(place).data
            except MigrationError as error:
                raise ValueError(str(error)) from None
    try:
        return json.loads(base64.urlsafe_b64decode(text).decode())
    except (ValueError, TypeError):
        raise ValueError(f"there is no file {text[:60]!r}, here or beside the configuration") from None


def _part_of_file(part: DeepSpeedPart) -> Part:
    inside = {name: path for path, name in part.names.items() if name in part.file}
    return Part(
        table=DEEPSPEED,
        leaves={inside[name]: value for name, value in part.file.items()},
        names={path: name for name, path in inside.items()},
    )


def _deepspeed_part(source: Source, values: Values) -> DeepSpeedPart:
    if values.given.get(_FILE) not in (None, "none"):
        return _from_file(source, values)
    precision = str(values.get("mixed_precision")).lower()
    given = {
        "zero_optimization.stage": 2,
        "gradient_accumulation_steps": values.extra.get("train.accumulation", 1),
        "gradient_clipping": values.extra.get("train.max_grad_norm", 1.0),
        "bf16.enabled": precision == "bf16",
        "fp16.enabled": precision == "fp16",
    }
    for outer, inner in _INSIDE.items():
        if values.has(outer):
            given[inner] = values.given[outer]
    names = {inner: values.name(outer) for outer, inner in _INSIDE.items()}
    names |= {"bf16.enabled": "mixed_precision", "fp16.enabled": "mixed_precision"}
    if precision == "fp16":
        del given["bf16.enabled"]
    else:
        del given["fp16.enabled"]
    if precision == "fp8":
        values.find("mixed_precision", "warning", "fp8 under DeepSpeed needs Transformer Engine or MS-AMP")
        values.say(None, None, "mixed_precision", rule="fp8 under DeepSpeed has no counterpart", status="impossible")
    return DeepSpeedPart(given, names)


def _from_file(source: Source, values: Values) -> DeepSpeedPart:
    try:
        config = json_of(values.given[_FILE], source.path.parent)
        if not isinstance(config, dict):
            raise ValueError("holds no keys and values")
    except ValueError as error:
        values.find(_FILE, "error", str(error))
        return DeepSpeedPart({}, {})
    values.say(None, None, _FILE, rule="its fields stand below, each by itself", status="computed")
    given = dict(flatten(config))
    names = {path: f"{_FILE}:{path}" for path in given}
    for path in _REFUSED:
        if values.given.get(path) is not None:
            inner = _INSIDE.get(path, "")
            other = f"; the file says {given[inner]!r}" if inner in given else ""
            what = f"Accelerate refuses it beside deepspeed_config_file, whose fields count{other}"
            values.find(path, "warning", what)
            values.say(None, None, path, rule=what, status="not-needed")
    return DeepSpeedPart(given, names, {names[path]: value for path, value in given.items()})


def _read_part(values: Values, part: DeepSpeedPart) -> list[Finding]:
    inside = Values(DEEPSPEED, part.given, names=part.names, extra=values.extra)
    read_deepspeed(inside)
    values.settings += inside.settings
    values.asked += inside.asked
    return inside.findings


def _plain(path: str, value: Any) -> Any:
    row = DEEPSPEED.find(path)
    return value if row is None else readable(row, value)


def _carried(under: dict[str, Any], names: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields that other targets of the same tool take over, and where they come from."""
    carried: dict[str, dict[str, Any]] = {"launcher": {}, "fsdp": {}}
    origins: dict[str, dict[str, str]] = {"launcher": {}, "fsdp": {}}
    for path, value in under.items():
        row = ACCELERATE.find(path)
        invalid = path.endswith("state_dict_type") and str(value) in ("LOCAL_STATE_DICT", "2")
        if row is not None and row.family and value is not None and not invalid:
            carried[row.family][path] = readable(row, value)
            origins[row.family][path] = names[path]
    return carried, origins


def _placed(source: Source, findings: list[Finding]) -> list[Finding]:
    return [Finding(f.path, f.severity, f.what, f.line or source.lines.get(f.path)) for f in findings]
