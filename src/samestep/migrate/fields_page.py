"""The page of the documentation that sets the fields of FSDP, DeepSpeed and samestep side by side.

`python -m samestep.migrate.fields_page > docs/migrate-fields.md` writes it; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator

from samestep.migrate.accelerate_table import ACCELERATE
from samestep.migrate.deepspeed_table import DEEPSPEED
from samestep.migrate.rows import Row
from samestep.migrate.torchtitan_table import TORCHTITAN
from samestep.migrate.transformers_table import TRANSFORMERS

_TOPICS = {
    "sharding": "Sharding",
    "offload": "Offload",
    "loading": "Loading",
    "checkpointing": "Checkpoints and exports",
    "prefetch": "Prefetch and buckets",
    "wrapping": "Wrapping",
    "activations": "Activations",
    "precision": "Precision",
    "clipping": "Clipping",
    "accumulation": "Batches and accumulation",
    "optimizer": "Optimizer",
    "schedule": "Schedule",
    "logging": "Logging",
    "other": "Everything else",
}
_HEAD = """# Fields, side by side

What `samestep migrate` does with every field of Accelerate's launcher file (FSDP, DDP and the DeepSpeed section), of a
DeepSpeed JSON, of TrainingArguments and of torchtitan. This page is generated from the tables that the command itself
uses: `python -m samestep.migrate.fields_page > docs/migrate-fields.md`.

*kept*: the same name and meaning. *renamed*: the same meaning. *computed*: follows by the rule. *not needed*: nothing
changes without it. *lossy*: the rule says what changes. *impossible*: refused without `--allow-lossy`. A field that is
lossy or impossible is harmless at the values named under "harmless at", and then not needed.
"""


def fields_page() -> str:
    """The page, as Markdown."""
    parts = [_HEAD]
    for topic, title in _TOPICS.items():
        parts += [f"\n## {title}\n", *_pairs(topic), *_alone(topic)]
    parts += ["\n## TrainingArguments\n", *_table(list(TRANSFORMERS)), "\n## torchtitan\n", *_table(list(TORCHTITAN))]
    return "\n".join(parts) + "\n"


def _pairs(topic: str) -> Iterator[str]:
    """Fields that a recipe has too, by field of the recipe."""
    targets: dict[str, tuple[list[Row], list[Row]]] = {}
    for side, table in enumerate((ACCELERATE, DEEPSPEED)):
        for row in table:
            if row.to and row.topic == topic:
                targets.setdefault(row.to, ([], []))[side].append(row)
    if not targets:
        return
    yield "| samestep | Accelerate | DeepSpeed | rule |"
    yield "|---|---|---|---|"
    for target, (left, right) in targets.items():
        rules = dict.fromkeys(f"{_why(row)}" for row in (*left, *right))
        fields = [
            "<br>".join(f"`{row.path}` ({_status(row)}{_default(row)})" for row in side) for side in (left, right)
        ]
        yield f"| {'<br>'.join(f'`{name}`' for name in target.split())} | {' | '.join(fields)} | {'; '.join(rules)} |"
    yield ""


def _alone(topic: str) -> Iterator[str]:
    """Fields that no field of a recipe says."""
    rows = [row for table in (ACCELERATE, DEEPSPEED) for row in table if not row.to and row.topic == topic]
    if rows:
        yield "Without a field of the recipe:\n"
        yield from _table(rows)


def _table(rows: list[Row]) -> Iterator[str]:
    yield "| field | default | becomes | samestep | rule |"
    yield "|---|---|---|---|---|"
    for row in rows:
        names = "<br>".join(f"`{name}`" for name in row.to.split())
        default = "" if row.default is None else f"`{_shown(row.default)}`"
        yield f"| `{row.path}` | {default} | {_status(row)} | {names} | {_why(row)} |"


def _why(row: Row) -> str:
    text = row.why
    if row.harmless and row.status in ("lossy", "impossible"):
        text += f"; harmless at {', '.join(f'`{_shown(value)}`' for value in row.harmless)}"
    if row.ignored:
        text += f"; {row.ignored}"
    if row.deprecated:
        text += f"; deprecated, now {row.deprecated}"
    return text.replace("|", "\\|")


def _status(row: Row) -> str:
    return "not needed" if row.ignored else row.status.replace("-", " ")


def _default(row: Row) -> str:
    return "" if row.default is None else f", default `{_shown(row.default)}`"


def _shown(value: object) -> str:
    if value is None or value == "":
        return "null" if value is None else '""'
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    print(fields_page(), end="")
