"""The page of the documentation is what the tables say."""

from __future__ import annotations

from pathlib import Path

from samestep.migrate.accelerate_table import ACCELERATE
from samestep.migrate.deepspeed_table import DEEPSPEED
from samestep.migrate.fields_page import fields_page
from samestep.migrate.samestep_table import samestep_table
from samestep.migrate.torchtitan_table import TORCHTITAN
from samestep.migrate.transformers_table import TRANSFORMERS

PAGE = Path(__file__).parents[3] / "docs" / "migrate-fields.md"
TABLES = (ACCELERATE, DEEPSPEED, TORCHTITAN, TRANSFORMERS)


def test_the_page_is_the_generated_one() -> None:
    again = "python -m samestep.migrate.fields_page > docs/migrate-fields.md"
    assert PAGE.read_text(encoding="utf-8") == fields_page(), f"write it again: {again}"


def test_every_field_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for table in TABLES:
        for row in table:
            assert f"`{row.path}`" in text, row.path


def test_the_tables_name_fields_that_a_recipe_has() -> None:
    known = {row.path for row in samestep_table()}
    for table in TABLES:
        for row in table:
            assert set(row.to.split()) <= known, row.path


def test_a_field_that_is_carried_over_has_somewhere_to_go() -> None:
    for table in TABLES:
        for row in table:
            if row.status in ("kept", "renamed") and not row.ignored:
                assert row.to, row.path
