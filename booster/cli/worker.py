"""What the launcher runs as a file, so it imports nothing of booster: one rank's script, and the guard of one attempt.

`python -u worker.py script.py args` behaves like `python -u script.py args` and `python -u worker.py -m module args`
like `python -u -m module args`, except that an uncaught exception is also written to the file that torchrun's agent
names in TORCHELASTIC_ERROR_FILE, and an exit status other than 0 too. That file is how the launcher knows the first failure
and can show it last. On Linux the rank ends with its launcher, however that ends.

`python worker.py --guard FOLDER` waits for the end of its standard input, a pipe from the launcher, which comes however the
launcher ends; then it ends what a killed launcher leaves: the ranks, all that they have started, and the folder of the attempt.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import shutil
import signal
import sys
import threading
import time
import traceback

# How process groups say that another process is gone.
_CUT_OFF = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")

_ADVICE = (
    "Another rank had left the job when this one wanted to exchange data with it. If none failed, one ended its loop earlier: "
    "all ranks need equally many batches and steps. b.prepare_dataloader sees to that, drop_last=True in loaders of "
    "your own; a rank must not leave a loop by a condition that others do not meet."
)

_ON_SHARDS = (
    "Weights that ranks divide are DTensors, each rank's shard, outside of the forward of their module, and this code brought "
    "one together with a plain tensor. docs/guides/averages.md has averages and copies of weights that work on every plugin."
)

_TRIES = 20  # a process that is being killed may still make a file


def main() -> None:
    if sys.argv[1] == "--guard":
        return _guard(sys.argv[2])
    if sys.platform == "linux":
        # Have the kernel kill this process when the launcher dies, which a launcher that is killed cannot do.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    folder = os.environ.pop("BOOSTER_RUN_PIDS", None)
    if folder is not None:  # so that the launcher can see when this process dies
        with open(os.path.join(folder, str(os.getpid())), "x"):
            pass
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
        _end_well()
    except SystemExit as exit_request:
        if exit_request.code in (None, 0):
            _end_well()
        elif isinstance(exit_request.code, int):
            _record("SystemExit", "", exit_request.code)
        else:
            _record("SystemExit", f"SystemExit: {exit_request.code}\n")
        raise
    except BaseException as error:
        own = error.__traceback__
        launcher_files = {__file__, "<frozen runpy>", runpy.__file__}
        while own is not None and own.tb_frame.f_code.co_filename in launcher_files:
            own = own.tb_next
        error.__traceback__ = own
        interrupted = isinstance(error, KeyboardInterrupt)
        if not interrupted:  # Ctrl-C comes from the launcher, which knows
            is_cut_off = any(text in str(error) for text in _CUT_OFF)
            on_shards = f"{_ON_SHARDS}\n" if "mixed torch.Tensor and DTensor" in str(error) else ""
            advice = f"{_ADVICE}\n" if is_cut_off else on_shards
            callstack = "".join(traceback.format_exception(type(error), error, own))
            _record(f"{type(error).__name__}: {error}", callstack + advice, is_cut_off=is_cut_off)
        # What the interpreter does with an uncaught exception, without the frames above the script.
        sys.excepthook(type(error), error, own)
        sys.exit(130 if interrupted else 1)


def _guard(folder: str) -> None:
    while os.read(0, 4096):
        pass
    pids = os.path.join(folder, "pids")
    for name in os.listdir(pids) if os.path.isdir(pids) else ():
        try:
            os.killpg(int(name), signal.SIGKILL)  # each rank leads its own session
        except (ProcessLookupError, PermissionError):
            continue
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.1)


def _end_well() -> None:
    """Note that the script has come to its end, should the launcher stop this process before that is through, and close up."""
    _record("", "", 0)
    distributed = sys.modules.get("torch.distributed")
    # A process group that the script left open. The script's own threads end first, as they would before the interpreter does:
    # they may be using it, as one that writes a checkpoint does. The group's threads may still be giving back tensors, which
    # needs the interpreter; if they meet its shutdown, the process aborts ("terminate called without an active exception").
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        gc.collect()  # as DistCoordinator.destroy
        distributed.destroy_process_group()


def _record(message: str, text: str, status: int = 1, *, is_cut_off: bool = False) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    # torchrun's own format, whole seconds included; ranks often fail within one second, hence the nanoseconds.
    extra = {
        "py_callstack": text,
        "timestamp": str(int(time.time())),
        "timestamp_ns": time.time_ns(),
        "status": status,
        "is_cut_off": is_cut_off,
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)


if __name__ == "__main__":
    main()
