"""Letters of three by five dots, for images that are written without a font library."""

from __future__ import annotations

import torch
from torch import Tensor

_GLYPHS = {
    "0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717",
    "6": "74757", "7": "71111", "8": "75757", "9": "75717", "A": "75755", "B": "65656",
    "C": "74447", "D": "65556", "E": "74647", "F": "74644", "G": "74557", "H": "55755",
    "I": "72227", "J": "11157", "K": "55655", "L": "44447", "M": "57755", "N": "65555",
    "O": "75557", "P": "75744", "Q": "75571", "R": "75655", "S": "74717", "T": "72222",
    "U": "55557", "V": "55552", "W": "55775", "X": "55255", "Y": "55222", "Z": "71247",
    " ": "00000", ".": "00002", ",": "00024", "-": "00700", "_": "00007", "(": "24442",
    ")": "21112", "&": "25253", "|": "22222", "~": "03600", "%": "51245", ":": "02020",
    "/": "11244", "=": "07070", "*": "05250", "+": "02720", "[": "64446", "]": "31113",
    "'": "22000",
}  # fmt: skip
"""Five rows from top to bottom, each three dots as an octal digit."""
_UNKNOWN = "77777"
_DOT = 2
"""Pixels of a dot's side."""


def text_bitmap(text: str) -> Tensor:
    """The dots of a text, bool [10, 8 * characters]: where ink is; letters are capitals.

    >>> text_bitmap("ab").shape, bool(text_bitmap(" ").any())
    (torch.Size([10, 16]), False)
    """
    found = torch.zeros(5, 4 * len(text), dtype=torch.bool)
    for place, sign in enumerate(text.upper()[: len(text)]):
        for row, digit in enumerate(_GLYPHS.get(sign, _UNKNOWN)):
            bits = [bool(int(digit) & mask) for mask in (4, 2, 1)]
            found[row, 4 * place : 4 * place + 3] = torch.tensor(bits)
    return found.repeat_interleave(_DOT, 0).repeat_interleave(_DOT, 1)
