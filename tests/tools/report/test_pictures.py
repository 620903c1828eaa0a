"""Pictures show what grids hold."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ElementTree
import zlib

import pytest
import torch

import flexcp
from flexcp import masks
from flexcp.tools.report import picture_of, table


@pytest.fixture
def picture():
    return picture_of(flexcp.build_block_grid(masks.causal(), 1 << 14), height=32, width=32)


def test_full_and_empty_pixels_are_exact(picture):
    share = picture.share
    assert share.shape == (32, 32)
    assert bool((torch.tril(torch.ones(32, 32), -1).double() * share).sum() == 32 * 31 / 2)
    assert bool((torch.triu(share, 1) == 0).all())
    assert bool(((share.diagonal() > 0) & (share.diagonal() < 1)).all())


def test_pixels_add_up_to_the_tiles():
    grid = flexcp.build_block_grid(masks.sliding_window(3000, 500), 1 << 15)
    share = picture_of(grid, height=37, width=29).share
    rows = torch.bincount(torch.arange(256) * 37 // 256).double()
    tiles = grid.counts()
    expected = tiles["full"] + tiles["partial"] / 2
    assert float((share * rows[:, None] * 256 / 29).sum()) == pytest.approx(expected)


def test_a_png_holds_the_pixels(picture, tmp_path):
    data = picture.save_png(tmp_path / "a.png", scale=3).read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (96, 96)
    length = struct.unpack(">I", data[33:37])[0]
    lines = zlib.decompress(data[41 : 41 + length])
    assert len(lines) == 96 * (1 + 96 * 3)
    first_pixel, lower_left, upper_right = lines[1:4], lines[-288:-285], lines[286:289]
    assert len({first_pixel, lower_left, upper_right}) == 3


def test_an_svg_is_well_formed_and_small(picture, tmp_path):
    path = picture.save_svg(tmp_path / "a.svg")
    root = ElementTree.parse(path).getroot()
    assert root.attrib["viewBox"] == "0 0 32 32"
    assert len(root.findall("{http://www.w3.org/2000/svg}rect")) == 1 + 31 + 32


def test_the_terminal_shows_two_pixels_to_a_character(picture):
    assert len(picture.to_text().splitlines()) == 32
    coloured = picture.to_text(colour=True).splitlines()
    assert len(coloured) == 16
    assert coloured[-1].count("▀") == 31, "the last pixel of the diagonal has nothing above it"
    assert coloured[-1].count("▄") == 1
    assert coloured[0].count(" ") == 30, "what is empty keeps the terminal's background"
    assert coloured[0].endswith("\x1b[0m")


def test_titles_are_escaped_in_svg(tmp_path):
    grid = flexcp.build_block_grid(lambda b, h, q, kv: q >= kv, 256)
    path = picture_of(grid, title="a < b & c").save_svg(tmp_path / "a.svg")
    assert "a &lt; b &amp; c" in path.read_text()


def test_tables_align_numbers_to_the_right():
    text = table(["name", "value"], [["a", 1.5], ["bb", 22]])
    assert text.splitlines()[2] == "| a    |   1.5 |"
    assert text.splitlines()[1] == "|------|------:|"
