"""Run one rank's script and record the exception that ends it. Executed as a file: it imports nothing of booster.

`python -u worker.py script.py args` behaves like `python -u script.py args` and `python -u worker.py -m module args`
like `python -u -m module args`, except that an uncaught exception is also written to the file that torchrun's agent
names in TORCHELASTIC_ERROR_FILE. That file is how the launcher knows the first failure and can show it last.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import threading
import time
import traceback
from types import TracebackType


def main() -> None:
    arguments = sys.argv[1:]
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path[0] = os.getcwd()
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
        _leave_process_group()
    except SystemExit as exit_request:
        if exit_request.code in (None, 0):
            _leave_process_group()
        if exit_request.code is not None and not isinstance(exit_request.code, int):
            _record("SystemExit", f"SystemExit: {exit_request.code}\n")
        raise
    except BaseException as error:
        own = _without_launcher_frames(error.__traceback__)
        error.__traceback__ = own
        interrupted = isinstance(error, KeyboardInterrupt)
        if not interrupted:  # Ctrl-C comes from the launcher, which knows
            _record(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(type(error), error, own)))
        # What the interpreter does with an uncaught exception, without the frames above the script.
        sys.excepthook(type(error), error, own)
        sys.exit(130 if interrupted else 1)


def _leave_process_group() -> None:
    """Close a process group that the script left open.

    The script's own threads end first, as they would before the interpreter does: they may be using it, as one that writes
    a checkpoint does. The group's threads may still be giving back tensors, which needs the interpreter; if they meet its
    shutdown, the process aborts ("terminate called without an active exception") after all work is done.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        gc.collect()  # as DistCoordinator.destroy
        distributed.destroy_process_group()


def _without_launcher_frames(trace: TracebackType | None) -> TracebackType | None:
    launcher_files = {__file__, "<frozen runpy>", runpy.__file__}
    while trace is not None and trace.tb_frame.f_code.co_filename in launcher_files:
        trace = trace.tb_next
    return trace


def _record(message: str, text: str) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    # torchrun's own format, whole seconds included; ranks often fail within one second, hence the nanoseconds.
    extra = {"py_callstack": text, "timestamp": str(int(time.time())), "timestamp_ns": time.time_ns()}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)


if __name__ == "__main__":
    main()
