"""The report: one diagnosis in three forms, each of which says everything."""

from __future__ import annotations

import json
from html.parser import HTMLParser

from flexcp.kernels.preferences import KernelOrder
from flexcp.plan import PRESETS, load_machine
from flexcp.tools.doctor.findings import Diagnosis, Finding
from flexcp.tools.doctor.report import report_page, report_text, save_reports

FOUND = Diagnosis(
    {"torch": "2.13", "settings": {"NCCL_DEBUG": "INFO"}},
    (
        Finding("environment", "links", "measured", "x", rows=({"link": "topo", "found": "a\nb"},)),
        Finding("kernels", "flash", "failed", "dq is off by 1 < 2", "ask for another", 1.5,
                ({"case": "causal", "error": 0.0123456}, {"case": "full", "why": None})),
        Finding("ranks", "transport", "not run", "there is one rank"),
    ),
    (KernelOrder("causal", "bfloat16", 128, ("triton", "flash"), (0.001, 0.0025)),),
    PRESETS[0],
    12.3,
    notes=("a note",),
)  # fmt: skip


def test_the_text_begins_with_the_verdict_and_says_everything():
    text = report_text(FOUND)
    assert text.startswith("flexcp doctor: 1 FAILED (kernels: flash); 0 checks passed, 1 not run\n")
    for part in (
        "FAILED    flash: dq is off by 1 < 2", "what to do: ask for another", "causal  0.0123",
        "not run   transport: there is one rank", "triton 1 ms, flash 2.5 ms", "a note", "12 s",
        "NCCL_DEBUG",
    ):  # fmt: skip
        assert part in text


def test_the_page_is_well_formed_and_escapes_what_it_shows():
    page = report_page(FOUND)
    assert "dq is off by 1 &lt; 2" in page
    assert "<details open>" in page
    assert "http" not in page

    class Balanced(HTMLParser):
        open_tags: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag, attrs):  # noqa: ARG002
            if tag not in ("meta", "html"):
                self.open_tags.append(tag)

        def handle_endtag(self, tag):
            assert self.open_tags.pop() == tag

    parser = Balanced()
    parser.feed(page)
    assert parser.open_tags == []


def test_the_files_hold_the_same_and_the_machine_can_be_planned_for(tmp_path):
    written = save_reports(FOUND, tmp_path / "new")
    assert [path.name for path in written] == [
        "report.txt", "report.json", "report.html", "machine.json"
    ]  # fmt: skip
    data = json.loads((tmp_path / "new" / "report.json").read_text())
    assert data["passed"] is False
    assert data["findings"][1]["fix"] == "ask for another"
    assert data["winners"][0]["kernels"] == ["triton", "flash"]
    assert load_machine(tmp_path / "new" / "machine.json") == PRESETS[0]
