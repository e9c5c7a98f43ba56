"""The table of docs/reference/optimizers.md: whose optimizers train, resume and are freed under which precision and placement.

    python tests/support/optimizer_table.py            # every row whose package is installed
    python tests/support/optimizer_table.py timm torch # rows of these packages
    python tests/support/optimizer_table.py --rest     # what was not tried yet, as after a run that was ended
    python tests/support/optimizer_table.py --page     # the page alone, of the cells that are known

A row is a line of ROWS. Each cell boosts a small model, trains it, saves it half way, resumes, and deletes it. Ranks are two
processes that this program starts; a cell that ends or stops them is told so, and the next begins with new ones. What is found
goes into CELLS as it comes, of which the page is made.
"""

import contextlib
import copy
import gc
import importlib
import importlib.metadata
import io
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
import warnings
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import booster
from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.plugin import LowLevelZeroPlugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "optimizers.md"
CELLS = Path(__file__).parents[1] / "data" / "optimizer_table.json"
STEPS, HALF = 6, 3
SCALE = 2.0**8
PRECISIONS = {
    "fp32": lambda: "fp32",
    "bf16": lambda: "bf16",
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=SCALE),
    "bf16_naive": BF16NaiveMixedPrecision,
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=SCALE),
    "8-bit states": lambda: BF16NaiveMixedPrecision(states="8bit"),
}
PLACEMENTS = {
    "one device": SingleDevice,
    "ZeRO-1": lambda: LowLevelZeroPlugin(stage=1),
    "FSDP": TorchFSDPPlugin,
    "DDP": TorchDDPPlugin,
    "ZeRO-2": lambda: LowLevelZeroPlugin(stage=2),
}
PAGED = ("one device", "ZeRO-1", "FSDP")
RESUMED = ("fp32", "bf16_naive", "8-bit states")
# How far from float32's a run ends, as a share of the way: in float32 what sums in another order make of signs and square
# roots of small gradients; in half twice what a loop of plain torch ends off, and this much besides.
FLOAT32, BESIDE = 0.02, 0.05
# A step between codes of a packed state, as a share of the root mean square of a group of 32, of which the largest is at most
# sqrt(32) of it: 2 sqrt(x s) / 127 of a signed state x with the scale s, and s / 127 of a ratio. An unsigned state is divided
# by as its root, so that half its step counts: 5826 (2 c + 17) / 2**24 of it, with the code c of 1e-4 of the largest, 131; 2 %
# of squares of random numbers are less.
CODE_STEPS = {"signed": 2 * 32**0.25 / 127, "unsigned": 5826 * (2 * 131 + 17) / 2**24}
RATIO_STEP = 32**0.5 / 127


class Row(NamedTuple):
    """An optimizer. package: as pip knows it. path: module and class. options: of the constructor. modes: it has `train()` and
    `eval()`. closure: `step` wants one."""

    package: str
    path: str
    options: dict[str, Any] = {}  # noqa: RUF012
    modes: bool = False
    closure: bool = False
    kind: str = "optimizer"

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        module, _, name = self.path.rpartition(".")
        made = getattr(importlib.import_module(module), name)
        params: Any = list(model.parameters())
        if self.options.get("_matrices"):
            params = [param for param in params if param.dim() == 2]
        if self.options.get("_muon"):
            params = [
                {"params": [param for param in params if (param.dim() == 2) is of], "use_muon": of}
                for of in (True, False)
            ]
        return made(params, **{key: value for key, value in self.options.items() if not key.startswith("_")})


def rows_of(package: str, module: str, names: str, **options: Any) -> list[Row]:
    return [Row(package, f"{module}.{name}", {"lr": 1e-3, **options}) for name in names.split()]


