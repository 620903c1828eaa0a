"""The layout of the code: one name for each thing, small files, nothing planted or growing.

A rule that must be broken somewhere has a list of exceptions here, each with its reason.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

import flexcp

SOURCE = Path(flexcp.__file__).parent
TESTS = Path(__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 400

NOT_OF_THE_LIBRARY = {
    "benchmarks": "scripts beside the library",
    "examples": "scripts beside the library",
    "properties": "laws that hold for several stages at once",
}
"""Folders of tests that mirror none of the source."""

PLANTED = {
    "compat/_cp_sdpa.py": {
        "functional.scaled_dot_product_attention": "what PyTorch's own context_parallel does, and "
        "taken back when the context ends: threads without a mode call it by that name",
    },
    "compat/context_parallel.py": {
        "buffer.data": "context_parallel shards its caller's buffers in place, as PyTorch's does",
    },
    "compat/flex_attention.py": {
        f"block_mask.{name}": "a field of BlockMask, of a mask that was made in the same call"
        for name in ("dq_write_order", "dq_write_order_full", "dq_kv_order", "dq_kv_order_spt")
    },
    "compat/recomputation.py": {
        f"torch_checkpoint.{name}": "torch has no hook for what a checkpoint recomputes; taken "
        "back with the last user"
        for name in ("CheckpointFunction", "_CheckpointFrame")
    },
    "graph_handles.py": {
        "handle.flexcp_owner": "a tensor of our own making, which has to keep its owner alive",
    },
    "integrations/accelerate.py": {
        "accelerator.dataloader_config.dispatch_batches": "a public setting of what the caller "
        "asked to be changed",
        "accelerator._prepare_device_mesh": "Accelerate's only word on which processes get the "
        "same batches",
    },
    "integrations/context_parallel.py": {
        "module.forward": "a hook can't surround a forward pass; the caller asked for the module "
        "to be made parallel",
    },
    "integrations/torchtitan/attention.py": {
        "module.forward": "what torchtitan's own apply_cp_to_forward sets",
    },
    "integrations/torchtitan/enabled.py": {
        "setattr(module, attribute, after)": "torchtitan has no registry for context parallelism; "
        "the caller asked for it, and disable() takes it back",
        "setattr(owner, name, new)": "its trainers refuse VarlenAttention; taken back by disable()",
        "setattr(owner, name, before)": "what disable() does",
        "delattr(owner, name)": "what disable() does",
        "module._sharding_config": "says that keys are gathered, in a module that is being made "
        "parallel",
    },
    "integrations/transformers/attached.py": {
        "module.config": "a model's public attribute: models made from one configuration get one "
        "each",
    },
    "integrations/transformers/trainer.py": {
        "accelerator.gather_for_metrics": "while a loss is computed: Accelerate would take the "
        "counts of ranks for samples, and drop some; taken back after it",
        "model._is_accelerate_prepared": "Accelerate's own mark, back to what it reads where none "
        "was set; there is no public way",
    },
    "ops/positions.py": {
        "block_mask.mask_mod._flexcp_positions": "a function of our own making, the only part of a "
        "BlockMask that its copies keep",
    },
    "tools/cli/plan_text.py": {
        f"table.{name}": "a public setting of rich, of a table that was made here"
        for name in ("caption", "caption_justify")
    },
    "tools/doctor/torch_ring.py": {
        f"options.{name}": "PyTorch has no other way to choose how its ring works; put back"
        for name in ("enable_load_balance", "rotate_method")
    },
    "torch_names.py": {
        **{
            f"x.{name}": "a hint on a tensor that was just made, as torch's own function leaves it"
            for name in ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")
        },
        "function._dynamo_marked_constant": "what dynamo looks for on a function of our own",
    },
    "tools/train/compare.py": {
        "parameter.grad": "gradients are taken off and put back, as optimizers do",
    },
}
"""By file: what is changed of another package's object all the same, and why."""

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


