"""`flexcp plan` says what was chosen, why and at what price."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from flexcp import make_plan, masks
from flexcp.plan import Machine, Plan, save_machine
from flexcp.tools.report.strategies import chosen_strategy

SMALL = ("--heads", 4, "--head-dim", 32)


def summary(flexcp, *args):
    return json.loads(flexcp("plan", *args, *SMALL, "--json").out)


def test_json_holds_the_numbers_of_the_library(flexcp):
    found = summary(flexcp, "causal", "--tokens", "8K", "--ranks", 3)
    plan = make_plan(masks.causal(), 8192, 3, num_heads=4, head_dim=32)
    assert found["chosen"]["name"] == plan.considered[0][0]
    assert found["chosen"]["stats"]["area_per_rank"] == list(plan.stats().area_per_rank)
    assert found["chosen"]["fingerprint"] == plan.fingerprint()
    assert found["strategies"][0]["seconds"] == plan.stats().predicted_seconds
    assert {s["layout"] for s in found["strategies"]} >= {"contiguous", "head_tail", "ptrr"}


def test_people_read_the_choice_the_reasons_and_the_alternatives(flexcp):
    out = flexcp("plan", "causal", "--tokens", "8K", "--ranks", 3, *SMALL).out
    assert "8K tokens, 3 ranks, 4 heads of 32, bfloat16, h100-ib" in out
    assert "The mask allows 50.0% of all pairs" in out
    assert "Contiguous ring" in out
    assert "Also priced" in out
    assert [line.split()[0] for line in out.splitlines()[-4:-1]] == ["0", "1", "2"]
    assert "received, forward" in out
    assert "received*" in out
    assert out.splitlines()[-1].strip() == "* forward and backward"
    assert "\x1b" not in out


def test_many_ranks_are_shown_as_one_character_each(flexcp):
    out = flexcp("plan", "causal", "--tokens", "8K", "--ranks", 40, *SMALL).out
    work = next(line for line in out.splitlines() if line.startswith("work, pairs"))
    assert sum(c in "▁▂▃▄▅▆▇█" for c in work) == 40


@pytest.mark.parametrize(("width", "ranks"), [(48, 4), (60, 64), (80, 4), (100, 64)])
def test_names_and_numbers_are_whole_in_narrow_terminals(flexcp, monkeypatch, width, ranks):
    monkeypatch.setenv("COLUMNS", str(width))
    args = ("--tokens", "16K", "--ranks", ranks, "--heads", 32)
    out = flexcp("plan", "causal & documents(800)", *args).out
    assert "…" not in out
    assert "strategy" in out
    assert "Contiguous ring" in out
    assert max(map(len, out.splitlines())) <= width


def test_a_plan_that_is_not_the_fastest_says_why(flexcp):
    out = flexcp("plan", "causal", "--tokens", "128K", "--ranks", 3, "--kv-heads", 8).out
    plan = make_plan(masks.causal(), 1 << 17, 3, num_heads=32, num_kv_heads=8, head_dim=128)
    assert "The faster ones move more, or hold more rows" in " ".join(out.split())
    assert "hardly slower than the fastest" in chosen_strategy(plan).about


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", masks.causal()),
        ("~causal", ~masks.causal()),
        ("causal & sliding_window(1K)", masks.causal() & masks.sliding_window(1024)),
        (
            "full & (prefix_lm(100) | chunked(size=512)) ",
            masks.full() & (masks.prefix_lm(100) | masks.chunked(512)),
        ),
        ("sliding_window(left=10, right=20)", masks.sliding_window(10, 20)),
        ("block_causal(256) | global_tokens(4)", masks.block_causal(256) | masks.global_tokens(4)),
        ("shared_prefix(1000, [2000, 1096])", masks.shared_prefix(1000, [2000, 1096])),
        ("causal&document([4000,96])", masks.causal() & masks.document(lengths=[4000, 96])),
    ],
)
def test_expressions_are_the_masks_of_the_catalogue(flexcp, text, mask):
    found = summary(flexcp, text, "--tokens", 4096, "--ranks", 2)
    plan = make_plan(mask, 4096, 2, num_heads=4, head_dim=32)
    assert found["chosen"]["fingerprint"] == plan.fingerprint()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "600\n250 174\n"),
        ("a.csv", "600\n250\n174\n"),
        ("b.csv", "id,length\nx,600\ny,250\nz,174\n"),
        ("a.json", "[600, 250, 174]"),
        ("b.json", '{"lengths": [600, 250, 174]}'),
        ("a.jsonl", '{"text": "..", "tokens": 600}\n{"tokens": 250}\n{"tokens": 174}\n'),
    ],
)
def test_document_lengths_come_from_files_and_give_the_length(
    flexcp, tmp_path, monkeypatch, name, content
):
    (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    found = summary(flexcp, f"document({name}) & causal", "--ranks", 2)
    plan = make_plan(
        masks.document(lengths=[600, 250, 174]) & masks.causal(), 1024, 2, num_heads=4, head_dim=32
    )
    assert found["tokens"] == 1024
    assert found["chosen"]["fingerprint"] == plan.fingerprint()


def test_documents_beyond_the_sequence_are_cut_and_that_is_said(flexcp):
    found = summary(flexcp, "document([600, 400, 300])", "--tokens", 900)
    assert found["notes"] == ["the first 2 of 3 documents, the last one cut"]


def test_a_distribution_is_drawn_from_the_same_way_every_time(flexcp, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text('range,number,percentage(%)\n"[0, 10]",5,50\n"[11, 90]",5,50\n')
    text = f"document({table}, seed=3)"
    first, again = (summary(flexcp, text, "--tokens", 1000, "--ranks", 2) for _ in range(2))
    assert first["chosen"] == again["chosen"]
    assert "documents drawn at random (seed 3)" in first["notes"][0]


MODULE = """
import flexcp

