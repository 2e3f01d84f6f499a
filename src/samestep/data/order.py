"""Order: permutations that depend on two numbers and on nothing else."""

from __future__ import annotations

import numpy as np

SPLIT_STREAM = 2**64 - 1
"""Stream of the train/held-out split; streams from 0 up are the epochs."""


def permutation(count: int, *, seed: int, stream: int) -> np.ndarray:
    """The order of `count` things, int64 [count].

    The things are sorted by the first `count` raw 64-bit outputs of the counter-based generator Philox4x64-10 with
    the key (seed mod 2^64, stream). Raw outputs are the part of numpy that never changes between versions, so
    the order is the same on every machine, engine and world size.
    """
    key = np.array([seed % 2**64, stream], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
