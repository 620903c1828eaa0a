"""Starting the ranks of a run on this machine, and listening to them.

Imports no torch: the ranks do.
"""

from __future__ import annotations

from collections.abc import Callable

from flexcp.errors import FlexCPError
from flexcp.tools.launch import run_ranks
from flexcp.tools.train.config import TrainConfig
from flexcp.tools.train.events import Failed, Finished, Listener, from_line


def launch(
    config: TrainConfig,
    ranks: int,
    *,
    listen: Listener,
    when_asked_to_stop: Callable[[], None] = lambda: None,
    show_logs: bool = False,
) -> Finished:
    """Trains on `ranks` processes of this machine.

    An interruption (SIGINT, SIGTERM) asks them to save and end; a second one kills them.

    Args:
        config: What to train.
        ranks: Processes.
        listen: Called with everything that rank 0 reports.
        when_asked_to_stop: Called at the first interruption.
        show_logs: Whether to pass on what ranks write to stderr.
    """
    config.require_ranks(ranks)
    failures: list[Failed] = []
    finished: list[Finished] = []

    def hear(line: str) -> None:
        event = from_line(line)
        if isinstance(event, Failed):
            failures.append(event)
        elif event is not None:
            if isinstance(event, Finished):
                finished.append(event)
            listen(event)

    ended = run_ranks(
        "flexcp.tools.train.worker",
        config.to_json(),
        ranks,
        hear=hear,
        when_asked_to_stop=when_asked_to_stop,
        show_logs=show_logs,
    )
    own = next((f for f in failures if not f.consequence), None)
    if own is not None:  # it says more than that others missed this rank
        raise FlexCPError(own.expected, own.got, own.fix)
    if failures or not finished:
        raise FlexCPError(
            "every rank to finish",
            str(ended),
            "run the same command again to go on from the last checkpoint; pass --debug to see "
            "what ranks wrote; if memory ran out, pass fewer --tokens",
        )
    return finished[-1]
