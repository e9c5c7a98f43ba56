"""What saving and loading a run costs: `torch.save`, `torch.distributed.checkpoint` and booster, of one state.

    python -m benchmarks.checkpoint [--megabytes 500] [--rounds 7] [--ranks 2] [--cold] [--folder DIR]

Linear layers of width 1024 in float32 with AdamW, so 12 bytes a parameter. Every save ends with the bytes on the
disk: `torch.save` is followed by fsync, the file-system writer of DCP syncs its files. Every load ends with the state
in model and optimizer. Files are read from the system's cache, by all alike; with `--cold` from the disk, by all alike.
Wall time, and the CPU time of this process, which other jobs on the machine disturb less; interleaved in shuffled
order, a ratio is the median over rounds of that within a round. "again" is the A/A control. safetensors and Accelerate are
timed where they are installed: the first copies all tensors of a mapped file, the second is save_state and load_state.
`--ranks` times the same on so many gloo ranks under TorchDDPPlugin, where torch.save is called on rank 0 alone. Peak memory
is what a call allocates beyond what was there, watched from another process.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from benchmarks.timing import describe_machine
from booster import Booster
from booster.plugin import LowLevelZeroPlugin, SingleDevice, TorchDDPPlugin

WIDTH = 1024


class Run:
    """One rank's model, optimizer and ways to keep them."""

    def __init__(self, megabytes: int, root: Path, *, zero: bool) -> None:
        torch.manual_seed(0)
        layers = max(1, round(megabytes * 2**20 / (12 * WIDTH * (WIDTH + 1))))
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters())
        self.several = dist.is_initialized()
        several = LowLevelZeroPlugin(stage=1) if zero else TorchDDPPlugin()
        self.booster = Booster(plugin=several if self.several else SingleDevice())
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        self.plain_model, self.plain_optimizer = model, self.optimizer.unwrap()
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.root = root
        self._made: Any = None
        self.first = not self.several or dist.get_rank() == 0

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        states = self.plain_optimizer.state.values()
        return [*self.plain_model.state_dict().values(), *(value for own in states for value in own.values())]

    def _state(self) -> dict[str, Any]:
        return {"model": self.plain_model.state_dict(), "optimizer": self.plain_optimizer.state_dict()}

    # ------------------------------------------------------------------ saving

    def torch_save(self) -> None:
        if self.first:
            with (self.root / "plain.pt").open("wb") as file:
                torch.save(self._state(), file)
                file.flush()
                os.fsync(file.fileno())
        self.meet()

    def dcp_save(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(self._state(), storage_writer=dcp.FileSystemWriter(self.root / "dcp"), no_dist=not self.several)

    def booster_save(self) -> None:
        self.booster.save(self.root / "booster", self.model, self.optimizer, step=1)

    # ------------------------------------------------------------------ loading

    def torch_load(self) -> None:
        state = torch.load(self.root / "plain.pt", weights_only=True)
        self.plain_model.load_state_dict(state["model"])
        self.plain_optimizer.load_state_dict(state["optimizer"])

    def dcp_load(self) -> None:
        state = self._state()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, storage_reader=dcp.FileSystemReader(self.root / "dcp"), no_dist=not self.several)
        self.plain_model.load_state_dict(state["model"])
        self.plain_optimizer.load_state_dict(state["optimizer"])

    def mapped_load(self) -> None:
        state = torch.load(self.root / "plain.pt", weights_only=True, mmap=True)
        self._copy_from(state["model"], state["optimizer"]["state"])

    def safetensors_save(self) -> None:
        from safetensors.torch import save_file

        if self.first:
            save_file(self._flat(), self.root / "flat.safetensors")
            with (self.root / "flat.safetensors").open("rb+") as file:
                os.fsync(file.fileno())
        self.meet()

    def safetensors_load(self) -> None:
        from safetensors import safe_open

        with torch.no_grad(), safe_open(self.root / "flat.safetensors", "pt") as file:
            for name, tensor in self._flat().items():
                tensor.copy_(file.get_tensor(name))

    def accelerate_save(self) -> None:
        self._accelerator().save_state(str(self.root / "accelerate"))

    def accelerate_load(self) -> None:
        self._accelerator().load_state(str(self.root / "accelerate"))

    def _accelerator(self) -> Any:
        if self._made is None:
            from accelerate import Accelerator

            self._made = Accelerator(cpu=True)
            self._made.prepare(self.plain_model, self.plain_optimizer)
        return self._made

    def _flat(self) -> dict[str, torch.Tensor]:
        state = self._state()
        states = state["optimizer"]["state"].items()
        own = {f"{number}/{key}": value for number, held in states for key, value in held.items()}
        return {**state["model"], **own}

    @torch.no_grad()
    def _copy_from(self, model: dict[str, Any], states: dict[int, Any]) -> None:
        here = self._state()
        for name, tensor in here["model"].items():
            tensor.copy_(model[name])
        for number, own in here["optimizer"]["state"].items():
            for key, tensor in own.items():
                tensor.copy_(states[number][key])

    def booster_load(self) -> None:
        self.booster.load(self.root / "booster", self.model, self.optimizer)

    # ------------------------------------------------------------------ saving in the background

    def copy(self) -> None:
        self._copies = [tensor.clone() for tensor in self._tensors()]

    def booster_async(self) -> None:
        self.booster.save(self.root / "async", self.model, self.optimizer, step=1, async_save=True)

    def after_async(self) -> None:
        """What is not timed after a call: the end of the writing, and memory given back."""
        self._copies = []
        self.booster.wait_for_save()
        self.meet()

    def meet(self) -> None:
        if self.several:
            dist.barrier()