def root_of(node: ast.expr) -> str | None:
    """The name that an expression such as `a.b[0].c()` begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def is_foreign_type(annotation: ast.expr | None, ours: Set[str]) -> bool:
    """Whether an annotation names no class of this library."""
    if annotation is None:
        return True
    return not ours & set(re.findall(r"\w+", ast.unparse(annotation)))


def scope(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module or function, without those inside of its functions."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef):
            yield from scope(child)


CONTEXTS = {"self", "cls", "ctx"}
"""Objects that a class's own code may set; `ctx` is what an autograd function keeps its own in."""


def foreign_names(node: ast.AST, known: Set[str], ours: Set[str]) -> Set[str]:
    """Names in a module or function that stand for objects of other packages.

    What it imports, what its annotations say is not ours, and what is found in such an object.
    """
    found = set(known)
    if isinstance(node, ast.FunctionDef):
        for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if a.arg not in CONTEXTS and is_foreign_type(a.annotation, ours):
                found.add(a.arg)
            else:
                found.discard(a.arg)
    for child in scope(node):
        match child:
            case ast.Import(names=names):
                found |= {(name.asname or name.name).split(".")[0] for name in names}
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] != "flexcp":
                    found |= {name.asname or name.name for name in names}
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                if is_foreign_type(annotation, ours):
                    found.add(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute() as value):
                if root_of(value) in found:
                    found.add(name)
            case ast.For(target=target, iter=value) if root_of(value) in found:
                found |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    return found - CONTEXTS


def set_on_foreign(node: ast.AST, known: Set[str], ours: Set[str]) -> Iterator[str]:
    """Attributes of other packages' objects that code sets or deletes."""
    names = foreign_names(node, known, ours)
    for child in scope(node):
        match child:
            case ast.Attribute(ctx=ast.Store() | ast.Del()) if root_of(child) in names:
                yield ast.unparse(child)
            case ast.FunctionDef():
                yield from set_on_foreign(child, names, ours)


def planted(tree: ast.Module, ours: Set[str] = frozenset()) -> Iterator[str]:
    """Code that adds to, or takes from, what another object has."""
    yield from set_on_foreign(tree, frozenset(), ours)
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
        "import x\nx.a = 1",
        "from torch import x\ndef f():\n    x.a.b = 1",
        "def f(x: nn.Module):\n    x.a = 1",
        "def f(x: Any):\n    del x.a",
        "def f(x):\n    def g():\n        x.a[0].b = 1",
        "def f(x: nn.Module):\n    for m in x.modules():\n        m.a = 1",
        "def f(x: nn.Module):\n    a = x.a\n    a.b += 1",
        "def f():\n    x: Any = g()\n    x.a = 1",
    ],
)
def test_every_way_of_planting_is_recognised(code):
    assert list(planted(ast.parse(code)))
    assert not list(planted(ast.parse(code.replace("x", "self"))))


def test_reading_what_an_object_has_is_no_planting():
    assert not list(planted(ast.parse("vars(x)['a']; x.__dict__.get('a'); getattr(x, 'a')")))
    assert not list(planted(ast.parse("def f(x: Any):\n    y = x.a.b")))


def test_setting_attributes_of_an_own_object_is_no_planting():
    assert not list(planted(ast.parse("def f(x: Group | None):\n    x.a = 1"), {"Group"}))
    assert not list(planted(ast.parse("import torch\ndef f():\n    x = torch.g()\n    x.a = 1")))


def test_nothing_is_planted_on_objects_of_other_packages():
    trees = {name_of(path): tree_of(path) for path in FILES}
    ours = {n.name for t in trees.values() for n in ast.walk(t) if isinstance(n, ast.ClassDef)}
    found = {name: set(planted(tree, ours)) for name, tree in trees.items()}
    assert {name: code for name, code in found.items() if code} == {
        name: set(reasons) for name, reasons in PLANTED.items()
    }


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
