"""Configurations of other tools as recipes, recipes as configurations of other tools, and what changes on the way.

No torch and no tool is imported: everything comes from tables of fields (`*_table.py`) and from what they mean
(`*_meaning.py`) in terms of the recipe. `migrate` turns that into a target (`to_*.py`) and a report.
"""

from __future__ import annotations

from samestep.migrate.kinds import KINDS, recognise
from samestep.migrate.migration import TARGETS, Migration, migrate
from samestep.migrate.readers import read_as
from samestep.migrate.source import MigrationError, Source, read

__all__ = ["KINDS", "TARGETS", "Migration", "MigrationError", "Source", "migrate", "read", "read_as", "recognise"]
