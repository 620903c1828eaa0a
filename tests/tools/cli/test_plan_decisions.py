"""`flexcp plan` answers what people decide by: memory, links, reasons, and code to copy."""

from __future__ import annotations

import json

import pytest

import flexcp as library
from flexcp.plan import PRESETS, Machine, make_plan, save_machine
from flexcp.tools.cli.model_shapes import MODELS, model_shape

SMALL = ("--tokens", "4K", "--ranks", 4)


def summary(flexcp, *args):
    return json.loads(flexcp("plan", *args, "--json").out)


@pytest.mark.parametrize(
    "args",
    [
        ("causal", *SMALL),
        ("causal", *SMALL, "--layout", "balanced", "--schedule", "ring"),  # as good as head-tail
        ("~causal | (full & chunked(100)) & sliding_window(7, 3)", *SMALL, "--layout", "head_tail"),
        ("causal & document([600, 424])", "--ranks", "2x2", "--heads", 8, "--schedule", "hybrid"),
        ("causal & documents(30)", "--tokens", 3000, "--ranks", 3, "--block-size", 64),
        ("shared_prefix(10, [20, 30])", "--ranks", 2, "--dtype", "float32", "--batch", 2),
        ("--model", "gemma-3-1b", *SMALL, "--machine", "a100", "--gpus-per-node", 2),
        ("--mask", "a=causal", "--mask", "b=chunked(512)", *SMALL, "--machine", "mi300x-xgmi"),
    ],
)
def test_the_code_that_is_printed_makes_exactly_this_plan(flexcp, args):
    found = summary(flexcp, *args)
    namespace: dict[str, object] = {}
    exec(found["code"], namespace)
    plan = namespace["plan"]
    assert isinstance(plan, library.Plan)
    assert plan.fingerprint() == found["chosen"]["fingerprint"]
    assert plan.stats().predicted_seconds == found["chosen"]["stats"]["predicted_seconds"]


def test_the_code_is_printed_for_people_too(flexcp):
    out = flexcp("plan", "causal", *SMALL).out
    assert "plan = flexcp.make_plan(\n    masks.causal(),\n    4096,\n    4," in out


def test_code_with_a_machine_of_a_file_has_its_numbers(flexcp, tmp_path):
    machine = Machine("ours", 1e14, 2, 1e11, 1e10, 1e-5, 1e-6, 1e-5)
    save_machine(machine, tmp_path / "ours.json")
    found = summary(flexcp, "causal", *SMALL, "--machine", tmp_path / "ours.json")
    namespace: dict[str, object] = {}
    exec(found["code"], namespace)
    assert namespace["plan"].machine == machine  # type: ignore[attr-defined]


def test_memory_links_and_waiting_are_told(flexcp):
    found = summary(flexcp, "causal", "--tokens", "16K", "--ranks", 16, "--gpus-per-node", 4)
    chosen = found["chosen"]
    assert set(chosen["memory_bytes"]) == {"own", "received", "kept", "peak"}
    assert chosen["memory_bytes"]["peak"] == max(chosen["stats"]["memory_bytes_per_rank"])
    assert chosen["bytes_within_nodes"] > 0
    assert chosen["bytes_between_nodes"] > 0
    assert chosen["exposed_seconds"] > 0
    out = flexcp("plan", "causal", "--tokens", "16K", "--ranks", 16, "--gpus-per-node", 4).out
    for words in ("memory, peak", "  own ", "  received ", "  kept ", "within nodes", "Exposed",
                  "between nodes", "the bytes"):  # fmt: skip
        assert words in out


def test_no_strategy_is_listed_twice(flexcp):
    args = ("causal", "--tokens", "8K", "--ranks", 4, "--heads", 8)
    for schedule in ("ulysses", "exchange", "ring"):
        found = summary(flexcp, *args, "--schedule", schedule)["strategies"]
        rows = [(s["schedules"][""], s["seconds"], s["most_bytes_received"]) for s in found]
        assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200", "b200", "mi300x", "H100"])