def timed(
    run: Run, variants: dict[str, Callable[[], None]], rounds: int, *, cold: bool
) -> dict[str, list[tuple[float, float]]]:
    """(wall seconds, CPU seconds) of each variant, `rounds` times; of the slowest rank. cold: no file is in memory."""
    order = random.Random(0)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for index in range(rounds + 1):
        for name in order.sample(list(variants), len(variants)):
            run.meet()
            os.sync()
            if cold:
                forget_files(run.root)
                run.meet()
            ctypes.CDLL(None).malloc_trim(0)  # so that each pays for the memory that it takes, as a first call does
            start, start_cpu = time.perf_counter(), time.process_time()
            variants[name]()
            took = torch.tensor([time.perf_counter() - start, time.process_time() - start_cpu], dtype=torch.float64)
            run.after_async()
            if run.several:
                dist.all_reduce(took, dist.ReduceOp.MAX)
            if index:  # the first makes files and folders
                seconds[name].append((float(took[0]), float(took[1])))
    return seconds


def forget_files(root: Path) -> None:
    """Have the system drop from its cache what lies below `root`; it must be on the disk already."""
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# Anonymous memory: pages of mapped files are the system's cache, and count for nobody.
_WATCH = """
import select, sys
highest = 0
while not select.select([sys.stdin], [], [], 0.001)[0]:
    with open("/proc/{pid}/status") as file:
        highest = max(highest, next(int(line.split()[1]) for line in file if line.startswith("RssAnon")))
print(highest)
"""


def peak(call: Callable[[], None], run: Run) -> int:
    """Bytes of memory that `call` needs at most, beyond what is there before; of this rank."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what earlier calls have freed serves this one
    before = resident()
    command = [sys.executable, "-S", "-c", _WATCH.format(pid=os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        time.sleep(0.2)  # until it watches
        call()
        run.after_async()
        highest = int(watcher.communicate("done")[0])
    return max(0, highest * 1024 - before)


def resident() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def measure(rank: int, args: argparse.Namespace, root: str) -> None:
    torch.set_num_threads(1)
    if args.ranks > 1:
        store = dist.FileStore(f"{root}/store", args.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
    run = Run(args.megabytes, Path(root), zero=args.zero)
    saves = {
        "torch.save + fsync": run.torch_save,
        "torch.save again": run.torch_save,
        "DCP": run.dcp_save,
        "booster": run.booster_save,
    }
    loads = {
        "torch.load": run.torch_load,
        "torch.load again": run.torch_load,
        "torch.load(mmap=True), copied": run.mapped_load,
        "DCP": run.dcp_load,
        "DCP again": run.dcp_load,
        "booster": run.booster_load,
    }
    if args.ranks == 1:
        for package in ("safetensors", "accelerate"):
            if importlib.util.find_spec(package) is not None:
                name = {"safetensors": "safetensors", "accelerate": "Accelerate"}[package]
                saves[name], loads[name] = getattr(run, f"{package}_save"), getattr(run, f"{package}_load")
    blocking = {"a copy of the state": run.copy, "again": run.copy, "booster, async_save": run.booster_async}
    if args.zero:
        saves, loads, blocking = {"booster": run.booster_save}, {"booster": run.booster_load}, {}
    size = run.num_bytes()
    if run.first:
        state = "from the disk" if args.cold else "from the system's cache"
        print(f"{size / 2**20:.0f} MB, {args.ranks} rank(s), {args.rounds} rounds, read {state}; {describe_machine()}")
        print(f"load of the machine before: {os.getloadavg()[0]:.1f}\n")
        print(
            "| | wall s | CPU s | wall: ratio to the first | to DCP | CPU: to the first | to DCP | extra memory, of the state |"
        )
        print("|---|---|---|---|---|---|---|---|")
    for kind, variants in (("save", saves), ("load", loads), ("blocks for", blocking)):
        seconds = timed(run, variants, args.rounds, cold=args.cold and kind == "load")
        for name, own in seconds.items():
            # Both measurements are collectives, so every rank makes them.
            share = peak(variants[name], run) / size
            cells = [statistics.median(took[clock] for took in own) for clock in (0, 1)]
            base = next(iter(seconds))
            for clock in (0, 1):
                for of in (base, "DCP"):
                    pairs = zip(own, seconds.get(of, []), strict=of in seconds)
                    cells.append(statistics.median([a[clock] / b[clock] for a, b in pairs] or [float("nan")]))
            if run.first:
                texts = ["" if value != value else f"{value:.2f}" for value in [*cells, share]]
                print(f"| {kind}: {name} | {' | '.join(texts)} |", flush=True)
    if run.first:
        print(f"\nload of the machine after: {os.getloadavg()[0]:.1f}")
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--zero", action="store_true", help="with --ranks: LowLevelZeroPlugin, booster alone")
    parser.add_argument("--cold", action="store_true", help="drop the files from the system's cache before each load")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    args = parser.parse_args()
    root = tempfile.mkdtemp(prefix="checkpoint_", dir=args.folder)
    try:
        if args.ranks > 1:
            torch.multiprocessing.spawn(measure, (args, root), nprocs=args.ranks)
        else:
            measure(0, args, root)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
