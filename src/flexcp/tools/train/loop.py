"""The training loop of one rank: prepare, differentiate, add up, step, record, save."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flexcp.errors import FlexCPError
from flexcp.tools.train import checkpoint
from flexcp.tools.train.compare import compare_with_one_process
from flexcp.tools.train.config import TrainConfig
from flexcp.tools.train.curve import CURVE, METRICS, Record
from flexcp.tools.train.data import Corpus, PackedDocuments, load_corpus
from flexcp.tools.train.events import (
    CheckpointSaved,
    Compared,
    Evaluated,
    Finished,
    Listener,
    Started,
    Stepped,
    ignore,
)
from flexcp.tools.train.model import ByteTransformer
from flexcp.tools.train.optimizer import (
    clip_and_step,
    learning_rate,
    make_optimizer,
    require_finite,
)
from flexcp.tools.train.step import loss_of, make_model, rank_batch
from flexcp.tools.train.team import Team


def train(
    config: TrainConfig,
    mesh: object = None,
    *,
    listen: Listener = ignore,
    should_stop: Callable[[], bool] = lambda: False,
) -> Finished:
    """Trains, or goes on where the checkpoint in `config.out` ends. Every rank calls it.

    Args:
        config: What to train.
        mesh: A DeviceMesh over all processes of the job; None to train in this process alone.
        listen: Called on rank 0 with everything that happens.
        should_stop: Asked after every step, on every rank. If any rank says yes, all save and end.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as out:
    ...     tiny = TrainConfig(out=out, steps=2, tokens=64, dim=16, layers=1, eval_sequences=0)
    ...     train(tiny).step
    2
    """
    team = Team(mesh)
    config.require_ranks(team.size)
    require_device(config)
    corpus = load_corpus(config.data, config.seed, longest=config.document_tokens)
    with ExitStack() as reservation:
        found = _open(config, corpus, team, reservation)
        model = make_model(config)
        optimizer = make_optimizer(model, config)
        if found is not None:
            found.restore(model, optimizer)
        run = _Run(config, team, corpus, model, optimizer, listen if team.leads else ignore)
        return run.steps(0 if found is None else found.step, should_stop)


def require_device(config: TrainConfig, local_rank: int = 0) -> None:
    """Raises if this process, the `local_rank`-th of its machine, has no device of its own."""
    if config.device == "cuda" and torch.cuda.device_count() <= local_rank:
        raise FlexCPError(
            "a CUDA device for every process of a machine",
            f"{torch.cuda.device_count()} for process {local_rank + 1}",
            "pass --device cpu, or fewer --ranks",
        )


def _open(
    config: TrainConfig, corpus: Corpus, team: Team, reservation: ExitStack
) -> checkpoint.Checkpoint | None:
    """The checkpoint to go on from. Rank 0 alone looks at the disk; all hear what it found."""
    found: checkpoint.Checkpoint | FlexCPError | None = None
    if team.leads:
        try:
            reservation.enter_context(checkpoint.reserved(Path(config.out)))
            found = checkpoint.load(Path(config.out), config, corpus.fingerprint)
        except FlexCPError as error:
            found = error
    found, fingerprint = team.share((found, corpus.fingerprint))
    if isinstance(found, FlexCPError):
        raise found
    if fingerprint != corpus.fingerprint:
        raise FlexCPError(
            "the same documents on every rank",
            "others than those of rank 0",
            "put a copy of the data on every machine, and pass it as --data",
        )
    return found


@dataclass(frozen=True, eq=False)
class _Run:
    """What stays the same from step to step."""

    config: TrainConfig
    team: Team
    corpus: Corpus
    model: ByteTransformer
    optimizer: torch.optim.Optimizer
    listen: Listener
    comparisons: list[Compared] = field(default_factory=list)
    """Those of this process, on rank 0."""

    def steps(self, done: int, should_stop: Callable[[], bool]) -> Finished:
        """Trains from the step after `done` on."""
        config, team = self.config, self.team
        stream = PackedDocuments(self.corpus.train, config.seed)
        record = Record.opened(Path(config.out), done) if team.leads else None
        self._announce(stream, done)
        here: list[Stepped] = []
        stopped = False
        last = min(config.steps, config.stop_after or config.steps)
        while done < last and not stopped:
            done += 1
            event, stopped = self._step(stream, done, record, should_stop())
            here.append(event)
            if config.eval_sequences and (done % config.eval_every == 0 or done == config.steps):
                self._evaluate(done, record)
            if stopped or done == last or done % config.checkpoint_every == 0:
                self._save(done, record)
        finished = self._finished(done, here, record, stopped)
        self.listen(finished)
        return finished

    def _step(
        self, stream: PackedDocuments, number: int, record: Record | None, stop: bool
    ) -> tuple[Stepped, bool]:
        """One optimizer step; and whether any rank was asked to stop."""
        config, team, model = self.config, self.team, self.model
        start = time.perf_counter()
        batch = stream.batch(number - 1, config.batch, config.tokens)
        mine = rank_batch(batch, config, team)
        loss = loss_of(model, mine)
        loss.backward()
        team.sum_gradients_(model)
        sums = torch.stack([loss.detach().double(), loss.new_tensor(stop).double()])
        team.sum_(sums)
        total, asked = sums.tolist()
        require_finite("loss", total, number, config)
        paused = time.perf_counter()
        compared = None
        if config.compare and record is not None:
            compared = compare_with_one_process(model, batch, config, number, total)
        start += time.perf_counter() - paused
        norm = clip_and_step(model, self.optimizer, number, config)
        event = Stepped(
            step=number,
            loss=total,
            gradient_norm=norm,
            lr=learning_rate(number, config),
            documents=sum(map(len, batch.lengths)),
            seconds=time.perf_counter() - start,
            plan_seconds=mine.plan_seconds,
        )
        self._tell(event, record)
        if compared is not None:
            self.comparisons.append(compared)
            self._tell(compared, record)
        return event, asked > 0

    def _tell(self, event: Stepped | Evaluated | Compared, record: Record | None) -> None:
        if record is not None:
            record.add(event)
            self.listen(event)

    def _evaluate(self, step: int, record: Record | None) -> None:
        """The mean loss of the first held-out sequences, sharded as those to train on."""
        config = self.config
        stream = PackedDocuments(self.corpus.held_out, config.seed)
        losses = []
        with torch.no_grad():
            for n in range(config.eval_sequences):
                mine = rank_batch(stream.batch(n, 1, config.tokens), config, self.team)
                losses.append(loss_of(self.model, mine).double())
        mean = torch.stack(losses).mean()
        self.team.sum_(mean)
        self._tell(Evaluated(step, float(mean)), record)

    def _save(self, step: int, record: Record | None) -> None:
        if record is None:
            return
        path = checkpoint.save(
            Path(self.config.out), step, self.model, self.optimizer, self.config,
            self.corpus.fingerprint,
        )  # fmt: skip
        record.draw()
        self.listen(CheckpointSaved(step, str(path)))

    def _announce(self, stream: PackedDocuments, done: int) -> None:
        config, team = self.config, self.team
        layout = ""
        if team.mesh is not None:
            batch = stream.batch(min(done, config.steps - 1), config.batch, config.tokens)
            plan = rank_batch(batch, config, team).plan
            assert plan is not None
            names = dict.fromkeys(s.name for s in plan.schedules.values())
            layout = f"{plan.layout.name}, {' and '.join(names)}"
        self.listen(
            Started(
                ranks=team.size,
                parameters=sum(p.numel() for p in self.model.parameters()),
                documents=len(stream.documents),
                epoch_tokens=stream.epoch_tokens,
                tokens_per_step=config.batch * config.tokens,
                steps=config.steps,
                done=done,
                layout=layout,
                out=config.out,
            )
        )

    def _finished(
        self, done: int, here: list[Stepped], record: Record | None, interrupted: bool
    ) -> Finished:
        config = self.config
        every = here if record is None else record.steps
        evaluations = [] if record is None else record.evaluations
        timed = here[1:] or here
        seconds = sum(e.seconds for e in timed)
        tokens = len(timed) * config.batch * config.tokens
        names = (checkpoint.NAME, METRICS, CURVE)
        return Finished(
            step=done,
            steps=config.steps,
            first_loss=every[0].loss if every else None,
            last_loss=every[-1].loss if every else None,
            eval_loss=evaluations[-1].eval_loss if evaluations else None,
            tokens_per_second=tokens / seconds if timed else None,
            planning_share=sum(e.plan_seconds for e in timed) / seconds if timed else None,
            interrupted=interrupted,
            equal=all(c.equal for c in self.comparisons) if self.comparisons else None,
            loss_difference=max((c.loss_difference for c in self.comparisons), default=None),
            gradient_difference=max(
                (c.gradient_difference for c in self.comparisons), default=None
            ),
            files=tuple(str(Path(config.out) / name) for name in names),
        )
