"""Figures for papers, and pictures painted by rank."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import torch

import flexcp
from flexcp import masks
from flexcp.layout import contiguous, head_tail
from flexcp.tools.report import picture_by_rank, save_figure
from flexcp.tools.report.palette import rank_colours


def test_a_figure_has_the_matrix_the_strip_and_a_bar_for_each_rank(tmp_path):
    plan = flexcp.make_plan(masks.causal(), 5000, 5, num_heads=4)
    path = save_figure(plan, tmp_path / "a.svg", title="a < b")
    root = ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}svg")) == 2
    assert len(root.findall(f"{space}rect")) == 1 + 2 * 5
    texts = [node.text for node in root.iter(f"{space}text")]
    assert "a < b" in texts
    assert any("predicted on h100-ib" in str(text) for text in texts)


def test_lines_are_painted_in_the_colour_of_their_owner():
    grid = flexcp.build_block_grid(masks.full(), 1024)
    picture = picture_by_rank(grid, contiguous(1024, 2))
    assert picture.paint is not None
    blue, amber = (torch.tensor(c).double() for c in rank_colours(2))
    assert torch.allclose(picture.paint[:4], blue.expand(4, 8, 3))
    assert torch.allclose(picture.paint[4:], amber.expand(4, 8, 3))
    assert torch.equal(picture.pixels()[0, 0].double(), blue)


def test_a_line_of_several_owners_has_their_mean_colour():
    grid = flexcp.build_block_grid(masks.full(), 256)
    picture = picture_by_rank(grid, contiguous(256, 8), height=1)
    mean = torch.tensor(rank_colours(8)).double().mean(0)
    assert picture.paint is not None
    assert torch.allclose(picture.paint[0, 0], mean)


def test_without_colour_ranks_are_digits():
    grid = flexcp.build_block_grid(masks.causal(), 512)
    text = picture_by_rank(grid, head_tail(512, 2)).to_text()
    assert text.splitlines() == ["0", "11", "111", "0000"]


def test_older_terminals_get_their_256_colours():
    grid = flexcp.build_block_grid(masks.causal(), 512)
    text = picture_by_rank(grid, head_tail(512, 2)).to_text(colour=8)
    assert "\x1b[38;5;" in text
    assert "38;2;" not in text


def test_colours_of_many_ranks_differ_and_those_of_neighbours_most():
    colours = torch.tensor(rank_colours(64)).double()
    apart = (colours - colours.roll(1, 0)).norm(dim=1)
    assert len(set(rank_colours(64))) == 64
    assert float(apart.min()) > 15
