"""The examples of Transformers, Trainer and Accelerate give the numbers of one process."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from flexcp import testing

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(source: str, name: str) -> dict:
    namespace: dict = {"__name__": name}
    exec(compile(source, name, "exec"), namespace)
    return namespace


def test_a_transformers_user_adds_two_lines_and_gets_the_same_losses():
    source = (EXAMPLES / "transformers_model.py").read_text()
    added = [line for line in source.splitlines() if line.endswith("# flexcp")]
    assert [line.split("=")[1].strip().split("(")[0] for line in added] == ["hf.attach", "cp.shard"]
    before = "\n".join(line for line in source.splitlines() if line not in added)
    names = {node.id for node in ast.walk(ast.parse(before)) if isinstance(node, ast.Name)}
    assert not names & {"hf", "cp"}  # nothing else knows of it

    plain, sharded = load(before, "before"), load(source, "after")
    alone = testing.spawn(lambda mesh: plain["train"](mesh, 3), 1)[0]
    for losses in testing.spawn(lambda mesh: sharded["train"](mesh, 3), 2):
        assert losses == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("example", ["trainer", "accelerate_loop"])
def test_two_ranks_give_the_numbers_of_one(example, tmp_path):
    module = load((EXAMPLES / f"{example}.py").read_text(), example)
    where = [str(tmp_path)] if example == "trainer" else []
    one, two = (module["launch"](ranks, *where) for ranks in (1, 2))
    for found in two:
        if example == "trainer":
            assert found["eval_loss"] == pytest.approx(one[0]["eval_loss"], rel=1e-4)
        else:
            assert found == pytest.approx(one[0], rel=1e-5)
