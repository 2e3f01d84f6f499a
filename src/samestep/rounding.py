"""Stochastic rounding to bfloat16, with random numbers that depend on where an element is and on nothing else.

The random bits of an element come from a hash of (seed, step, parameter name, purpose) and of the element's index in
the flattened parameter. So every engine, at every world size and after every resume, rounds it alike.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

_CHUNK = 1 << 16
_LOW_BITS = 0xFFFF
_LAST_NAN = 0x7FFF0000


@dataclass(frozen=True)
class Stream:
    """The random numbers of one parameter for one purpose at one step: two 32-bit keys, as signed numbers."""

    first: int
    second: int


def stream(seed: int, step: int, name: str, purpose: str) -> Stream:
    """The stream for a parameter's elements. `purpose` keeps two roundings of one parameter in one step apart."""
    digest = hashlib.sha256(f"{seed}/{step}/{name}/{purpose}".encode()).digest()
    first, second = (int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4))
    return Stream(first, second)


def random_bits(random: Stream, *, start: int, numel: int, device: torch.device | None = None) -> torch.Tensor:
    """Uniform random bits of the elements from index `start` on: int32 [numel].

    A keyed variant of the 32-bit finaliser "lowbias32" (C. Wellons, "Prospecting for Hash Functions", 2018): its second
    key goes in between the two multiplications. An index above 2**32 enters through the first key.
    """
    left = (1 << 32) - (start & 0xFFFFFFFF)
    if numel > left:
        cuts = ((start, left), (start + left, numel - left))
        return torch.cat([random_bits(random, start=begin, numel=count, device=device) for begin, count in cuts])
    bits = torch.arange(numel, dtype=torch.int32, device=device).add_(_signed(start))
    bits.bitwise_xor_(_signed(random.first + 0x9E3779B1 * (start >> 32)))
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    bits.bitwise_xor_(random.second)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def stochastic_to_bfloat16(
    values: torch.Tensor, random: Stream, *, start: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rounds fp32 `values` [n] to bf16 up or down with probabilities that make the expectation exact.

    `start` is the index of the first element in its parameter. Writes into `out` (bf16 [n]) when given. A value that
    bf16 holds stays as it is, infinities and the NaNs of arithmetic too; beyond the largest bf16 number rounding may
    reach infinity.
    """
    assert values.dtype == torch.float32 and values.dim() == 1
    rounded = torch.empty_like(values, dtype=torch.bfloat16) if out is None else out
    for begin in range(0, values.numel(), _CHUNK):
        chunk = values[begin : begin + _CHUNK]
        bits = random_bits(random, start=start + begin, numel=chunk.numel(), device=values.device)
        # Adding 16 random bits below bf16's last place carries into it with the probability of the dropped fraction.
        # GPUs' NaN, 0x7FFFFFFF, would carry over into zero.
        patterns = chunk.view(torch.int32).clamp(max=_LAST_NAN)
        bits.bitwise_and_(_LOW_BITS).add_(patterns).bitwise_and_(~_LOW_BITS)
        rounded[begin : begin + _CHUNK].copy_(bits.view(torch.float32))
    return rounded


def _signed(value: int) -> int:
    """The 32-bit pattern of a number as a signed int32."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value