mask = flexcp.masks.causal()
def even(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 2 == 0
def near(width=64):
    return flexcp.masks.sliding_window(width)
def half(seq_len):
    return flexcp.masks.prefix_lm(seq_len // 2)
number = 3
def wrong():
    return 3
def needs(width):
    return flexcp.masks.sliding_window(width)
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "my_masks_of_a_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return "my_masks_of_a_test"


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("{}:mask", "causal"),
        ("{}:even & causal", None),
        ("{}:near", "sliding_window(64)"),
        ("{}:near(96)", "sliding_window(96)"),
        ("{}:near(width=1K) & causal", "causal & sliding_window(1K)"),
        ("{}:half", "prefix_lm(1K)"),
    ],
)
def test_masks_come_from_modules_of_ones_own(flexcp, own_module, text, same):
    args = ("--tokens", "2K", "--ranks", 2)
    found = summary(flexcp, text.format(own_module), *args)
    if same:
        assert (
            found["chosen"]["fingerprint"] == summary(flexcp, same, *args)["chosen"]["fingerprint"]
        )


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("causal & slidng_window(4)", "did you mean sliding_window?", 9),
        ("causal and full", "write `&`", 7),
        ("not causal", "write `~`", 0),
        ("causal & (full", "expected `)`, got the end of the expression", 14),
        ("causal &", "expected a mask, got the end", 8),
        ("sliding_window(4, 5, 6)", "at most 2 arguments of sliding_window", 21),
        (
            "full | sliding_window(width=4)",
            "sliding_window's parameters: left, right, got 'width'",
            22,
        ),
        ("sliding_window", "expected sliding_window(left, right), got 0 arguments", 0),
        ("causal & sliding_window(-1)", "expected left", 9),
        ("document(lengths.csv", "close the `(` at column 9", 20),
        ("causal & document('a.csv)", "expected the other quotation mark", 18),
        ("causal $", "expected `&`, `|` or the end of the expression, got '$'", 7),
        (
            "causal & document([3, 4])",
            "fill 1,024 tokens, got 2 documents with 7",
            9,
        ),
        ("documents(mean=0)", "a mean of at least 1 token", 0),
        ("full & documents(mean=inf)", "expected mean as a number, got inf", 7),
        ("documents(mean=many)", "expected mean as a number, got 'many'", 0),
        ("document([1024], seed=x)", "expected seed as a number, got 'x'", 0),
        ("document(x=3)", "expected one of document's parameters: lengths, seed, got 'x'", 9),
        ("document", "expected document(lengths), got no lengths", 0),
        ("shared_prefix(5)", "expected shared_prefix(prefix, lengths), got 1 argument;", 0),
        ("shared_prefix(lengths=[5])", "expected shared_prefix(prefix, lengths)", 0),
        ("document([3, x])", "expected a file name or a list of lengths, got [3, 'x']", 0),
        ("no_such_module_here:f", "expected a module that Python can import", 0),
    ],
)
def test_errors_point_at_their_place_in_the_expression(flexcp, text, message, column):
    err = flexcp("plan", text, "--tokens", "1K", code=2).err
    assert message in err
    *_, shown, caret = err.rstrip("\n").splitlines()
    assert shown == "    " + text
    assert caret == " " * (4 + column) + "^"


def test_a_function_that_makes_no_mask_is_named(flexcp, own_module):
    for name, message in (
        ("number", "expected a Mask or a function, got int"),
        ("needs", "expected arguments for my_masks_of_a_test:needs(width), got 0 of them"),
        ("needs(1, 2)", "got 2 of them; give them in parentheses"),
        (
            "wrong",
            "a function that returns a Mask or a mask_mod, got one that returns int",
        ),
        ("missing", "it has mask, even, near, half, wrong, needs"),
    ):
        assert message in flexcp("plan", f"{own_module}:{name}", "--tokens", "1K", code=2).err


