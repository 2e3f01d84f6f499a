"""From a source to a target: every field once, with its fate, and the text of the new file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from samestep.errors import RecipeError
from samestep.migrate.accelerate_meaning import SCRIPTS_SCHEDULER
from samestep.migrate.deepspeed_table import DEEPSPEED
from samestep.migrate.output import Output, json_text, yaml_text
from samestep.migrate.reading import Reading
from samestep.migrate.rows import Entry, Finding, Placement, Setting, Status, worst
from samestep.migrate.samestep_table import unsaid
from samestep.migrate.source import MigrationError, Source, nest
from samestep.migrate.to_accelerate import embed_deepspeed, wrap_deepspeed, write_fsdp
from samestep.migrate.to_deepspeed import write_deepspeed
from samestep.migrate.to_samestep import defaults_left, write_samestep
from samestep.recipe import parse

TARGETS = ("samestep", "deepspeed", "accelerate-fsdp", "accelerate-deepspeed")
_FAMILIES = {
    "samestep": (),
    "deepspeed": ("deepspeed",),
    "accelerate-fsdp": ("launcher", "fsdp"),
    "accelerate-deepspeed": ("launcher", "deepspeed"),
}
_WRITERS: dict[str, Callable[[Output], None]] = {
    "samestep": write_samestep,
    "deepspeed": write_deepspeed,
    "accelerate-fsdp": write_fsdp,
    "accelerate-deepspeed": wrap_deepspeed,
}
_INSIDE = "deepspeed_config.deepspeed_config_file:"


@dataclass(frozen=True, kw_only=True)
class Migration:
    """A finished migration."""

    source: str
    kind: str
    target: str
    fields: tuple[Entry, ...]
    """Every field of the source, once."""
    defaults: tuple[Entry, ...]
    """Defaults of the source's tool, and of the target's, that had to be said."""
    problems: tuple[Finding, ...]
    missing: tuple[str, ...]
    """Fields of the recipe that must be given before the target is complete."""
    left: tuple[str, ...] = ()
    """Fields of a new recipe that keep samestep's defaults."""
    text: str = field(default="", repr=False)
    """The new file."""

    @property
    def impossible(self) -> list[Entry]:
        """What the target cannot say."""
        return [entry for entry in (*self.fields, *self.defaults) if entry.status == "impossible"]

    def as_json(self) -> dict[str, Any]:
        """Plain data, in the shape of `samestep migrate --json`."""
        return {
            "source": {"path": self.source, "kind": self.kind},
            "target": self.target,
            "fields": [vars(entry) for entry in self.fields],
            "defaults": [vars(entry) for entry in self.defaults],
            "problems": [vars(finding) for finding in self.problems],
            "missing": list(self.missing),
            "left_at_defaults": list(self.left),
            "text": self.text,
        }


def migrate(source: Source, reading: Reading, target: str, given: dict[str, Any]) -> Migration:
    """`reading` of `source` as a file for `target`. `given` sets fields of the recipe and wins over the source.

    MigrationError when a value cannot be read, or when the new recipe would contradict itself.
    """
    errors = [finding for finding in reading.findings if finding.severity == "error"]
    if errors:
        raise MigrationError(
            "cannot be migrated:", where=str(source.path), details=[shown(finding, source) for finding in errors]
        )
    settings = reading.meaning.settings
    said = {setting.path: setting.value for setting in settings if setting.path is not None}
    said |= given
    out = Output(said=said)
    as_is = bool(reading.meaning.whole) and reading.meaning.whole in _FAMILIES[target]
    if as_is:
        _carry_whole(out, reading, target)
    else:
        _WRITERS[target](out)
        for path, (status, rule) in unsaid(target, said).items():
            out.note(path, None, None, status, rule)
    _carry(out, reading, target)
    fields = tuple(_entry(path, reading, out, target, given, as_is) for path in reading.leaves)
    missing = tuple(dict.fromkeys([*out.missing, *([] if as_is else _asked(reading, out, target))]))
    return Migration(
        source=str(source.path),
        kind=reading.kind,
        target=target,
        fields=fields,
        defaults=tuple(_defaults(reading, out, target, as_is)),
        problems=tuple(reading.findings),
        missing=missing,
        left=tuple(defaults_left(out)) if target == "samestep" else (),
        text=_text(source, out, target, fields, missing),
    )


