"""What saving and loading a run costs: `torch.save`, `torch.distributed.checkpoint` and booster, of one state.

    python -m benchmarks.checkpoint [--megabytes 500] [--rounds 7] [--ranks 2] [--plugin fsdp] [--cold] [--folder DIR]
    python -m benchmarks.checkpoint --weights

Linear layers of width 1024 in float32 with AdamW, so 12 bytes a parameter. Every save ends with the bytes on the
disk: `torch.save` is followed by fsync, the file-system writer of DCP syncs its files. Every load ends with the state
in model and optimizer. Files are read from the system's cache, by all alike; with `--cold` from the disk, by all alike.
Wall time, and the CPU time of this process, which other jobs on the machine disturb less; interleaved in shuffled
order, a ratio is the median over rounds of that within a round. "again" is the A/A control. safetensors and Accelerate are
timed where they are installed: the first copies all tensors of a mapped file, the second is save_state and load_state.
`--ranks` times the same on so many gloo ranks under TorchDDPPlugin, where torch.save is called on rank 0 alone. `--plugin` has
another placement there, and `--saved-under` another one for what is loaded; DCP alone is beside it then, of the same tensors:
the parts of weights and states that a rank holds. `--weights` has files of weights alone, in four files each, as other programs
write and read them. Peak memory is what a call allocates beyond what was there, watched from another process.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import importlib.util
import json
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
from booster import Booster, load_weights
from booster.plugin import LowLevelZeroPlugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin

WIDTH = 1024
PLUGINS = {"ddp": TorchDDPPlugin, "zero1": functools.partial(LowLevelZeroPlugin, stage=1), "fsdp": TorchFSDPPlugin}


class Run:
    """One rank's model, optimizer and ways to keep them."""

    def __init__(self, megabytes: int, root: Path, plugin: str) -> None:
        model = layers_of(megabytes)
        optimizer = torch.optim.AdamW(model.parameters())
        self.several, self.plugin = dist.is_initialized(), plugin
        self.booster = Booster(plugin=PLUGINS[plugin]() if self.several else SingleDevice())
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        self.plain_model, self.plain_optimizer = model, self.optimizer.unwrap()
        self.booster.backward(self.model(torch.randn(2, WIDTH)).square().mean(), self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.root = root
        self._made: Any = None
        self.first = not self.several or dist.get_rank() == 0

    def num_bytes(self) -> int:
        """Of what this rank holds."""
        return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        state = self._state()
        states = state["optimizer"]["state"].values()
        return [*state["model"].values(), *(value for own in states for value in own.values())]

    def _state(self) -> dict[str, Any]:
        model = self.plain_model.state_dict()
        if self.plugin == "fsdp" and self.several:
            # By name, and as parts of whole tensors.
            states = self.optimizer.state_dict()["state"]
            return {"model": model, "optimizer": {"state": dict(zip(model, states.values(), strict=True))}}
        if self.plugin == "zero1" and self.several:
            # What this rank holds of the states, under its own names: DCP knows no parts of flat buckets.
            states = self.plain_optimizer.state.values()
            return {"model": model, "optimizer": {"state": {f"{dist.get_rank()} {n}": s for n, s in enumerate(states)}}}
        states = self.plain_optimizer.state_dict()
        if self.several:
            states = {**states, "state": dict(zip(model, states["state"].values(), strict=True))}
        return {"model": model, "optimizer": states}

    def _shared_state(self) -> dict[str, Any]:
        """What DCP keeps: weights and states, of names that every placement has."""
        state = self._state()
        return {"model": state["model"], "states": state["optimizer"]["state"]}

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
            dcp.save(
                self._shared_state(), storage_writer=dcp.FileSystemWriter(self.root / "dcp"), no_dist=not self.several
            )

    def booster_save(self) -> None:
        self.booster.save(self.root / "booster", self.model, self.optimizer, step=1)

    # ------------------------------------------------------------------ loading

    def torch_load(self) -> None:
        state = torch.load(self.root / "plain.pt", weights_only=True)
        self.plain_model.load_state_dict(state["model"])
        own = dict(enumerate(state["optimizer"]["state"].values()))
        self.plain_optimizer.load_state_dict({**state["optimizer"], "state": own})

    def dcp_load(self) -> None:
        state = self._shared_state()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, storage_reader=dcp.FileSystemReader(self.root / "dcp"), no_dist=not self.several)

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