EMA = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
MATRICES = {"lr": 1e-2, "_matrices": True}
ROWS = [
    *rows_of("torch", "torch.optim", "Adam AdamW Adamax NAdam RAdam Adagrad RMSprop Rprop ASGD Adafactor"),
    Row("torch", "torch.optim.SGD", {"lr": 0.02, "momentum": 0.9}),
    Row("torch", "torch.optim.Adadelta", {"lr": 0.5}),
    Row("torch", "torch.optim.Muon", MATRICES),
    Row("torch", "torch.optim.LBFGS", {"lr": 0.1}, closure=True),
    *rows_of(
        "timm",
        "timm.optim",
        "AdaBelief AdafactorBigVision AdamP Adan Adopt LaProp Lamb Lars Lion MADGRAD Mars NAdamW NvNovoGrad RMSpropTF SGDP "
        "SGDW",
    ),
    Row("timm", "timm.optim.Muon", {"lr": 1e-3}),
    *rows_of(
        "pytorch_optimizer",
        "pytorch_optimizer",
        "ADOPT AdEMAMix AdaBelief AdaBound AdaMod AdaNorm AdaPNM Adai Adalite AdamP AdamS Adan AggMo Amos CAME "
        "DiffGrad FAdam Fromage Grams Kate LaProp Lamb Lion MADGRAD MARS NovoGrad QHAdam SM3 SOAP ScalableShampoo SignSGD "
        "StableAdamW Tiger Yogi",
    ),
    Row("pytorch_optimizer", "pytorch_optimizer.Prodigy", {"lr": 1.0}),
    Row("pytorch_optimizer", "pytorch_optimizer.Muon", {"lr": 1e-2, "_muon": True}),
    Row("pytorch_optimizer", "pytorch_optimizer.ScheduleFreeAdamW", {"lr": 1e-3}, modes=True),
    *rows_of("torch-optimi", "optimi", "Adam AdamW Adan Lion RAdam Ranger SGD"),
    Row("torch-optimi", "optimi.StableAdamW", {"lr": 1e-3, "triton": False}),
    *rows_of("bitsandbytes", "bitsandbytes.optim", "Adam8bit AdamW8bit AdamW32bit Lion8bit AdEMAMix8bit"),
    *rows_of("torchao", "torchao.optim", "AdamW8bit AdamW4bit AdamWFp8"),
    Row("schedulefree", "schedulefree.AdamWScheduleFree", {"lr": 1e-2}, modes=True),
    Row("schedulefree", "schedulefree.SGDScheduleFree", {"lr": 1e-2}, modes=True),
    Row("prodigyopt", "prodigyopt.Prodigy", {"lr": 1.0}),
    *rows_of("lion-pytorch", "lion_pytorch", "Lion"),
    *rows_of("adan-pytorch", "adan_pytorch", "Adan"),
    *rows_of("came-pytorch", "came_pytorch", "CAME"),
    *rows_of("galore-torch", "galore_torch", "GaLoreAdamW"),
    *rows_of("galore-torch", "galore_torch", "GaLoreAdafactor", relative_step=False, scale_parameter=False),
    *rows_of("apollo-torch", "apollo_torch", "APOLLOAdamW"),  # not for commercial use, so that no extra installs it
    Row("muon-optimizer", "muon.SingleDeviceMuon", MATRICES),
    *rows_of("kron-torch", "kron_torch", "Kron"),
    *(Row("dadaptation", f"dadaptation.{name}", {"lr": 1.0}) for name in ("DAdaptAdam", "DAdaptSGD", "DAdaptLion")),
    Row("torch", "torch.optim.swa_utils.AveragedModel", {"multi_avg_fn": EMA}, kind="average"),
    Row("timm", "timm.utils.ModelEmaV2", {"decay": 0.9}, kind="average"),
    Row("timm", "timm.utils.ModelEmaV3", {"decay": 0.9}, kind="average"),
    Row("torch-ema", "torch_ema.ExponentialMovingAverage", {"decay": 0.9, "use_num_updates": False}, kind="average"),
    Row("ema-pytorch", "ema_pytorch.EMA", {"beta": 0.9, "update_after_step": 0, "update_every": 1}, kind="average"),
    Row("torchmetrics", "torchmetrics.MeanMetric", kind="metric"),
]  # fmt: skip


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))


BATCHES = torch.randn(STEPS, 8, 16, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, step: int, part: slice = slice(None)) -> torch.Tensor:
    x = BATCHES[step][part]
    return (model(x).float() - x[:, :8].roll(1, 1)).square().mean()


