"""A run that was stopped goes on as if it had not been."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexcp import FlexCPError, testing
from flexcp.tools.train import checkpoint, loop, train
from flexcp.tools.train.checkpoint import reserved
from flexcp.tools.train.events import Started, Stepped


def run(config, ranks=2, **kwargs):
    return testing.spawn(lambda mesh: train(config, mesh, **kwargs), ranks)


def losses(config):
    """Step, loss and gradient norm as they were written, to the last digit."""
    lines = map(json.loads, Path(config.out, "metrics.jsonl").read_text().splitlines())
    return [
        (e["event"], e["step"], e.get("loss"), e.get("gradient_norm"), e.get("eval_loss"))
        for e in lines
    ]


@pytest.fixture(scope="module")
def uninterrupted(make_tiny_run, tmp_path_factory):
    config = make_tiny_run(tmp_path_factory.mktemp("uninterrupted"))
    run(config)
    return losses(config)


def test_a_stopped_run_goes_on_with_the_same_losses_to_the_last_bit(tiny, uninterrupted):
    run(replace(tiny, stop_after=3))
    assert losses(tiny) == uninterrupted[:4]
    run(tiny)
    assert losses(tiny) == uninterrupted
    assert len(uninterrupted) == 8


def test_steps_after_the_last_checkpoint_are_repeated(tiny, uninterrupted):
    def kill(event):
        if isinstance(event, Stepped) and event.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        run(tiny, listen=kill)
    assert [e[1] for e in losses(tiny)] == [1, 2, 3]
    with Path(tiny.out, "metrics.jsonl").open("a") as file:
        file.write('{"event": "stepped", "st')  # cut short
    run(replace(tiny, stop_after=4))
    assert losses(tiny) == uninterrupted[:5]

    def go_on(mesh):
        heard = []
        train(tiny, mesh, listen=heard.append)
        return [e.done for e in heard if isinstance(e, Started)]

    assert testing.spawn(go_on, 2) == [[4], []]  # rank 0 alone is heard
    assert losses(tiny) == uninterrupted


def test_whoever_is_asked_to_stop_all_save_and_end(tiny, uninterrupted):
    def one(mesh):
        asked = iter([False, True, True])
        return train(tiny, mesh, should_stop=lambda: mesh.get_rank() == 1 and next(asked))

    ended = testing.spawn(one, 2)
    assert [(e.step, e.interrupted) for e in ended] == [(2, True)] * 2
    run(tiny)
    assert losses(tiny) == uninterrupted


def test_a_run_may_go_on_with_other_ranks(tiny, uninterrupted):
    run(replace(tiny, stop_after=3), 3)
    train(replace(tiny, schedule="ring", layout="striped"))
    for found, expected in zip(losses(tiny), uninterrupted, strict=True):
        assert found[:2] == expected[:2]
        for a, b in zip(found[2:], expected[2:], strict=True):
            assert a == (None if b is None else pytest.approx(b, rel=1e-4))


def test_a_finished_run_is_not_repeated(tiny):
    train(tiny)
    before = Path(tiny.out, "checkpoint.pt").read_bytes()
    ended = train(tiny)
    assert (ended.step, ended.first_loss is None) == (6, False)
    assert train(replace(tiny, stop_after=2)).step == 6
    assert Path(tiny.out, "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 1e-4}, "has --lr 0.003, got --lr 0.0001; pass the same, choose another --out"),
        ({"steps": 7}, "has --steps 6, got --steps 7"),
        ({"kv_heads": 3}, "has --kv-heads 1, got --kv-heads 3"),
        ({"seed": 1}, "has --seed 0, got --seed 1"),
    ],
)
def test_other_settings_are_refused_by_name(tiny, change, message):
    train(replace(tiny, stop_after=1))
    with pytest.raises(FlexCPError, match=message):
        train(replace(tiny, **change))
    assert train(replace(tiny, **change, restart=True, stop_after=1)).step == 1


def test_every_rank_hears_why_a_run_can_not_go_on(tiny):
    train(replace(tiny, stop_after=1))

    def one(mesh):
        with pytest.raises(FlexCPError, match="--seed 0, got --seed 1"):
            train(replace(tiny, seed=1), mesh)
        return True

    assert testing.spawn(one, 2) == [True, True]


def test_other_documents_are_refused(tiny, texts):
    train(replace(tiny, stop_after=1))
    (texts / "new.txt").write_text("one more")
    with pytest.raises(FlexCPError, match=r"the documents of the run .* got others"):
        train(tiny)


def test_a_file_that_is_no_checkpoint_is_refused(tiny):
    folder = Path(tiny.out)
    folder.mkdir()
    (folder / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(FlexCPError, match=r"a checkpoint of flexcp train in .*checkpoint\.pt"):
        train(tiny)


def test_a_kill_while_saving_leaves_the_last_checkpoint(tiny, uninterrupted, monkeypatch):
    save = torch.save
    count = iter(range(9))

    def killed(content, file):
        if next(count) == 1:
            file.write(b"half of it")
            raise KeyboardInterrupt
        save(content, file)

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        run(tiny)
    monkeypatch.undo()
    run(tiny)
    assert losses(tiny) == uninterrupted


def test_two_runs_do_not_share_a_folder(tiny):
    with reserved(Path(tiny.out)), pytest.raises(FlexCPError, match="used by one run at a time"):
        train(tiny)


def test_a_place_that_can_not_be_written_is_refused(tiny):
    place = Path(tiny.data, "1.txt", "below")
    with pytest.raises(FlexCPError, match="an --out folder that can be written"):
        train(replace(tiny, out=str(place)))


def test_a_flipped_bit_is_found_and_the_previous_checkpoint_used(tiny, uninterrupted):
    train(replace(tiny, stop_after=4, checkpoint_every=2))
    path = Path(tiny.out, "checkpoint.pt")
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 40)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(bytes(damaged))
        with pytest.raises(ValueError, match="checksum"):
            checkpoint._read(path)
    with pytest.warns(UserWarning, match="damaged .* going on from the previous one"):
        train(replace(tiny, checkpoint_every=2))
    assert [x[1] for x in losses(tiny)] == [x[1] for x in uninterrupted]
    assert [x[2] for x in losses(tiny)] == [
        None if x[2] is None else pytest.approx(x[2], rel=1e-4) for x in uninterrupted
    ]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(
    tiny, uninterrupted, monkeypatch
):
    good, count = loop.loss_of, iter(range(9))

    def broken(model, batch):
        loss = good(model, batch)
        return loss * torch.nan if next(count) == 3 else loss

    monkeypatch.setattr(loop, "loss_of", broken)
    with pytest.raises(FlexCPError, match=r"a loss that is finite, got nan in step 4; go on from"):
        train(replace(tiny, checkpoint_every=1, eval_sequences=0))
    monkeypatch.setattr(loop, "loss_of", good)
    for line in Path(tiny.out, "metrics.jsonl").read_text().splitlines():
        assert "NaN" not in line
    found = train(replace(tiny, checkpoint_every=1, eval_sequences=0))
    assert found.step == 6
    wanted = [x[2] for x in uninterrupted if x[2] is not None]
    assert [x[2] for x in losses(tiny)] == pytest.approx(wanted, rel=1e-4)


def test_a_full_disk_leaves_the_last_checkpoint_and_no_debris(tiny, monkeypatch):
    train(replace(tiny, stop_after=2))
    before = Path(tiny.out, "checkpoint.pt").read_bytes()

    def full(content, file):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(FlexCPError, match=r"room for the checkpoint .*No space left on device"):
        train(tiny)
    assert Path(tiny.out, "checkpoint.pt").read_bytes() == before
    assert not list(Path(tiny.out).glob("*.new"))


@pytest.mark.parametrize("name", ["metrics.jsonl.new", "metrics.jsonl", "loss.svg.new"])
def test_a_disk_that_is_full_for_the_record_leaves_what_was_there(name, tiny, monkeypatch):
    train(replace(tiny, stop_after=2))
    before = {path.name: path.read_bytes() for path in Path(tiny.out).glob("[!.]*")}
    opened = io.open

    def full(path, mode="r", *args, **kwargs):
        if Path(path).name == name and mode != "r":
            if name.endswith(".new"):
                opened(path, "w").close()
            raise OSError(28, "No space left on device")
        return opened(path, mode, *args, **kwargs)

    monkeypatch.setattr(io, "open", full)  # what Path.open and Path.write_text call
    with pytest.raises(FlexCPError, match=r"room for .*No space left on device; make room and go"):
        train(replace(tiny, stop_after=3))
    monkeypatch.undo()
    after = {path.name: path.read_bytes() for path in Path(tiny.out).glob("[!.]*")}
    assert not list(Path(tiny.out).glob("*.new"))
    assert after["loss.svg"] == before["loss.svg"]
    if name == "metrics.jsonl.new":  # before anything was done
        assert after == before
    assert train(tiny).step == 6


def test_documents_of_the_same_sizes_with_other_contents_are_refused(tiny, texts):
    train(replace(tiny, stop_after=1))
    path = next(texts.iterdir())
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(FlexCPError, match="the same with other contents"):
        train(tiny)
