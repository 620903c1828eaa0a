"""The loss curve, as a line of text and as a picture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from flexcp.tools.train.curve import loss_svg, sparkline
from flexcp.tools.train.events import Compared, Evaluated, Failed, Stepped, from_line, to_line

SVG = "{http://www.w3.org/2000/svg}"


def stepped(step, loss):
    return Stepped(step, loss, 1.0, 1e-3, 2, 0.5, 0.01)


def drawn(steps, evaluations=()):
    return ElementTree.fromstring(loss_svg(steps, evaluations))


def test_a_picture_has_a_point_per_step_and_per_evaluation():
    tree = drawn(
        [stepped(n, 5.0 / n) for n in range(1, 41)], [Evaluated(20, 1.0), Evaluated(40, 0.5)]
    )
    lines = {line.get("class"): line.get("points").split() for line in tree.iter(f"{SVG}polyline")}
    assert {kind: len(points) for kind, points in lines.items()} == {"train": 40, "eval-line": 2}
    heights = [float(p.split(",")[1]) for p in lines["train"]]
    assert heights == sorted(heights)  # a falling loss goes down
    assert len(list(tree.iter(f"{SVG}circle"))) == 2


@pytest.mark.parametrize("losses", [[], [2.0], [3.0, 3.0]], ids=["none", "one", "constant"])
def test_short_curves_can_be_drawn(losses):
    tree = drawn([stepped(n + 1, loss) for n, loss in enumerate(losses)])
    points = next(tree.iter(f"{SVG}polyline")).get("points").split()
    assert len(points) == len(losses)
    assert "nan" not in "".join(points)


def test_a_line_of_text_follows_the_curve():
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([float(100 - n) for n in range(100)], width=8) == "█▇▆▅▄▃▂▁"


@pytest.mark.parametrize(
    "event",
    [
        stepped(3, 0.1 + 0.2),
        Evaluated(3, 2 / 3),
        Compared(1, 1.0, 1.0 + 2**-52, 3.0, 3.0, 1e-17, "a.weight", 1e-10),
        Failed(1, 'a "message"\nof two lines', "1", "do that", False),
    ],
)
def test_events_survive_a_line_of_json(event):
    line = to_line(event)
    assert "\n" not in line
    assert from_line(line) == event
