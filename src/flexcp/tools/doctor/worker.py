"""One rank that `flexcp doctor` has started: says on stdout what is found."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Any

from flexcp.tools.doctor.findings import Doing, Finding
from flexcp.tools.doctor.ranks import examine_ranks
from flexcp.tools.doctor.start_ranks import as_line, joined, of_argument
from flexcp.tools.launch import follow_the_launcher


def main() -> None:
    """Reads what to examine from the command line, and does it together with the other ranks."""
    stop = threading.Event()
    threading.Thread(target=follow_the_launcher, args=(stop,), daemon=True).start()
    request, seconds = of_argument(sys.argv[1])
    try:
        with joined(request, sys.argv[2]) as context:
            examine_ranks(
                context,
                request.rank_checks(),
                seconds,
                listen=_tell,
                hear_machine=lambda machine: _say("machine", machine),
                should_stop=stop.is_set,
            )
            if context.rank == 0:
                _say("end")
    except Exception as error:
        traceback.print_exc()
        _say("failed", {"said": f"{type(error).__name__}: {error}".splitlines()[0][:400]})
        sys.exit(1)


def _tell(event: Doing | Finding) -> None:
    _say("doing" if isinstance(event, Doing) else "finding", event)


def _say(kind: str, content: Any = None) -> None:
    sys.stdout.write(as_line(kind, content) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
