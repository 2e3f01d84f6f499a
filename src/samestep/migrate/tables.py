"""All tables together."""

from __future__ import annotations

from samestep.migrate.accelerate_table import ACCELERATE
from samestep.migrate.deepspeed_table import DEEPSPEED
from samestep.migrate.rows import Row
from samestep.migrate.samestep_table import samestep_table
from samestep.migrate.torchtitan_table import TORCHTITAN
from samestep.migrate.transformers_table import TRANSFORMERS

TABLES = (ACCELERATE, DEEPSPEED, TRANSFORMERS, TORCHTITAN)


def find(path: str) -> Row | None:
    """The row of a field in the first table that has one."""
    return next((row for table in (*TABLES, samestep_table()) if (row := table.find(path)) is not None), None)