def weights(model: nn.Module) -> torch.Tensor:
    """All weights, whole, in float32."""
    params = [p.detach() for p in model.parameters()]
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in params]
    return torch.cat([each.float().flatten() for each in whole])


def packed_bound(encodings: dict[str, str], visited: list[torch.Tensor]) -> float:
    """How far rounding of states of these `encodings` moves the end of a run through the weights `visited`, as a length.

    Rounding is by chance, to one of two codes, and so has a standard deviation of half a step between codes at most. What it
    makes of a state after one step all later updates go on with: it is that share of their lengths. It is independent from step
    to step, from state to state and from element to element, so that squares add up, and the length of the sum over hundreds of
    elements is its standard deviation within a few per cent.
    """
    lengths = [float((after - before).norm()) for before, after in itertools.pairwise(visited)]
    step = math.hypot(*(CODE_STEPS.get(each, RATIO_STEP) for each in encodings.values()))
    return step / 2 * math.hypot(*(sum(lengths[after:]) for after in range(1, len(lengths))))


def plain(
    row: Row, dtype: torch.dtype | None = None, *, naive: bool = False, visited: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """Weights at the end of a loop of torch's own, in float32, under autocast, or with half weights beside float32 ones.

    visited: gets the weights at the start and after each step."""
    model = net()
    optimizer = row.make(model)
    torch.manual_seed(2)
    if row.modes:
        optimizer.train()
    visited = [] if visited is None else visited
    for step in range(STEPS):
        visited.append(weights(model))

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            if naive:
                half = copy.deepcopy(model).to(dtype)
                x = BATCHES[step]
                loss = (half(x.to(dtype)).float() - x[:, :8].roll(1, 1)).square().mean()
                (loss * SCALE).backward()
                for param, own in zip(model.parameters(), half.parameters(), strict=True):
                    param.grad = own.grad.float() / SCALE
                return loss.detach()
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = loss_of(model, step)
            loss.backward()
            return loss

        if row.closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    visited.append(weights(model))
    return visited[-1]


class Run:
    """A boosted run on this rank."""

    def __init__(self, row: Row, precision: str, placement: str) -> None:
        self.row = row
        raw = net()
        optimizer = row.make(raw)
        self.alive = {"model": weakref.ref(raw), "optimizer": weakref.ref(optimizer)}
        self.booster = Booster("cpu", PRECISIONS[precision](), PLACEMENTS[placement]())
        self.model, self.optimizer, *_ = self.booster.boost(raw, optimizer)
        torch.manual_seed(2)
        if row.modes:
            self.optimizer.train()

    def train(self, steps: range) -> None:
        size, rank = self.booster.plugin.data_parallel_size, self.booster.plugin.data_parallel_rank
        part = slice(rank * 8 // size, (rank + 1) * 8 // size)
        for step in steps:

            def closure(step: int = step) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss = loss_of(self.model, step % STEPS, part)
                self.booster.backward(loss, self.optimizer)
                return loss

            if self.row.closure:
                self.optimizer.step(closure)
            else:
                closure()
                self.optimizer.step()

    def note_alive(self) -> None:
        self.alive |= {name: weakref.ref(param) for name, param in self.model.named_parameters()}
        states = [state for state in self.optimizer.unwrap().state.values() if isinstance(state, dict)]
        for number, state in enumerate(states):
            tensors = {key: value for key, value in state.items() if type(value) is torch.Tensor}
            self.alive |= {f"state {key} {number}": weakref.ref(value) for key, value in tensors.items()}


def words(error: BaseException) -> str:
    """The first sentence of an error, without numbers of this run."""
    said = str(error).strip().splitlines() or [""]
    first = re.sub(r"/\S*/", "", said[0].split(". ")[0])
    return f"{type(error).__name__}: {first[:220]}".replace("|", "/")


def cell(row: Row, precision: str, placement: str, folder: Path) -> str:
    """ "yes", or what is not so; a refusal begins with "refused: "."""
    visited: list[torch.Tensor] = []
    try:
        reference = plain(row, visited=visited)
    except Exception as error:
        return f"does not train without this library either: {words(error)}"
    way = float((reference - weights(net())).norm())
    bound = FLOAT32
    if precision not in ("fp32", "8-bit states"):
        dtype = torch.float16 if precision.startswith("fp16") else torch.bfloat16
        by_hand = plain(row, dtype, naive=precision.endswith("_naive"))
        bound = 2.0 * float((by_hand - reference).norm()) / way + BESIDE
    rounded = 0.0
    if precision.endswith(("_naive", "states")):  # weights are read as they are, rounded
        half = torch.float16 if precision.startswith("fp16") else torch.bfloat16
        rounded = 2.0 * float((reference.to(half).float() - reference).norm()) / way
    try:
        run = Run(row, precision, placement)
        run.train(range(1))
    except Exception as error:
        return f"refused: {words(error)}"
    run.train(range(1, HALF))
    try:
        run.booster.save(folder, run.model, run.optimizer)
    except Exception as error:
        return f"not saved: {words(error)}"
    generator = torch.get_rng_state()
    run.train(range(HALF, STEPS))
    end = weights(run.model)
    if precision == "8-bit states":  # all else is as in bf16_naive
        wide = Run(row, "bf16_naive", placement)
        wide.train(range(STEPS))
        states = (own for own in run.optimizer.unwrap().state.values() if isinstance(own, dict))
        encodings = {
            name: value.encoding for own in states for name, value in own.items() if hasattr(value, "encoding")
        }
        reference, bound = weights(wide.model), packed_bound(encodings, visited) / way
        del wide
    off = float((end - reference).norm()) / way
    if not off <= bound + rounded:  # or NaN
        return f"ends {off:.0%} of the way off"
    try:
        again = Run(row, precision, placement)
        again.booster.load(folder, again.model, again.optimizer)
        torch.set_rng_state(generator)
        again.train(range(HALF, STEPS))
    except Exception as error:
        return f"does not resume: {words(error)}"
    if not torch.equal(weights(again.model), end):
        return "does not resume to the bit"
    again.note_alive()
    alive = again.alive
    del run, again
    if placement == "FSDP":  # torch's fully_shard keeps its modules in cycles
        gc.collect()
    left = sorted(name for name, ref in alive.items() if ref() is not None)
    return f"not freed: {left[0]} and {len(left) - 1} more" if left else "yes"


def resumed(row: Row, precision: str, placement: str, folder: Path) -> str:
    """ "yes" where new objects that load a checkpoint end in the same bits ten steps later, or what refuses, and where; all
    else is a fault."""
    where = "boost"
    try:
        run = Run(row, precision, placement)
        where = "its first steps"
        run.train(range(HALF))
        where = "save"
        run.booster.save(folder, run.model, run.optimizer)
    except Exception as error:
        return f"refused at {where}: {words(error)}"
    run.train(range(HALF, HALF + 10))
    try:
        again = Run(row, precision, placement)
        again.booster.load(folder, again.model, again.optimizer)
        again.train(range(HALF, HALF + 10))
    except Exception as error:
        return f"does not resume: {words(error)}"
    if not torch.equal(weights(again.model), weights(run.model)):
        return "does not resume to the bit"
    states = [_by_path(each.optimizer.state_dict()) for each in (run, again)]
    wrong = [path for path in states[0] | states[1] if not _same_bits(*(each.get(path) for each in states))]
    return f"does not resume to the bit: {wrong[0]} of the state" if wrong else "yes"


def _by_path(tree: Any, path: str = "") -> dict[str, Any]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else None
    if items is None:
        return {path: tree} if isinstance(tree, (torch.Tensor, int, float)) else {}
    return {name: leaf for key, value in items for name, leaf in _by_path(value, f"{path}/{key}").items()}


def _same_bits(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return type(one) is type(other) and (one == other or one != one)
    a, b = (getattr(each, "to_local", lambda each=each: each)() for each in (one, other))
    a, b = (each.dequantize() if hasattr(each, "dequantize") and hasattr(each, "codes") else each for each in (a, b))
    return a.dtype == b.dtype and torch.equal(a, b)


def _averaged(row: Row, model: nn.Module) -> Any:
    return list(model.parameters()) if row.package == "torch-ema" else model


def _held(row: Row, average: Any) -> torch.Tensor:
    """The averages, in one piece."""
    if row.package == "torch-ema":
        params = average.shadow_params
    else:
        inner = next(getattr(average, name) for name in ("ema_model", "module") if hasattr(average, name))
        params = list(inner.parameters())
    return torch.cat([param.detach().float().flatten() for param in params])


def beside_cell(row: Row, precision: str) -> str:
    """The same of an average of the weights, made after boost, or of a metric that is a part of the model."""
    raw = net()
    module, _, name = row.path.rpartition(".")
    made = getattr(importlib.import_module(module), name)
    try:
        if row.kind == "metric":
            raw.metric = made()
        booster_ = Booster("cpu", PRECISIONS[precision]())
        model, optimizer, *_ = booster_.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.2))
        if row.kind == "metric":
            for _ in range(300):
                model.metric.update(torch.tensor(1.001))
            found = float(model.metric.compute())
            return "yes" if abs(found - 1.001) < 1e-4 else f"{found:.4f} where the mean of 300 times 1.001 is asked for"
        twin = net()  # has the weights that the model has, in float32
        averages = [(made(_averaged(row, each), **row.options), each) for each in (raw, twin)]
        start = weights(twin)
        for step in range(STEPS):
            booster_.backward(loss_of(model, step), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            nn.utils.vector_to_parameters(weights(model), twin.parameters())
            for average, of in averages:
                if hasattr(average, "update_parameters"):
                    average.update_parameters(of)
                else:
                    average.update(*([of] if row.package == "timm" else []))
        found, right = (_held(row, average) for average, _ in averages)
    except Exception as error:
        return f"refused: {words(error)}"
    off = float((found - right).norm() / (right - start).norm())
    return "yes" if off <= FLOAT32 else f"is {off:.0%} of its way off"


def quiet_cell(row: Row, *args: Any, of: Any = None) -> str:
    """What a cell is, without what packages print and warn of. of: what makes it; of the page where that is None."""
    if of is None:
        of = cell if row.kind == "optimizer" else lambda row, precision, *_: beside_cell(row, precision)
        gc.collect()
        gc.disable()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return of(row, *args)
    except Exception as error:
        return f"raises: {words(error)}"
    finally:
        gc.enable()


def work(wanted: list[tuple[int, str, str]], of: Any = None) -> None:
    """Make cells, each a line of JSON on rank 0's stdout."""
    ranks = wanted[0][2] != "one device"
    if ranks:
        booster.launch_from_torch(timeout=60)
    for number, precision, placement in wanted:
        base = [tempfile.mkdtemp()]
        if ranks:
            dist.broadcast_object_list(base)
        found = quiet_cell(ROWS[number], precision, placement, Path(base[0]) / "checkpoint", of=of)
        if ranks:
            each: list[Any] = [None] * 2
            dist.all_gather_object(each, found)
            found = next((one for one in each if one != "yes"), "yes")
        if not ranks or dist.get_rank() == 0:
            print(json.dumps([number, precision, placement, found]), flush=True)


def start(wanted: list[tuple[int, str, str]], tell: Any, option: str = "--work") -> None:
    """Make cells of one placement, in processes of their own, again where one ends them. tell: called with each, and what it
    is."""
    left = list(wanted)
    while left:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        ranks = left[0][2] != "one device"
        command = [sys.executable, *(launch if ranks else []), __file__, option, json.dumps(left)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            for line in process.stdout:
                if line.startswith("["):
                    number, precision, placement, result = json.loads(line)
                    left.remove((number, precision, placement))
                    tell((number, precision, placement), result)
        if left:
            tell(left.pop(0), "ends or stops the ranks" if ranks else "ends the process")


def version(package: str) -> str | None:
    """Return the version of `package`, without what tells its build; None where it is not installed."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def placements(row: Row) -> list[str]:
    return list(PAGED) if row.kind == "optimizer" else ["one device"]


def known() -> dict[str, Any]:
    """Return what was found: versions of packages, and by path, precision and placement what each cell is."""
    return json.loads(CELLS.read_text()) if CELLS.exists() else {"versions": {}, "cells": {}}


def key_of(row: Row, precision: str, placement: str) -> str:
    return f"{row.path} | {precision} | {placement}"


def make(packages: list[str], *, rest: bool = False) -> None:
    """Make all cells of `packages`, or of all that are installed. rest: those alone that are not known."""
    numbers = [n for n, row in enumerate(ROWS) if version(row.package) and (not packages or row.package in packages)]
    stored = known()

    def tell(of: tuple[int, str, str], result: str) -> None:
        row = ROWS[of[0]]
        stored["versions"][row.package] = version(row.package)
        stored["cells"][key_of(row, *of[1:])] = result
        CELLS.write_text(json.dumps(stored, indent=0, sort_keys=True) + "\n")

    for placement in PAGED:
        of = [(n, precision) for n in numbers if placement in placements(ROWS[n]) for precision in PRECISIONS]
        known_ones = stored["cells"] if rest else {}
        start([(n, each, placement) for n, each in of if key_of(ROWS[n], each, placement) not in known_ones], tell)


INTRODUCTION = """# Optimizers, one by one

What this library does with the optimizers, averages and metrics of others. Each cell trains a model of four layers on a CPU,
with torch {torch} and the defaults of `Booster`.

- **yes**: the weights end where those of a float32 loop of plain torch end, within the format; a run that is saved half way and
  resumed ends in the same bits; and `del` frees model, optimizer and states at once. Under FSDP Python's collector runs first.
- A number: a refusal, from `boost` or the first step, or what was found instead, in [words](#words).
- One entry holds on one device, under ZeRO-1 and under FSDP. Three are in this order, the last two on two ranks. A `-` was not
  tried.

In float32, {float32:.0%} of the way that training goes is near enough. In half it is twice what a loop of plain torch ends off,
the rounding of half weights, and {beside:.0%}. 8-bit states end where `bf16_naive` does, but for what rounding
to their codes can move, 2 to 12 % of the way. An average is right within {float32:.0%} of its
way, and of the weights as the model has them.

`python tests/support/optimizer_table.py` makes the table. To add an optimizer, add a line to `ROWS` there.

"""


def page() -> str:
    """The page, as Markdown, of what is known."""
    stored = known()
    said: dict[str, int] = {}

    def mark(result: str) -> str:
        return result if result in ("yes", "-") else f"[{said.setdefault(result, len(said) + 1)}](#words)"

    text = INTRODUCTION.format(torch=stored["versions"]["torch"], float32=FLOAT32, beside=BESIDE)
    for package in dict.fromkeys(row.package for row in ROWS):
        if package not in stored["versions"]:
            continue
        text += f"## {package} {stored['versions'][package]}\n\n"
        text += f"| | {' | '.join(PRECISIONS)} |\n|{'---|' * (len(PRECISIONS) + 1)}\n"
        for row in ROWS:
            if row.package != package:
                continue
            cells = []
            for precision in PRECISIONS:
                found = [stored["cells"].get(key_of(row, precision, placement), "-") for placement in placements(row)]
                marks = [
                    mark(re.sub(rf"\b{row.name}\b", "it", each.split(";")[0])) for each in found
                ]  # without the way out
                cells.append(marks[0] if len(set(marks)) == 1 else ", ".join(marks))
            text += f"| {row.name} | {' | '.join(cells)} |\n"
        text += "\n"
    text += "## Words\n\n"
    for result, number in said.items():
        text += f"{number}. `{result}`\n"
    return text


if __name__ == "__main__":
    if sys.argv[1:2] in (["--work"], ["--resume"]):
        work([tuple(each) for each in json.loads(sys.argv[2])], resumed if sys.argv[1] == "--resume" else None)
    else:
        if sys.argv[1:] != ["--page"]:
            make([each for each in sys.argv[1:] if each != "--rest"], rest="--rest" in sys.argv)
        PAGE.write_text(page())
