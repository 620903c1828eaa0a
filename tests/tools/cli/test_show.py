"""`flexcp show` draws masks, in the terminal and as files."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from flexcp import build_block_grid, masks


def test_pipes_get_shades_without_escapes(flexcp):
    run = flexcp("show", "causal", "--tokens", 1024, "--size", 16)
    lines = run.out.splitlines()
    assert [line.rstrip() for line in lines[:2]] == ["▓▒", "██▓▒"]
    assert len(lines) == 8 + 2, "characters are twice as high as wide"
    assert lines[-1].startswith("1K tokens, 50% of pairs allowed; tiles of 4: ")
    assert "\x1b" not in run.out


def test_pipes_get_a_digit_for_each_rank(flexcp):
    out = flexcp(
        "show", "causal", "--tokens", 1024, "--ranks", 2, "--layout", "head_tail", "--size", 16
    ).out
    assert [line[0] for line in out.splitlines()[:8]] == list("00111100")
    assert "head_tail layout on 2 ranks, 1.000 × the mean" in out


@pytest.mark.parametrize(("terminal", "code"), [("truecolor", "38;2;"), ("256color", "38;5;")])
def test_terminals_get_half_blocks_in_colour(flexcp, monkeypatch, terminal, code):
    for name in ("NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    if terminal == "truecolor":
        monkeypatch.setenv("COLORTERM", "truecolor")
    out = flexcp("show", "full", "--tokens", 1024, "--ranks", 2, "--size", 16).out
    assert code in out
    assert sum(line.count("▀") for line in out.splitlines()) == 16 * 8
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in flexcp("show", "full", "--tokens", 1024, "--ranks", 2).out


def test_files_are_pictures_of_the_grid(flexcp, tmp_path):
    png, svg = tmp_path / "a.png", tmp_path / "new" / "a.svg"
    flexcp("show", "causal", "--tokens", "8K", "--out", png)
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    run = flexcp("show", "causal", "--tokens", "8K", "--ranks", 3, "--size", 32, "--out", svg)
    assert ElementTree.parse(svg).getroot().attrib["viewBox"] == "0 0 32 32"
    assert f"written: {svg}" in run.err
    assert run.out == ""


def test_json_has_exact_counts(flexcp):
    found = json.loads(
        flexcp("show", "sliding_window(100)", "--tokens", 1000, "--block-size", 64, "--json").out
    )
    grid = build_block_grid(masks.sliding_window(100), 1000, block_size=64)
    assert found["tiles"] == grid.counts()
    assert found["allowed_pairs"] == grid.area()


def test_heads_that_differ_are_shown_one_at_a_time(flexcp, tmp_path, monkeypatch):
    (tmp_path / "masks_by_head_of_a_test.py").write_text(
        "def mask(b, h, q_idx, kv_idx):\n    return q_idx * h >= kv_idx * h\n"
    )
    monkeypatch.chdir(tmp_path)
    args = ("show", "masks_by_head_of_a_test:mask", "--tokens", 64, "--heads", 2, "--size", 8)
    first, second = (flexcp(*args, "--head", h).out.splitlines() for h in (0, 1))
    assert first[0] == "█" * 8
    assert second[0] != first[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--out", "a.gif"), "expected a file that ends in .png or .svg, got 'a.gif'"),
        (("--head", 3), "expected a batch element below 1 and a head below 1"),
        (("--ranks", 2, "--layout", "round"), "expected a layout among"),
        (("--out", "/dev/null/a.png"), "a file that can be written"),
        (("--layout", "striped"), "expected --ranks with --layout or --schedule, got none"),
    ],
)
def test_bad_requests_are_explained(flexcp, args, message):
    assert message in flexcp("show", "causal", "--tokens", 256, *args, code=2).err


def test_a_million_tokens_on_62_ranks_are_shown_too(flexcp):
    out = flexcp("show", "causal & sliding_window(64K)", "--tokens", "1M", "--ranks", 62).out
    assert "1M tokens, 6.05% of pairs allowed; tiles of 128" in out
    assert "Z" in out, "the symbol of rank 61"


def test_files_have_a_title_axes_and_a_legend(flexcp, tmp_path):
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    args = ("show", "causal & chunked(1K)", "--tokens", "8K", "--size", 64)
    flexcp(*args, "--ranks", 3, "--out", svg)
    texts = [node.text for node in ElementTree.parse(svg).iter() if node.tag.endswith("}text")]
    for words in ("causal & chunked(1K)", "key position", "query position", "rank", "2", "8K"):
        assert words in texts
    flexcp(*args, "--out", svg)
    assert "every pair allowed" in svg.read_text()
    flexcp(*args, "--ranks", 40, "--out", png)
    width, height = (int.from_bytes(png.read_bytes()[a : a + 4]) for a in (16, 20))
    assert width > 512 < height
