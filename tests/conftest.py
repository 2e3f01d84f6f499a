"""What several kinds of tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

# Libraries that import DeepSpeed otherwise have it guess, and say so on stdout.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# Under nohup SIGHUP is ignored, by children too; tests that send it need what a terminal gives.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

if TYPE_CHECKING:
    from tests.distributed.ranks import RankPools


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """Real gloo ranks, started once per session. Nothing of them is left at its end."""
    from tests.distributed.ranks import RankPools

    pools = RankPools()
    yield pools
    pools.close()
