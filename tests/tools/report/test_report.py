"""The report page in a real browser: it loads, answers to the mouse, and fits its screen."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest
from browser import browser, needs_browser

import flexcp
from flexcp import masks
from flexcp.tools.report import report_page, save_figure, save_report, strategies

LENGTHS = [9000, 300, 5000, 1200, 500, 384]
TITLE = "causal & document </script> <b>"


@pytest.fixture(scope="module")
def plan():
    mask = masks.causal() & masks.document(lengths=LENGTHS)
    return flexcp.make_plan(mask, 1 << 14, 6, num_heads=8, head_dim=64, schedule="exchange")


@pytest.fixture(scope="module")
def found(plan):
    return strategies(plan)


@pytest.fixture(scope="module")
def report(plan, found, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    return save_report(plan, path, title=TITLE, notes=["drawn by hand"], compared=found)


@pytest.fixture(scope="module")
def tab():
    with browser() as page:
        yield page


@pytest.fixture
def page(tab, report):
    tab.errors.clear()
    tab.resize(1280, 900)
    tab.prefer("light")
    tab.open(report)
    return tab


def data_of(page: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_needs_nothing_from_outside(report):
    text = report.read_text()
    assert not re.findall(r"https?://(?!www\.w3\.org)", text)
    assert "{{" not in text.split('id="data"')[0]


@pytest.mark.parametrize(
    "title",
    ["{{style}} {{data}}", "</script><b>", "<!--", "\0\x1b", "\ud800", "a\nb", "']]>&amp;", "π 😀"],
)
def test_a_title_can_be_anything(title, tmp_path):
    plan = flexcp.make_plan(masks.causal(), 256, 2)
    compared = strategies(plan)[:1]
    text = report_page(plan, title=title, compared=compared)
    text.encode()
    assert text.count("</script>") == report_page(plan, compared=compared).count("</script>")
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["tokens"] == 256
    ElementTree.parse(save_figure(plan, tmp_path / "plan.svg", title=title))


def test_the_data_are_the_numbers_of_the_plans(report, found):
    data = data_of(report.read_text())
    assert data["title"] == TITLE
    assert len(data["strategies"]) == len(found) == 6
    for shown, strategy in zip(data["strategies"], found, strict=True):
        stats = strategy.plan.stats()
        assert shown["stats"]["area_per_rank"] == list(stats.area_per_rank)
        assert shown["stats"]["predicted_seconds"] == stats.predicted_seconds


def test_large_grids_are_shown_with_larger_tiles(monkeypatch):
    from flexcp.tools.report import report_data

    plan = flexcp.make_plan(masks.causal(), 4096, 2, block_size=16)
    assert data_of(report_page(plan))["views"][0]["block"] == [16, 16]
    monkeypatch.setattr(report_data, "_MOST_RUNS", 100)
    assert data_of(report_page(plan))["views"][0]["block"] == [128, 128]


def test_many_ranks_share_a_timeline_that_stays_small(monkeypatch):
    from flexcp.tools.report import report_data

    monkeypatch.setattr(report_data, "_MOST_SPANS", 100)
    plan = flexcp.make_plan(masks.causal(), 4096, 24, schedule="ring", layout="contiguous")
    shown = data_of(report_page(plan, compared=strategies(plan)[:1]))["strategies"][0]
    groups = shown["timelines"][""]["groups"]
    assert 6 <= len(groups) <= 8
    assert 23 in groups, "the busiest rank of a causal mask in plain order is the last"


def test_masks_that_differ_by_head_can_be_looked_at_one_by_one():
    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < 64 * (h + 1)

    plan = flexcp.make_plan(flexcp.Mask(mask, "steps"), 1024, 2, num_heads=3)
    labels = [v["label"] for v in data_of(report_page(plan))["views"]]
    assert labels == [f"steps · batch element 0, head {h}" for h in range(3)]


@needs_browser
def test_it_loads_without_errors_and_tells_the_verdict(page, found):
    assert page.errors == []
    assert page.text("h1") == f"{TITLE} on 6 ranks"
    assert found[0].name in page.text("#sentence")
    assert "1.00" in page.text("#verdict")
    assert "drawn by hand" in page.text("footer")
    assert page.run("document.querySelectorAll('.strategy').length") == 6


def place_in_matrix(page, query, key):
    """Where a pair of tokens is on the canvas, in shares of its size."""
    box = "(c => [c.clientWidth, c.clientHeight])(document.querySelector('#matrix'))"
    wide, high = page.run(box)
    left, top = 64, 34
    return (
        (left + (key + 0.5) / (1 << 14) * (wide - left - 1)) / wide,
        (top + (query + 0.5) / (1 << 14) * (high - top - 1)) / high,
    )


@needs_browser
@pytest.mark.parametrize(
    ("query", "key"), [(7000, 2000), (12000, 11000), (4032, 4032), (200, 9000)]
)
def test_pointing_at_a_tile_tells_rank_rows_and_kind(page, plan, query, key):
    page.point("#matrix", *place_in_matrix(page, query, key))
    rows = [int(x.replace(",", "")) for x in re.findall(r"queries ([\d,]+)–", page.text("#tip"))]
    assert rows[0] % 128 == 0
    assert abs(rows[0] - query) <= 256
    shown = page.text("#inspector")
    pointed = int(re.search(r"query ([\d,]+) is on", shown)[1].replace(",", ""))
    owner = next(r for r in range(6) if bool((plan.positions(r) == pointed).any()))
    assert f"is on rank {owner})" in shown
    tile = plan.grids[""].kind(0, 0, rows[0] // 128, key // 128)
    if tile.name == "EMPTY":
        assert "nothing is allowed here" in shown
    else:
        assert f"Computed by\nrank {owner}\n" in shown
        assert tile.name.lower() in shown
    if tile.name == "PARTIAL":
        assert "8,256 of 16,384 pairs" in shown  # the diagonal of a block
    assert page.errors == []


@needs_browser
def test_choosing_a_strategy_changes_every_figure(page, found):
    def seen():
        pictures = page.run(
            "['matrix', 'strip', 'work', 'traffic', 'time']"
            ".map(id => document.getElementById(id).toDataURL())"
        )
        return [page.text("#verdict"), page.text("#sentence"), page.text("#strip-note"), *pictures]

    before = seen()
    at = next(i for i, s in enumerate(found) if s.name == "Contiguous ring")
    page.click(f".strategy:nth-child({at + 1}) input")
    after = seen()
    assert all(a != b for a, b in zip(before, after, strict=True))
    assert "contiguous layout: 6 runs" in page.text("#strip-note")
    imbalance = found[at].plan.stats().imbalance
    assert f"{imbalance:.3f}" in page.text("#verdict")
    page.press("ArrowUp")
    assert found[at - 1].name in page.text("#sentence")
    assert page.errors == []


@needs_browser
def test_bars_the_strip_and_the_timeline_name_their_rank(page, plan):
    page.point("#strip", 0.5, 0.3)
    assert re.match(r"Rank \d\ntokens [\d,]+–[\d,]+\n", page.text("#tip"))
    page.point("#work", 0.9, 0.8)
    tokens, pairs = int(plan.layout.counts[5]), plan.stats().area_per_rank[5]
    assert page.text("#tip").startswith(f"Rank 5\n{tokens:,} tokens\n{pairs:,} pairs\nreceives ")
    page.point("#time", 0.12, 0.5)
    assert re.match(r"Rank \d\nforward, at [\d.]+\s.s\n", page.text("#tip"))
    assert re.search(r"(computes|receives K and V), round \d, ", page.text("#tip"))
    page.point("h1", 0.5, 0.5)
    assert page.run("document.querySelector('#tip').hidden")
    assert page.errors == []


@needs_browser
def test_zooming_by_wheel_buttons_and_keys_shows_less_of_the_matrix(page):
    def picture():
        return page.run("document.getElementById('matrix').toDataURL()")

    whole = picture()
    page.point("#matrix", 0.5, 0.5, "mouseWheel", deltaX=0, deltaY=-300)
    assert picture() == whole, "the wheel scrolls the page until the matrix is clicked"
    page.click("#matrix")
    page.point("#matrix", 0.5, 0.5, "mouseWheel", deltaX=0, deltaY=-300)
    by_wheel = picture()
    assert by_wheel != whole
    page.click("#zoom-in")
    assert picture() not in (whole, by_wheel)
    page.click("#zoom-all")
    assert picture() == whole
    page.run("document.getElementById('matrix').focus()")
    page.press("+")
    nearer = picture()
    assert nearer != whole
    page.press("ArrowRight")
    assert picture() != nearer
    page.press("0")
    assert picture() == whole


@needs_browser
def test_it_is_dark_where_the_system_is_and_on_demand(page):
    def paper():
        return page.run("getComputedStyle(document.body).backgroundColor")

    assert paper() == "rgb(245, 246, 248)"
    page.prefer("dark")
    assert paper() == "rgb(14, 17, 22)"
    page.click("#theme")
    assert paper() == "rgb(245, 246, 248)"
    assert page.errors == []


@needs_browser
@pytest.mark.parametrize("width", [320, 390, 768, 1920])
def test_nothing_overflows_whatever_the_width(page, width):
    page.resize(width, 844, phone=width < 500, scale=2 if width < 500 else 1)
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.errors == []


@needs_browser
def test_a_tap_on_a_phone_inspects_a_tile(page):
    page.resize(390, 844, phone=True, scale=2)
    page.click("#matrix", *place_in_matrix(page, 7000, 2000))
    assert "Computed by" in page.text("#inspector")


@needs_browser
def test_it_prints_in_light_on_a_few_pages(page, tmp_path):
    page.prefer("dark")
    page.run("addEventListener('beforeprint', () => window.printed = true)")
    data = page.pdf(tmp_path / "report.pdf").read_bytes()
    pages = len(re.findall(rb"/Type /Page\b(?!s)", data))
    assert 1 <= pages <= 5
    assert page.run("window.printed")
    assert page.run("document.documentElement.dataset.theme") == "dark", "and is dark again"
    assert page.errors == []


@needs_browser
def test_figures_have_names_for_those_who_cannot_see_them(page):
    labels = page.run(
        "[...document.querySelectorAll('canvas:not([aria-hidden])')].map(c => c.ariaLabel)"
    )
    assert len(labels) == 5
    assert all(labels)
    page.run("document.getElementById('numbers').open = true")
    assert page.run("document.querySelectorAll('#table tbody tr').length") == 6


@needs_browser
def test_the_text_and_the_legends_follow_the_choice(page, found):
    assert page.text("#h-why") == "Why this plan"
    chosen = page.text("#why")
    assert "Exposed communication is" in chosen
    assert "of a rank's memory" in chosen
    page.click(".strategy:nth-child(3) input")
    assert page.text("#h-why") == f"About {found[2].name}"
    assert page.text("#why") != chosen
    for words in ("full tile", "partial tile", "empty", "line: a document begins"):
        assert words in page.text("#matrix-legend")
    assert "computing on the busiest rank" in page.text("main")
    assert "Memory" in page.text("#verdict")
    assert "Between nodes" in page.text("#verdict")


@needs_browser
def test_a_click_shows_one_rank_alone_until_escape(page):
    def picture():
        return page.run("document.getElementById('matrix').toDataURL()")

    whole = picture()
    page.click("#work", 0.9, 0.8)
    assert page.text("#isolated").startswith("Rank 5 alone is shown.")
    page.point("h1", 0.5, 0.5)
    assert picture() != whole, "it stays so when the pointer leaves"
    page.press("Escape")
    page.settle()
    assert picture() == whole
    page.click("#legend button:nth-child(2)")
    assert page.text("#isolated").startswith("Rank 1 alone is shown.")


@needs_browser
def test_ranks_are_coloured_by_node_and_heads_chosen_where_they_are_shared(tab, tmp_path):
    plan = flexcp.make_plan(masks.causal(), 1 << 13, (4, 4), num_heads=8, schedule="hybrid")
    tab.errors.clear()
    tab.open(save_report(plan, tmp_path / "heads.html"))

    def picture():
        return tab.run("document.getElementById('matrix').toDataURL()")

    def select(name, value):
        place = f"document.getElementById('{name}')"
        tab.run(f"{place}.value = '{value}'; {place}.dispatchEvent(new Event('change'))")
        tab.settle()

    seen = {picture()}
    for name, value in (("head", "0"), ("head", "7"), ("colours", "node"), ("head", "")):
        select(name, value)
        seen.add(picture())
    assert len(seen) >= 4
    assert "node 1: ranks 8–15" in tab.text("#legend")
    assert tab.errors == []


@needs_browser
def test_labels_of_figures_are_sentences(page):
    labels = page.run("[...document.querySelectorAll('canvas[aria-label]')].map(c => c.ariaLabel)")
    assert all(40 < len(label) < 300 and label.endswith(".") for label in labels)


@pytest.mark.parametrize(
    ("mask", "tokens", "ranks"),
    [(masks.causal(), 1, 1), (masks.causal(), 5, 8), (~masks.full(), 1000, 3)],
)
@needs_browser
def test_odd_plans_have_a_page_too(tab, tmp_path, mask, tokens, ranks):
    plan = flexcp.make_plan(mask, tokens, ranks, num_heads=2)
    tab.errors.clear()
    tab.open(save_report(plan, tmp_path / "odd.html"))
    for place in ("#matrix", "#strip", "#work", "#time"):
        tab.point(place, 0.5, 0.6)
    assert f"on {ranks} rank" in tab.text("h1")
    assert tab.errors == []
