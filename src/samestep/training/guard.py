"""The guard: a run whose updates rounding would mostly lose does not start."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samestep.dtypes import dtype_name
from samestep.engines.protocol import Shard
from samestep.errors import PrecisionError
from samestep.precision import lost_updates
from samestep.world import World, gather_numbers


def refuse_lost_updates(
    masters: Sequence[Shard], *, peak_lr: float, limit: float | None, world: World, regime: str = "low"
) -> None:
    """Raises PrecisionError when AdamW steps of `peak_lr` would lose more than the share `limit` of their updates.

    Looks at samples of the real weights in the dtype of the masters. A `limit` of None asks for no guard.
    """
    if limit is None:
        return
    lost = total = 0
    for shard in masters:
        numel = torch.Size(shard.shape).numel()
        sampled = lost_updates.sample(shard.values, start=shard.start, numel=numel)
        counts = lost_updates.forecast_lost(sampled, peak_lr)
        lost, total = lost + counts[0], total + counts[1]
    rows = gather_numbers([lost, total], world)
    share = sum(row[0] for row in rows) / max(1.0, sum(row[1] for row in rows))
    if share > limit:
        master = "Set precision.fp8.master: float32. " if regime == "mixed-fp8" else ""
        raise PrecisionError(
            f"at the highest learning rate, {peak_lr:g}, {share:.0%} of the updates would be lost: "
            f"{dtype_name(masters[0].values.dtype)} weights cannot move by so little (the limit is {limit:.0%})",
            where="precision.regime",
            remedy=f"{master}Use precision.regime: mixed, mixed-stochastic, low-stochastic or low-kahan, "
            "or set precision.max_lost_update_share: null to run all the same.",
        )
