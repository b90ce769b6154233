"""`python -m accel_parallel.train.rehearse FOLDER`: run the tasks of a rehearsal, one after the other, in one pool."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from accel_parallel.train.agent import die_with_parent
from accel_parallel.train.pool import warm_up


def main(argv: list[str]) -> int:
    die_with_parent(signal.SIGTERM)
    began = time.time()
    # The profiler's own log, which nobody asked for.
    os.environ["KINETO_LOG_LEVEL"] = "99"
    warm_up()  # it imports torch meanwhile, on another core
    from accel_parallel.train.rehearse.task import Task, run_task

    folder = Path(argv[0])
    for values in json.loads((folder / "tasks.json").read_text(encoding="utf-8")):
        run_task(Task(folder=folder / values.pop("folder"), **values), began)
        began = time.time()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
