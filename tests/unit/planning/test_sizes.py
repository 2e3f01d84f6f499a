"""Sizes as people write and read them."""

from __future__ import annotations

import pytest

from samestep.planning.sizes import number_text, parse_size, size_text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80_000_000_000),
        ("24 GiB", 24 * 1024**3),
        ("1.5tb", 1_500_000_000_000),
        (" 512MiB ", 512 * 1024**2),
        ("1e9", 10**9),
        (".5KB", 500),
        ("7 B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("80GX", "'GX' is not a unit"),
        ("80G", "'G' is not a unit"),
        ("eighty", "is not a size"),
        ("", "is not a size"),
        ("-80GB", "is not a size"),
        ("0GB", "no memory"),
        ("1e30TB", "no memory"),
        ("1e999", "no memory"),
        ("nan", "is not a size"),
    ],
)
def test_what_is_no_size(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse_size(text)


def test_texts() -> None:
    assert size_text(14_230_000_000) == "14.2 GB"
    assert size_text(1_999) == "2.0 KB"
    assert size_text(32) == "32 B"
    assert number_text(14_230_000_000, "GB") == "14.2"
    assert number_text(1_234_000_000_000, "GB") == "1,234"
    assert number_text(32, "MB") == "< 0.001"