def shown(finding: Finding, source: Source) -> str:
    """A finding as a line of a message."""
    place = f"{source.path}:{finding.line}" if finding.line else str(source.path)
    return f"{place}: {finding.path}: {finding.what}"


def _asked(reading: Reading, out: Output, target: str) -> list[str]:
    wanted = target in ("samestep", "deepspeed")
    return [path for path in reading.asked if wanted and not out.has(path)]


def _carry_whole(out: Output, reading: Reading, target: str) -> None:
    """The same tool's own configuration, with what it leaves to defaults that surprise written out."""
    config = dict(reading.meaning.carried["deepspeed"])
    if "gradient_clipping" not in config and out.has("train.max_grad_norm"):
        config["gradient_clipping"] = out.get("train.max_grad_norm") or 0.0
    if target == "deepspeed":
        _fill_autos(config, out)
        if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(config):
            _set(config, "train_micro_batch_size_per_gpu", "train.micro_batch", out)
        out.leaves = config
        prefix = ""
    else:
        embed_deepspeed(out, nest(config), int(config.get("zero_optimization.stage", 0)))
        if out.has("engine.ranks"):
            out.leaves["num_processes"] = out.get("engine.ranks")
        prefix = _INSIDE
        out.note("engine.ranks", "num_processes", out.get("engine.ranks"), "renamed", "the same number")
    norm = config.get("gradient_clipping")
    out.note("train.max_grad_norm", f"{prefix}gradient_clipping", norm, "kept", "said: its default is a surprise")


def _fill_autos(config: dict[str, Any], out: Output) -> None:
    """DeepSpeed by itself fills no `auto`: each gets its value, is left to DeepSpeed's default, or is asked for."""
    for path in [path for path, value in config.items() if value == "auto"]:
        row = DEEPSPEED.find(path)
        targets = [] if row is None else row.to.split()
        if row is not None and "auto" in row.harmless:
            continue
        if row is None or not targets or row.topic in ("prefetch", "sharding"):
            del config[path]
        elif path in ("bf16.enabled", "fp16.enabled") and out.has("precision.regime"):
            low = {"bf16.enabled": "bfloat16", "fp16.enabled": "float16"}[path]
            same = out.get("precision.low_dtype", "bfloat16") == low
            config[path] = same and out.get("precision.regime") != "full"
        else:
            _set(config, path, targets[0], out)


def _set(config: dict[str, Any], path: str, recipe_path: str, out: Output) -> None:
    if out.has(recipe_path):
        config[path] = out.get(recipe_path) or 0.0
    else:
        config.pop(path, None)
        out.missing.append(recipe_path)


def _carry(out: Output, reading: Reading, target: str) -> None:
    """Fields that only tools of one family have go over as they are."""
    for family in _FAMILIES[target]:
        if family == "deepspeed":
            continue
        for path, value in reading.meaning.carried.get(family, {}).items():
            out.leaves[path] = value


def _entry(path: str, reading: Reading, out: Output, target: str, given: dict[str, Any], as_is: bool) -> Entry:
    value, row = reading.leaves[path], reading.rows.get(path)
    for family in _FAMILIES[target]:
        for place, origin in reading.meaning.origins.get(family, {}).items():
            if origin == path and (family != "deepspeed" or as_is):
                prefix = _INSIDE if family == "deepspeed" and target != "deepspeed" else ""
                return Entry(
                    path, value, "kept" if place == path else "renamed", prefix + place, value, "the same tool"
                )
    places = [_place(s, out, given) for s in reading.meaning.settings if path in s.sources]
    if places:
        status = _together([place.status for place in places])
        said = {place.target_path: place.value for place in places if place.target_path is not None}
        rule = "; ".join(dict.fromkeys(part for place in places for part in place.rule.split("; ") if part))
        whole = next(iter(said.values()), None) if len(said) == 1 else said or None
        return Entry(path, value, status, ", ".join(said) or None, whole, rule)
    if row is None:
        what = reading.unknown.get(path, "")
        return Entry(path, value, "impossible" if what else "not-needed", None, None, what or "an empty section")
    if row.ignored:
        return Entry(path, value, "not-needed", None, None, row.ignored)
    if value in row.harmless or value is None or value == {} or row.status in ("kept", "renamed", "computed"):
        return Entry(path, value, "not-needed", None, None, f"changes nothing: {row.why}")
    return Entry(path, value, row.status, None, None, row.why)


