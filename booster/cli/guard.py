"""End what a killed launcher leaves: the ranks, all that they have started, and the folder of the attempt.

Executed as a file, `python guard.py FOLDER`, with a pipe from the launcher as standard input: it imports nothing of booster,
and waits for the end of that pipe, which comes with the launcher's end however it ends. One that ends in order kills this.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

_TRIES = 20  # a process that is being killed may still make a file


def main() -> None:
    folder = sys.argv[1]
    while os.read(0, 4096):
        pass
    pids = os.path.join(folder, "pids")
    for name in os.listdir(pids) if os.path.isdir(pids) else ():
        try:
            os.killpg(int(name), signal.SIGKILL)  # each rank leads a session of its own
        except (ProcessLookupError, PermissionError):
            continue
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.1)


if __name__ == "__main__":
    main()
