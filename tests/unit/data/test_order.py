"""The order against Philox4x64-10 written from its paper (Salmon and others, 2011), in plain integers."""

from __future__ import annotations

from samestep.data.order import SPLIT_STREAM, permutation

WORD = 2**64


def philox_block(counter: int, key: tuple[int, int]) -> list[int]:
    x = [counter % WORD, 0, 0, 0]
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
        x = [second // WORD ^ x[1] ^ k0, second % WORD, first // WORD ^ x[3] ^ k1, first % WORD]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % WORD, (k1 + 0xBB67AE8584CAA73B) % WORD
    return x


def sorted_by_philox(count: int, seed: int, stream: int) -> list[int]:
    # The counter is 1 in the first block.
    words = [word for block in range(1, count // 4 + 2) for word in philox_block(block, (seed % WORD, stream))]
    return sorted(range(count), key=words.__getitem__)


def test_order_is_that_of_philox():
    for count, seed, stream in [(1, 0, 0), (7, 0, 0), (7, 0, 1), (50, 3, 2), (50, WORD + 3, 2), (9, 1, SPLIT_STREAM)]:
        assert permutation(count, seed=seed, stream=stream).tolist() == sorted_by_philox(count, seed, stream)


def test_seeds_and_streams_differ():
    orders = {tuple(permutation(20, seed=seed, stream=stream)) for seed in range(5) for stream in range(5)}
    assert len(orders) == 25