def _place(setting: Setting, out: Output, given: dict[str, Any]) -> Placement:
    """Where one meaning of a field went, with the worse of its two fates."""
    if setting.path is None:
        return Placement("", None, None, setting.status, setting.rule)
    placement = out.placements.get(setting.path)
    if placement is None:
        return Placement(
            setting.path,
            None,
            None,
            worst([setting.status, "not-needed"]),
            f"{setting.rule}; the script decides {setting.path}",
        )
    rule = "; ".join(dict.fromkeys(part for part in (setting.rule, placement.rule) if part))
    if setting.path in given and given[setting.path] != setting.value:
        rule += f"; --set gives {given[setting.path]} and wins over {setting.value}"
    status = setting.status
    if placement.status != "kept":
        status = placement.status if status in ("kept", "renamed", "computed") else worst([status, placement.status])
    return replace(placement, status=status, rule=rule)


def _together(statuses: list[Status]) -> Status:
    """The status of a field with several meanings: not needed only where none of them is."""
    needed: list[Status] = [status for status in statuses if status != "not-needed"]
    return worst(needed) if needed else "not-needed"


def _defaults(reading: Reading, out: Output, target: str, as_is: bool) -> list[Entry]:
    entries = []
    for setting in reading.meaning.settings:
        if any(source in reading.leaves for source in setting.sources):
            continue
        if SCRIPTS_SCHEDULER in setting.sources and target.startswith("accelerate"):
            continue
        place = _place(setting, out, {})
        if place.status == "not-needed" or (as_is and place.target_path is None):
            continue
        if reading.kind == "samestep" and place.target_path is None and place.status not in ("lossy", "impossible"):
            continue
        entries.append(
            Entry(setting.sources[0], setting.default, place.status, place.target_path, place.value, place.rule)
        )
    for extra in out.extra:
        entries.append(
            Entry(extra.target_path or "(the target)", None, extra.status, extra.target_path, extra.value, extra.rule)
        )
    return entries


def _text(source: Source, out: Output, target: str, fields: tuple[Entry, ...], missing: tuple[str, ...]) -> str:
    if target == "deepspeed":
        return json_text(out.data())
    comments = _comments(source, out, fields)
    header = [f"# From {source.path.name}, by samestep migrate."]
    header += [f"# {path} is not said: give --set {path}=..." for path in missing]
    text = yaml_text(out.data(), comments, header)
    if target == "samestep" and not missing:
        try:
            parse(text, source="the new recipe")
        except RecipeError as error:
            what = "; ".join(f"{problem.field}: {problem.what}" for problem in error.problems)
            raise MigrationError(
                f"The new recipe would not be valid: {what}.", where=str(source.path), remedy="Give other --set values."
            ) from None
    return text


def _comments(source: Source, out: Output, fields: tuple[Entry, ...]) -> dict[str, tuple[list[str], str]]:
    """The comments of the source by the place in the target where their field went; of several, the first."""
    written = {part for path in out.leaves for part in accumulate(path.split("."), "{}.{}".format)}
    places = {entry.path: (entry.target_path or "").split(", ")[0] for entry in fields}
    found: dict[str, tuple[list[str], str]] = {}
    for path, (above, beside) in source.comments.items():
        # Sections, and fields that follow from others, keep their place in a file of the same tool.
        place = path if path in written else places.get(path, "")
        if place not in written:
            continue
        if place not in found:
            found[place] = (above, beside)
            continue
        lines, end = found[place]
        found[place] = ([*lines, *above, beside] if beside else [*lines, *above], end)
    return found
