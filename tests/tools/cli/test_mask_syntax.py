"""Mask expressions: Python's grammar with words of its own, and nothing of it is run."""

from __future__ import annotations

import pytest

from flexcp.errors import FlexCPError
from flexcp.tools.cli.mask_syntax import Argument, Combined, NamedMask, Negated, parse_mask


def values(text: str) -> list[object]:
    tree = parse_mask(text)
    assert isinstance(tree, NamedMask)
    return [argument.value for argument in tree.arguments]


def test_and_binds_tighter_than_or_and_chains_are_one_node():
    causal, full = NamedMask("causal", (), False, 0), NamedMask("full", (), False, 9)
    assert parse_mask("causal & full & ~causal | full") == Combined(
        "|",
        (
            Combined("&", (causal, full, Negated(NamedMask("causal", (), False, 17)))),
            NamedMask("full", (), False, 26),
        ),
    )


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("128K", 131072),
        ("1.5M", 1572864),
        ("1_000", 1000),
        ("007", 7),
        ("-1", -1),
        ("1e3", 1000.0),
        ("0.25", 0.25),
        ("K", "K"),
        ("12KB", "12KB"),
        ("lengths.csv", "lengths.csv"),
        ("/data/2024-01 ", "/data/2024-01"),
        ("~/no-such", None),
        ("'~/a b, (c).csv'", "~/a b, (c).csv"),
        (r"'C:\new\x41.csv'", r"C:\new\x41.csv"),
        ('"it\'s.csv"', "it's.csv"),
        ("lambda", "lambda"),
        ("[1K, [2, 'x']]", [1024, [2, "x"]]),
        ("(600, 400)", [600, 400]),
        ("[]", []),
        ("längen.csv", "längen.csv"),
        ("a\0b", "a\0b"),
        ("9**9**9**9", "9**9**9**9"),
        ("1e999999", float("inf")),
    ],
)
def test_words_are_numbers_sizes_or_texts(written, value):
    if value is None:
        with pytest.raises(FlexCPError, match="expected a number, a file name or a list, got '~/"):
            parse_mask(f"document({written})")
    else:
        assert values(f"document({written})") == [value]


def test_places_are_columns_of_the_text_whatever_its_letters_and_spaces():
    tree = parse_mask(" \n document('日本.csv',\u00a0seed =\t3 ) ")
    assert isinstance(tree, NamedMask)
    assert tree.at == 3
    assert tree.arguments == (Argument(None, "日本.csv", 12), Argument("seed", 3, 22))


def test_parameters_of_the_same_width_are_told_apart():
    assert values("sliding_window(left=3, right=4)") == [3, 4]
    tree = parse_mask("my.masks:f(abc=1, xyz=2)")
    assert isinstance(tree, NamedMask)
    assert [a.name for a in tree.arguments] == ["abc", "xyz"]


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("causal.__class__", "expected a mask among", 0),
        ("().__class__", "expected `&`, `|` or the end of the expression, got '.__class__'", 2),
        ("lambda: causal", "expected `&`, `|` or the end of the expression, got 'causal'", 8),
        ("[causal for causal in full]", "expected `]`, got 'for'; close the `[` at column 1", 8),
        ("document([x for x in y])", "expected `]`, got 'for'; close the `[` at column 10", 12),
        ("__import__('os')", "expected a mask among", 0),
        ("causal if full else causal", "expected `&`, `|` or the end", 7),
        ("(causal := full)", "expected `)`, got ':'", 8),
        ("f'{causal}'", "expected `&`, `|` or the end of the expression", 1),
        ("causal == full", "expected a mask, got 'causal == full'", 0),
        ("causal = full", "expected `&`, `|` or the end of the expression, got '='", 7),
        ("causal[0]", "expected a mask, got 'causal[0]'", 0),
        ("causal()()", "expected a mask, got 'causal()()'", 0),
        ("causal, full", "expected a mask, got 'causal, full'", 0),
        ("()", "expected a mask, got '()'", 0),
        ("'causal'", "expected a mask, got \"'causal'\"", 0),
        ("causal) & (full", "expected `&`, `|` or the end of the expression, got ')'", 6),
        ("(causal]", "expected `)`, got ']'", 7),
        ("causal & & full", "expected a mask, got '&'", 9),
        ("", "expected a mask, got the end of the expression", 0),
        ("  ~ ", "expected a mask, got the end of the expression", 3),
        ("chunked(causal & full)", "expected a number, a file name or a list, got 'causal & fu", 8),
        ("chunked(chunked(3))", "expected a number, a file name or a list, got 'chunked(3)'", 8),
        ("chunked(size=)", "expected a number, a file name or a list, got ')'", 13),
        ("sliding_window(3 4)", "expected `)`, got '4'; close the `(` at column 15", 17),
        ("sliding_window(left=3, 4)", "expected no value without a name after one with", 24),
        ("document('a''b')", "expected a number, a file name or a list, got \"'a''b'\"", 9),
        ("document('''a''')", "expected a number, a file name or a list", 9),
        ("causal or full", "write `|`", 7),
        ("causal & 4096", "expected a mask among", 9),
    ],
)  # fmt: skip
def test_what_is_no_mask_is_refused_at_its_place(text, message, column):
    with pytest.raises(FlexCPError) as error:
        parse_mask(text)
    *_, shown, caret = str(error.value).splitlines()
    assert message in str(error.value)
    assert shown == "    " + text
    assert caret == " " * (4 + column) + "^"


@pytest.mark.parametrize(
    "text",
    [
        "(" * 5000 + "causal" + ")" * 5000,
        "~" * 100_000 + "causal",
        "causal & " * 20_000 + "causal",
        "document(" + "[" * 300 + "]" * 300 + ")",
    ],
)
def test_nesting_without_end_is_refused_before_python_reads_it(text):
    with pytest.raises(FlexCPError, match="at most 200 operators and brackets, got one of"):
        parse_mask(text)


def test_a_list_may_be_long_and_two_hundred_operators_are_read():
    assert values(f"document({list(range(50_000))})") == [list(range(50_000))]
    tree = parse_mask("~" * 200 + "causal")
    for _ in range(200):
        assert isinstance(tree, Negated)
        tree = tree.part
    assert tree == NamedMask("causal", (), False, 200)


def test_numbers_beyond_all_sizes_are_texts_or_infinite_never_an_overflow():
    assert values(f"chunked({'9' * 5000})") == [float("inf")]
    assert values(f"chunked({'9' * 400}G)") == ["9" * 400 + "G"]