def layers_of(megabytes: int, *, bytes_each: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    layers = max(1, round(megabytes * 2**20 / (bytes_each * WIDTH * (WIDTH + 1))))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


class Weights:
    """A model's weights alone, in four files, and the ways of other programs to write and read them."""

    several, first = False, True

    def __init__(self, megabytes: int, root: Path) -> None:
        self.root, self.model = root, layers_of(megabytes, bytes_each=4)
        self.booster = Booster(plugin=SingleDevice())
        self.boosted, *_ = self.booster.boost(self.model)
        self.most = max(1, megabytes // 4 + 1)  # of a file
        for folder in ("torch", "safetensors", "accelerate"):
            (root / folder).mkdir()

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.model.state_dict().values())

    def meet(self) -> None:
        pass

    def after_async(self) -> None:
        pass

    def _parts(self, folder: str, ending: str) -> dict[Path, list[str]]:
        names = list(self.model.state_dict())
        size = -(-len(names) // 4)
        parts = {f"{n}{ending}": names[n * size : (n + 1) * size] for n in range(4)}
        index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
        stem = "pytorch_model" if ending == ".bin" else "model"
        (self.root / folder / f"{stem}{ending}.index.json").write_text(json.dumps(index))
        return {self.root / folder / file: own for file, own in parts.items()}

    def torch_save(self) -> None:
        state = self.model.state_dict()
        for file, names in self._parts("torch", ".bin").items():
            torch.save({name: state[name] for name in names}, file)
            sync(file)

    def safetensors_save(self) -> None:
        from safetensors.torch import save_file

        state = self.model.state_dict()
        for file, names in self._parts("safetensors", ".safetensors").items():
            save_file({name: state[name] for name in names}, file, {"format": "pt"})
            sync(file)

    def accelerate_save(self) -> None:
        from accelerate import Accelerator

        Accelerator(cpu=True).save_model(self.model, str(self.root / "accelerate"), max_shard_size=f"{self.most}MB")
        for file in (self.root / "accelerate").iterdir():
            sync(file)

    def booster_save(self) -> None:
        self.booster.save_model(self.boosted, self.root / "booster", shard=True, size_per_shard=self.most)

    def torch_load(self, *, mmap: bool = False) -> None:
        for file in (self.root / "torch").glob("*.bin"):
            self.model.load_state_dict(torch.load(file, weights_only=True, mmap=mmap), strict=False)

    def safetensors_load(self) -> None:
        from safetensors.torch import load_file

        for file in (self.root / "safetensors").glob("*.safetensors"):
            self.model.load_state_dict(load_file(file), strict=False)

    def accelerate_load(self) -> None:
        from accelerate import load_checkpoint_in_model

        load_checkpoint_in_model(self.model, str(self.root / "accelerate"))

    def load_model(self, folder: str) -> None:
        self.booster.load_model(self.boosted, self.root / folder)

    def load_weights(self) -> None:
        load_weights(self.model, self.root / "safetensors")

    def dcp_save(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(self.model.state_dict(), storage_writer=dcp.FileSystemWriter(self.root / "dcp"), no_dist=True)

    def dcp_load(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(self.model.state_dict(), storage_reader=dcp.FileSystemReader(self.root / "dcp"), no_dist=True)

    def ways(self) -> tuple[dict[str, Callable[[], None]], dict[str, Callable[[], None]]]:
        saves: dict[str, Callable[[], None]] = {"torch.save + fsync": self.torch_save, "DCP": self.dcp_save}
        saves |= {"safetensors + fsync": self.safetensors_save, "`b.save_model`": self.booster_save}
        loads = {
            "`torch.load`": self.torch_load,
            "`torch.load(mmap=True)`": functools.partial(self.torch_load, mmap=True),
            "DCP": self.dcp_load,
            "DCP again": self.dcp_load,
            "safetensors `load_file`": self.safetensors_load,
            "`b.load_model` of safetensors": functools.partial(self.load_model, "safetensors"),
            "`b.load_model` of `torch.save`": functools.partial(self.load_model, "torch"),
            "`load_weights`": self.load_weights,
        }
        if importlib.util.find_spec("accelerate") is not None:
            saves["Accelerate `save_model` + fsync"] = self.accelerate_save
            loads["Accelerate `load_checkpoint_in_model`"] = self.accelerate_load
        return saves, loads


def sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def timed(
    run: Run | Weights, variants: dict[str, Callable[[], None]], rounds: int, *, cold: bool
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


def peak(call: Callable[[], None], run: Run | Weights) -> int:
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


Ways = dict[str, Callable[[], None]]


def ways_of(run: Run, ranks: int, *, with_dcp_alone: bool) -> tuple[Ways, Ways, Ways]:
    """What is timed of a run: saves, loads, and what blocks training."""
    saves: Ways = {"DCP": run.dcp_save, "booster": run.booster_save}
    loads: Ways = {"DCP": run.dcp_load, "DCP again": run.dcp_load, "booster": run.booster_load}
    if with_dcp_alone:
        return saves, loads, {}
    saves = {"torch.save + fsync": run.torch_save, "torch.save again": run.torch_save} | saves
    loads = {
        "torch.load": run.torch_load,
        "torch.load again": run.torch_load,
        "torch.load(mmap=True), copied": run.mapped_load,
    } | loads
    if ranks == 1:
        for package, name in (("safetensors", "safetensors"), ("accelerate", "Accelerate")):
            if importlib.util.find_spec(package) is not None:
                saves[name], loads[name] = getattr(run, f"{package}_save"), getattr(run, f"{package}_load")
    return saves, loads, {"a copy of the state": run.copy, "again": run.copy, "booster, async_save": run.booster_async}


def measure(rank: int, args: argparse.Namespace, root: str) -> None:
    torch.set_num_threads(1)
    if args.ranks > 1:
        store = dist.FileStore(f"{root}/store", args.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
    run: Run | Weights
    if args.weights:
        run = Weights(args.megabytes, Path(root))
        saves, loads = run.ways()
        blocking: dict[str, Callable[[], None]] = {}
    else:
        run = Run(args.megabytes, Path(root), args.plugin)
        moved = args.saved_under not in (None, args.plugin)
        saves, loads, blocking = ways_of(run, args.ranks, with_dcp_alone=moved or args.plugin != "ddp")
        if moved:
            other = Run(args.megabytes, Path(root), args.saved_under)
            other.dcp_save()
            other.booster_save()
            saves = {}
            if "zero1" in (args.plugin, args.saved_under):  # names that DCP has for one rank alone
                loads = {"booster": loads["booster"]}
            del other
            gc.collect()
    size = run.num_bytes()
    if run.first:
        state = "from the disk" if args.cold else "from the system's cache"
        place = f" under {args.plugin}, saved under {args.saved_under or args.plugin}" if args.ranks > 1 else ""
        what = f"{size / 2**20:.0f} MB a rank, {args.ranks} rank(s){place}, {args.rounds} rounds, read {state}"
        print(f"{what}; {describe_machine()}")
        print(f"load of the machine before: {os.getloadavg()[0]:.1f}\n")
        print(
            "| | wall s | CPU s | wall: ratio to the first | to DCP | CPU: to the first | to DCP | extra memory, of the state "
            "| in MiB |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
    for kind, variants in (("save", saves), ("load", loads), ("blocks for", blocking)):
        seconds = timed(run, variants, args.rounds, cold=args.cold and kind == "load")
        for name, own in seconds.items():
            # Both measurements are collectives, so every rank makes them.
            extra = peak(variants[name], run)
            cells = [statistics.median(took[clock] for took in own) for clock in (0, 1)]
            base = next(iter(seconds))
            for clock in (0, 1):
                for of in (base, "DCP"):
                    pairs = zip(own, seconds.get(of, []), strict=of in seconds)
                    cells.append(statistics.median([a[clock] / b[clock] for a, b in pairs] or [float("nan")]))
            if run.first:
                texts = ["" if value != value else f"{value:.2f}" for value in [*cells, extra / size]]
                print(f"| {kind}: {name} | {' | '.join(texts)} | {extra / 2**20:.0f} |", flush=True)
    if run.first:
        print(f"\nload of the machine after: {os.getloadavg()[0]:.1f}")
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--plugin", choices=PLUGINS, default="ddp", help="with --ranks: the placement")
    parser.add_argument("--saved-under", choices=PLUGINS, help="the placement of what is loaded (default: the same)")
    parser.add_argument("--weights", action="store_true", help="files of weights alone, on one rank")
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
