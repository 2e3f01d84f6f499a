"""What unit tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """A run in this process opens a group of one rank. Left open, it would hang in whatever forks later."""
    yield
    if "samestep.world" in sys.modules:
        sys.modules["samestep.world"].stop()
