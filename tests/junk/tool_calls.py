"""Pictures, reports, training and verification, as users call them."""

from __future__ import annotations

import torch

from flexcp import Layout, Mask
from flexcp.tools import report
from flexcp.tools.train import PackedDocuments, TrainConfig, load_corpus
from flexcp.tools.verify import verify
from tests.junk.calls import Call, call, refusals
from tests.junk.samples import DOCUMENTS, GRID, LAYOUT, PAIR, PLAN, Tiny
from tests.junk.values import (
    a,
    absent,
    anything,
    either,
    flag,
    function,
    listed,
    nothing,
    number,
    one_of,
    path,
    text,
    whole,
)


def tool_calls() -> dict[str, Call]:
    """Pictures, reports, training and verification."""
    pixels = whole(1, 1 << 14)
    at = whole(0, 0)
    config = {
        "data": (None, either(absent, text)), "out": ("x", text), "steps": (1, whole(1)),
        "tokens": (8, whole(2)), "batch": (1, whole(1)), "document_tokens": (8, whole(1)),
        "seed": (0, whole()), "lr": (1e-3, number(1e-320)), "dim": (16, whole(1)),
        "layers": (1, whole(1)), "heads": (2, whole(1)), "kv_heads": (2, whole(1)),
        "window": (None, either(absent, whole(1))), "dtype": ("float32", nothing),
        "autocast": (None, absent), "layout": ("auto", nothing), "schedule": ("auto", nothing),
        "head_ranks": (1, whole(1)), "device": ("cpu", nothing), "checkpoint_every": (1, whole(1)),
        "eval_every": (1, whole(1)), "eval_sequences": (1, whole(0)),
        "stop_after": (None, either(absent, whole(1))), "compare": (False, flag),
        "restart": (False, flag), "timeout": (60.0, number(1e-320)),
    }  # fmt: skip
    drawn = {"b": (0, at), "h": (0, at), "title": ("x", text)}
    return {
        "picture_of": call(
            report.picture_of, grid=(GRID, nothing), height=(8, pixels), width=(8, pixels), **drawn
        ),
        "picture_by_rank": call(
            report.picture_by_rank, grid=(GRID, nothing), layout=(LAYOUT, nothing),
            height=(8, pixels), width=(8, pixels), group_size=(1, whole(1, 2)), **drawn,
        ),
        "Picture.to_text": call(report.picture_of(GRID).to_text, colour=(False, flag)),
        "Picture.save_png": call(
            report.picture_of(GRID).save_png, path=("junk.png", path), scale=(1, whole(1, 256))
        ),
        "Picture.save_svg": call(
            report.picture_of(GRID).save_svg, path=("junk.svg", path), size=(64, whole(1, 1 << 14))
        ),
        "report_page": refusals(
            report.report_page, plan=(PLAN, nothing), title=("x", text),
            notes=((), listed(text)), compared=([], either(absent, listed(a(report.Strategy)))),
        ),
        "save_report": refusals(
            report.save_report, plan=(PLAN, nothing), path=("junk.html", path),
        ),
        "save_figure": refusals(
            report.save_figure, plan=(PLAN, nothing), path=("junk.svg", path),
        ),
        "strategies": refusals(
            report.strategies, plan=(PLAN, nothing), say=(None, either(absent, function))
        ),
        "table": call(
            report.table, header=(["a"], listed(text)), rows=([["1"]], listed(listed(anything)))
        ),
        "TrainConfig": call(TrainConfig, **config),
        "TrainConfig.from_json": call(TrainConfig.from_json, text=("{}", nothing)),
        "load_corpus": refusals(
            load_corpus, data=(__file__, absent), seed=(0, whole()), longest=(8, whole(1)),
        ),
        "TrainConfig.require_ranks": call(TrainConfig().require_ranks, ranks=(2, whole(1, 4096))),
        "PackedDocuments.batch": refusals(
            PackedDocuments(load_corpus(__file__, 0, longest=64).train, 0).batch,
            step=(0, whole(0)), batch=(1, whole(1)), tokens=(8, whole(1)),
        ),
        "verify": refusals(
            verify,
            model=(Tiny, function), batch=(None, absent), parallel=(None, either(absent, function)),
            single=(None, either(absent, function)),
            mask=(None, either(absent, a(Mask), function)), documents=(None, DOCUMENTS),
            restart_positions=(False, flag), world_size=(2, either(whole(1, 16), PAIR)),
            ranks=("simulated", nothing), gradients=("summed", nothing),
            losses=(None, absent), seq_len=(9, whole(1)), batch_size=(1, whole(1)),
            dtype=(torch.float32, either(absent, one_of(torch.float32))),
            layout=("auto", a(Layout)), schedule=("auto", nothing), seed=(0, whole()),
            timeout=(60.0, number(1e-320)),
        ),
    }  # fmt: skip