def test_gpus_are_known_by_name(gpu):
    machine = Machine.preset(gpu)
    assert machine.ranks_per_node == 8
    assert machine.memory >= 80e9
    assert machine.name == f"{gpu.lower()}-ib"


def test_presets_have_names_of_their_own():
    assert len({m.name for m in PRESETS}) == len(PRESETS)


def test_a_saved_plan_is_shown_again(flexcp, tmp_path):
    path = tmp_path / "plan.json"
    first = summary(flexcp, "causal", *SMALL, "--save", path)
    again = summary(flexcp, "--load", path)
    assert again["chosen"] == first["chosen"]
    assert again["strategies"] == first["strategies"]
    assert "load_plan" in again["code"]
    assert library.load_plan(path).fingerprint() == first["chosen"]["fingerprint"]
    assert "leave out the mask" in flexcp("plan", "causal", "--load", path, code=2).err
    assert "expected a plan in" in flexcp("plan", "--load", tmp_path / "no.json", code=2).err


def test_a_model_brings_its_heads_and_its_masks(flexcp):
    found = summary(flexcp, "--model", "llama-3-70b", *SMALL)
    assert found["shape"]["num_heads"] == 64
    assert found["shape"]["num_kv_heads"] == 8
    assert found["layers"] == 80
    assert found["mask"] == "llama-3-70b: causal"
    assert summary(flexcp, "--model", "llama-3-70b", "--kv-heads", 4, *SMALL)["shape"][
        "num_kv_heads"
    ] == 4  # fmt: skip


def test_a_model_may_be_a_configuration(flexcp, tmp_path):
    config = {"model_type": "own", "num_hidden_layers": 6, "num_attention_heads": 8,
              "num_key_value_heads": 2, "hidden_size": 512, "sliding_window": 100,
              "layer_types": ["sliding_attention", "full_attention"] * 3}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        found = summary(flexcp, "--model", path, *SMALL)
        assert found["mask"] == "own: full=causal, sliding=causal & sliding_window(99)"
        assert (found["shape"]["num_kv_heads"], found["shape"]["head_dim"]) == (2, 64)
        assert found["layers"] == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [("lama-3-70b", "did you mean llama-3-70b"), ("nothing", "pass a Transformers config.json"),
     ("missing.json", "No such file")],
)  # fmt: skip
def test_a_model_that_nobody_knows_is_refused(flexcp, text, message):
    assert message in flexcp("plan", "--model", text, *SMALL, code=2).err


@pytest.mark.parametrize("text", ["{", "[1]", '{"num_attention_heads": 8}', '{"n_layer": "x"}'])
def test_a_configuration_without_numbers_is_refused(flexcp, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    found = flexcp("plan", "--model", tmp_path, *SMALL, code=2)
    assert "expected a Transformers configuration" in found.err


def test_configurations_of_transformers_say_the_same_as_the_table(tmp_path):
    transformers = pytest.importorskip("transformers")
    makers = {"gpt-oss-20b": transformers.GptOssConfig, "gemma-2-2b": transformers.Gemma2Config}
    for name, maker in makers.items():
        known = MODELS[name]
        config = maker(
            num_hidden_layers=known.layers, num_attention_heads=known.heads,
            num_key_value_heads=known.kv_heads, head_dim=known.head_dim,
        )  # fmt: skip
        config.save_pretrained(tmp_path / name)
        found = model_shape(str(tmp_path / name))
        assert (found.window, found.window_layers) == (known.window, known.window_layers)


def test_models_split_their_heads_evenly():
    assert all(shape.heads % shape.kv_heads == 0 for shape in MODELS.values())


def test_plans_made_by_hand_have_the_same_reasons():
    from flexcp.tools.report.reasons import reasons
    from flexcp.tools.report.strategies import strategies

    plan = make_plan(library.masks.causal(), 8192, 16, num_heads=8, num_kv_heads=2)
    lines = reasons(strategies(plan))
    assert any(line.startswith("Exposed communication is") for line in lines)
    assert any("of a rank's memory" in line for line in lines)
    assert all(line.endswith(".") for line in lines)
