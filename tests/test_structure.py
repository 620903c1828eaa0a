"""The layout of the code: one name for each thing, small files, nothing planted or growing.

A rule that must be broken somewhere has a list of exceptions here, each with its reason.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import flexcp

SOURCE = Path(flexcp.__file__).parent
TESTS = Path(__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 400

NOT_OF_THE_LIBRARY = {
    "benchmarks": "scripts beside the library",
    "distributed": "several stages at once, on processes",
    "examples": "scripts beside the library",
    "properties": "laws that hold for several stages at once",
}
"""Folders of tests that mirror none of the source."""

PLANTED: dict[str, tuple[str, ...]] = {}
"""By file: code that changes another package's object all the same, word for word."""

GROWING: dict[str, tuple[str, ...]] = {}
"""By file: containers of a module that may grow, since what is added to them is counted."""


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_no_class_has_the_name_of_another():
    homes = defaultdict(list)
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(f"{name_of(path)}:{node.lineno}")
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def is_own(node: ast.expr) -> bool:
    """Whether something is the object whose class's code this is."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_attributes(node: ast.expr, aliases: set[str]) -> bool:
    """Whether something is the dictionary of another object's attributes."""
    match node:
        case ast.Call(func=ast.Name(id="vars"), args=[of]):
            return not is_own(of)
        case ast.Attribute(value=of, attr="__dict__"):
            return not is_own(of)
        case ast.Name(id=name):
            return name in aliases
    return False


def planted(tree: ast.Module) -> Iterator[str]:
    """Code that adds to, or takes from, what another object has."""
    aliases = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and is_attributes(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=of, ctx=ast.Store() | ast.Del()) if is_attributes(of, aliases):
                yield ast.unparse(node)
            case ast.Call(
                func=ast.Attribute(value=of, attr="setdefault" | "pop" | "update" | "clear")
            ) if is_attributes(of, aliases):
                yield ast.unparse(node)
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[of, *_]) if not is_own(of):
                yield ast.unparse(node)
            case ast.Call(
                func=ast.Attribute(attr="__setattr__" | "__delattr__"), args=[of, *_]
            ) if not is_own(of):
                yield ast.unparse(node)


@pytest.mark.parametrize(
    "code",
    [
        "vars(x)['a'] = 1",
        "del vars(x)['a']",
        "vars(x).setdefault('a', 1)",
        "kept = vars(x)\nkept['a'] = 1",
        "x.__dict__['a'] = 1",
        "x.__dict__.update(a=1)",
        "setattr(x, 'a', 1)",
        "object.__setattr__(x, 'a', 1)",
    ],
)
def test_every_way_of_planting_is_recognised(code):
    assert list(planted(ast.parse(code)))
    assert not list(planted(ast.parse(code.replace("x", "self"))))


def test_reading_what_an_object_has_is_no_planting():
    assert not list(planted(ast.parse("vars(x)['a']; x.__dict__.get('a'); getattr(x, 'a')")))


def test_nothing_is_planted_on_objects_of_other_packages():
    found = {name_of(path): tuple(planted(tree_of(path))) for path in FILES}
    assert {name: code for name, code in found.items() if code} == PLANTED


def containers(tree: ast.Module) -> set[str]:
    """Names of a module's containers that begin empty."""
    found = set()
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case _:
                continue
        match value:
            case ast.Dict(keys=[]) | ast.List(elts=[]):
                found.add(name)
            case ast.Call(
                func=ast.Name(id="dict" | "list" | "set" | "OrderedDict" | "defaultdict" | "deque"),
                keywords=[],
            ):
                found.add(name)
    return found


def growing(tree: ast.Module) -> Iterator[str]:
    """Containers of a module, and caches of functions, that are added to and never cut back."""
    ways = {"append", "add", "setdefault", "update", "extend", "insert", "appendleft"}
    for name in sorted(containers(tree)):
        adds = cuts = False
        for node in ast.walk(tree):
            match node:
                case ast.Subscript(value=ast.Name(id=of), ctx=ast.Store()) if of == name:
                    adds = True
                case ast.Subscript(value=ast.Name(id=of), ctx=ast.Del()) if of == name:
                    cuts = True
                case ast.Call(func=ast.Attribute(value=ast.Name(id=of), attr=way)) if of == name:
                    adds |= way in ways
                    cuts |= way in ("pop", "popitem", "popleft", "clear")
        if adds and not cuts:
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.args.args:
            for decorator in map(ast.unparse, node.decorator_list):
                bare = decorator.rpartition("functools.")[2]
                if bare in ("cache", "lru_cache(None)", "lru_cache(maxsize=None)"):
                    yield node.name


def test_what_grows_without_bound_is_recognised():
    assert [*growing(ast.parse("a = {}\ndef f(x):\n    a[x] = 1"))] == ["a"]
    assert [*growing(ast.parse("a: list[int] = []\ndef f(x):\n    a.append(x)"))] == ["a"]
    assert [*growing(ast.parse("@functools.cache\ndef f(x):\n    return x"))] == ["f"]
    bounded = "a = {}\ndef f(x):\n    a[x] = 1\n    while len(a) > 8:\n        a.pop(min(a))"
    assert [*growing(ast.parse(bounded))] == []
    assert [*growing(ast.parse("@lru_cache(64)\ndef f(x):\n    return x"))] == []


def test_nothing_at_module_level_grows_without_bound():
    found = {name_of(path): tuple(growing(tree_of(path))) for path in FILES}
    assert {name: grown for name, grown in found.items() if grown} == GROWING


def test_no_file_is_longer_than_one_idea():
    lengths = {
        path.relative_to(folder.parent).as_posix(): len(
            path.read_text(encoding="utf-8").split("\n")
        )
        for folder in (SOURCE, TESTS)
        for path in folder.rglob("*.py")
    }
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES + 1} == {}


def test_the_tests_mirror_the_tree():
    folders = {path.parent.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")} - {
        ".",
        *NOT_OF_THE_LIBRARY,
    }
    assert sorted(name for name in folders if not (SOURCE / name).is_dir()) == []


def test_every_stage_has_tests_of_its_own():
    stages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert sorted(stage for stage in stages if not list((TESTS / stage).rglob("test_*.py"))) == []


VERBS = {
    "is", "are", "has", "have", "was", "were", "be", "hold", "show", "choose", "pass", "passes",
    "run", "runs", "move", "moves", "receive", "receives", "compute", "computes",
}  # fmt: skip


def test_the_name_of_a_test_file_is_its_subject_not_a_sentence():
    names = (path.stem.split("_") for path in TESTS.rglob("test_*.py"))
    assert sorted("_".join(words) for words in names if VERBS & set(words[2:])) == []
