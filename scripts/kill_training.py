"""Kills training runs at random moments, lets them go on, and compares losses with unharmed runs.

    python scripts/kill_training.py --kills 50

Moments are drawn over the time that a run takes, checkpoints being written included: it saves after
every step. One and two ranks take turns; all ranks are killed, or one of them. Ranks are forked
from this process, which has torch already. Exit code 1 if a loss differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from flexcp.tools.train import TrainConfig, train
from flexcp.tools.train.events import ignore
from flexcp.tools.train.worker import train_on_ranks


def start(config: TrainConfig, ranks: int, store: str) -> list[int]:
    """Forks the ranks of a run; their process ids."""
    found = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(2)  # a rank that misses another says so at length
                torch.set_num_threads(1)
                if ranks == 1:
                    train(config)
                else:
                    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
                    train_on_ranks(config, listen=ignore, should_stop=bool, store=store)
                code = 0
            finally:
                os._exit(code)
        found.append(pid)
    return found


def wait(pids: list[int]) -> bool:
    """Whether all ranks have ended well; those that miss another for long are killed."""
    codes: dict[int, int] = {}
    failed = None
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = status
        if failed is None and any(codes.values()):
            failed = time.monotonic()
        if failed is not None and time.monotonic() - failed > 1:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return not any(codes.values())


def losses(config: TrainConfig) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of every step on record."""
    lines = Path(config.out, "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [(e["step"], e["loss"], e["gradient_norm"]) for e in events if e["event"] == "stepped"]


def run(folder: Path, kills: int, seed: int) -> int:
    """Kills as often as asked for; how many runs had other losses in the end."""
    (folder / "texts").mkdir()
    text = "".join(f"a line of a text, the {n}th of them\n" for n in range(200))
    (folder / "texts" / "one.txt").write_text(text)
    source, done, wrong, number = random.Random(seed), 0, 0, 0

    def config_of(out: str) -> TrainConfig:
        return TrainConfig(
            data=str(folder / "texts"), out=str(folder / out), steps=8, tokens=64, dim=16,
            document_tokens=40, layers=1, heads=2, kv_heads=1, eval_sequences=0,
            checkpoint_every=1, timeout=30,
        )  # fmt: skip

    seconds = {}
    for ranks in (1, 2):
        began = time.monotonic()
        assert wait(start(config_of(f"unharmed{ranks}"), ranks, str(folder / f"store{ranks}")))
        seconds[ranks] = time.monotonic() - began
    while done < kills:
        number += 1
        ranks, config = 1 + number % 2, config_of(f"harmed{number}")
        for attempt in range(5):  # killed a few times before it may end
            pids = start(config, ranks, str(folder / f"store {number} {attempt}"))
            if attempt < 4 and done < kills:
                time.sleep(source.random() * seconds[ranks])
                victims = pids if source.random() < 0.5 else [source.choice(pids)]
                for pid in victims:
                    os.kill(pid, signal.SIGKILL)
                done += 1
            if wait(pids):
                break
        same = losses(config) == losses(config_of(f"unharmed{ranks}"))
        wrong += not same
        word = "the same losses" if same else "OTHER LOSSES"
        print(f"{done} kills, run {number} on {ranks} ranks: {word}", flush=True)
    return wrong


def main() -> None:
    """Reads how many kills are wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        sys.exit(bool(run(Path(name), options.kills, options.seed)))


if __name__ == "__main__":
    main()