def test_a_missing_length_or_file_says_what_to_do(flexcp, tmp_path):
    assert (
        "expected a sequence length, got none; pass --tokens"
        in flexcp("plan", "causal", code=2).err
    )
    err = flexcp("plan", f"document({tmp_path}/no.csv)", code=2).err
    assert "expected a file with document lengths" in err
    assert "No such file" in err
    bad = tmp_path / "bad.csv"
    bad.write_text("name,age\nx,3\n")
    assert "a table with the columns name, age" in flexcp("plan", f"document({bad})", code=2).err
    bad.write_text("length\n3.5\n")
    assert "'3.5' as a length" in flexcp("plan", f"document({bad})", code=2).err


def test_several_masks_share_one_layout(flexcp):
    found = summary(
        flexcp, "--mask", "full=causal", "--mask", "near=causal & sliding_window(256)",
        "--tokens", "4K", "--ranks", 4,
    )  # fmt: skip
    assert list(found["chosen"]["schedules"]) == ["full", "near"]
    both = {"full": masks.causal(), "near": masks.causal() & masks.sliding_window(256)}
    plan = make_plan(both, 4096, 4, num_heads=4, head_dim=32)
    assert found["chosen"]["fingerprint"] == plan.fingerprint()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "expected one MASK, or several --mask name=MASK, got neither"),
        (("causal", "--mask", "a=causal"), "got both"),
        (("--mask", "causal"), "expected --mask name=MASK with a new name each, got 'causal'"),
        (("causal", "--dtype", "int8"), "expected a floating-point type, got 'int8'"),
        (("causal", "--machine", "abacus"), "expected a machine among cpu-gloo"),
        (("causal", "--schedule", "hybrid"), "such as --ranks 4x2"),
        (("causal", "--html", "/dev/null/x.html"), "a file that can be written"),
        (("causal", "--svg", "x.pdf"), "expected a file that ends in .svg, got 'x.pdf'"),
        (("causal", "--tokens", "0"), "expected at least one token, got 0"),
        (
            ("causal", "--tokens", "900000G"),
            "expected seq_len to be at most 1,099,511,627,776, got 966",
        ),
        (("document([1025,-1])",), "expected lengths of 0 or more tokens, got -1; such as"),
        (("sliding_window(-3)",), "expected left to be an integer of at least 0, got -3;"),
    ],
)
def test_bad_requests_are_explained(flexcp, args, message):
    assert message in flexcp("plan", "--tokens", "1K", *args, code=2).err


def test_a_mesh_of_two_dimensions_is_groups_by_ranks(flexcp):
    found = summary(flexcp, "causal", "--tokens", "4K", "--ranks", "3x2", "--schedule", "hybrid")
    assert found["ranks"] == [3, 2]
    assert found["chosen"]["heads_shared_by"] == {"": 2}
    for wrong in ("2x2x2", "2x", "0", "x"):
        said = flexcp("plan", "causal", "--ranks", wrong, code=2).err
        assert f"such as 8x8, got '{wrong}'" in " ".join(said.replace("│", "").split())


def test_check_proves_the_plan_and_says_so(flexcp, monkeypatch):
    seen = []
    monkeypatch.setattr(Plan, "check", lambda self: seen.append(self))
    run = flexcp("plan", "causal", "--tokens", "2K", "--ranks", 2, "--check", *SMALL)
    assert len(seen) == 1
    assert "proved: every allowed pair is computed once" in run.err


def test_files_are_written_where_asked(flexcp, tmp_path):
    html, svg, whole = (tmp_path / "new" / name for name in ("a.html", "a.svg", "a.json"))
    run = flexcp(
        "plan", "causal", "--tokens", "2K", "--ranks", 2, "--html", html, "--svg", svg,
        "--save", whole, *SMALL,
    )  # fmt: skip
    assert f"written: {html}" in run.err
    assert "<!doctype html>" in html.read_text()[:20]
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert "moves" in json.loads(whole.read_text())["schedules"][""]["forward"]


def test_the_catalogue_is_that_of_the_library():
    import inspect

    from flexcp.tools.cli.mask_syntax import CATALOGUE

    public = {n for n in masks.__all__ if n[0].islower()}
    makers = public - {"as_mask", "ids_from_lengths", "trace_mask"}
    assert set(CATALOGUE) == makers | {"documents"}
    for name in makers - {"document"}:
        assert CATALOGUE[name] == tuple(inspect.signature(getattr(masks, name)).parameters)


def test_it_prices_for_a_machine_in_a_file(flexcp, tmp_path):
    machine = replace(Machine.preset("pcie"), name="cluster 7")
    save_machine(machine, tmp_path / "machine.json")
    asked = ("plan", "causal", "--tokens", "4K", "--ranks", 4, "--json")
    found = json.loads(flexcp(*asked, "--machine", tmp_path / "machine.json").out)
    assert found["machine"]["name"] == "cluster 7"
    refused = flexcp(*asked, "--machine", tmp_path / "other.json", code=2).err
    assert "other.json" in refused
