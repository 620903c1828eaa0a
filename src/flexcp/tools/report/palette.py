"""Colours of ranks: hues around a perceptual circle, neighbours apart in lightness too."""

from __future__ import annotations

import math

Colour = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""

_FIRST_HUE = 258.0
_LIGHTNESS = (0.62, 0.72, 0.55, 0.67)
_YELLOW, _LIGHTER = 100.0, 0.07
"""Yellow is only yellow if it is light, blue only blue if it is dark."""
_CHROMA = 0.13


def rank_colours(ranks: int) -> list[Colour]:
    """One colour for each rank; blue and amber for two.

    >>> rank_colours(2)
    [(63, 114, 190), (230, 174, 77)]
    >>> len(set(rank_colours(64)))
    64
    """
    found = []
    for rank in range(ranks):
        hue = _FIRST_HUE + 360.0 * rank / ranks
        base = _LIGHTNESS[rank % len(_LIGHTNESS)] if ranks > 8 else _LIGHTNESS[rank % 2]
        lighter = _LIGHTER * math.cos(math.radians(hue - _YELLOW))
        found.append(oklch(base + lighter, _CHROMA, hue))
    return found


def oklch(lightness: float, chroma: float, hue: float) -> Colour:
    """A colour of the OKLCH space in sRGB, with less chroma where sRGB has no such colour.

    >>> oklch(1.0, 0.0, 0.0)
    (255, 255, 255)
    """
    angle = math.radians(hue)
    while True:
        red, green, blue = _linear(lightness, chroma * math.cos(angle), chroma * math.sin(angle))
        if chroma < 1e-3 or all(-1e-4 <= x <= 1 + 1e-4 for x in (red, green, blue)):
            return _encoded(red), _encoded(green), _encoded(blue)
        chroma *= 0.95


def hexadecimal(colour: Colour) -> str:
    """As in CSS and SVG.

    >>> hexadecimal((63, 114, 190))
    '#3f72be'
    """
    return "#" + "".join(f"{c:02x}" for c in colour)


def _linear(lightness: float, a: float, b: float) -> tuple[float, float, float]:
    """OKLab to linear sRGB, as its author gives it."""
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
    )


def _encoded(linear: float) -> int:
    linear = min(1.0, max(0.0, linear))
    value = 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055
    return round(value * 255)
