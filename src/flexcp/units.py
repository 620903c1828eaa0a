"""Sizes as people write and read them: 1M tokens, 3.2 ms, 45 MB."""

from __future__ import annotations

import math
import re

from flexcp.errors import FlexCPError, quote

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d[\d_]*(?:\.\d+)?)([KMG]?)", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """A whole number, with K, M and G for powers of 1,024.

    >>> parse_size("4096"), parse_size("128K"), parse_size("1.5M"), parse_size("1_000")
    (4096, 131072, 1572864, 1000)
    """
    found = _SIZE.fullmatch(text.strip())
    size = float(found[1].replace("_", "")) * _UNITS[found[2].upper()] if found else 0.5
    if found is None or not math.isfinite(size) or size != int(size):
        raise FlexCPError(
            "a whole number such as 4096, 128K or 1M",
            quote(text),
            "K, M and G stand for 1,024, 1,024² and 1,024³",
        )
    return int(size)


def format_size(count: int) -> str:
    """The shortest exact way to write a number of tokens.

    >>> format_size(1 << 20), format_size(3 << 10), format_size(1000)
    ('1M', '3K', '1,000')
    """
    for unit in ("G", "M", "K"):
        if count and count % _UNITS[unit] == 0:
            return f"{count // _UNITS[unit]:,}{unit}"
    return f"{count:,}"


def format_seconds(seconds: float) -> str:
    """Three digits and a unit.

    >>> format_seconds(0.0123), format_seconds(2.5e-5), format_seconds(2), format_seconds(0)
    ('12.3 ms', '25.0 µs', '2.00 s', '0 s')
    """
    if not seconds:
        return "0 s"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(seconds) * factor >= 0.9995 or unit == "µs":
            return f"{_three_digits(seconds * factor)} {unit}"
    raise AssertionError


def format_bytes(count: float) -> str:
    """Three digits and a decimal unit.

    >>> format_bytes(1234), format_bytes(15e9), format_bytes(0)
    ('1.23 KB', '15.0 GB', '0 B')
    """
    return _with_decimal_unit(count, ("B", "KB", "MB", "GB", "TB", "PB"))


def format_count(count: float) -> str:
    """Three digits and a decimal unit.

    >>> format_count(549755813888), format_count(999)
    ('550 G', '999')
    """
    return _with_decimal_unit(count, ("", "K", "M", "G", "T", "P", "E")).strip()


def _with_decimal_unit(count: float, units: tuple[str, ...]) -> str:
    size = float(count)
    for unit in units:
        if abs(size) < 999.5 or unit == units[-1]:
            digits = f"{size:.0f}" if unit == units[0] else _three_digits(size)
            return f"{digits} {unit}"
        size /= 1000
    raise AssertionError


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{digits}f}"
