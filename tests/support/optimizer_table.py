"""The table of docs/reference/optimizers.md: which optimizers train, resume and are freed under which precision and placement.

    python tests/support/optimizer_table.py            # every row with an installed package
    python tests/support/optimizer_table.py timm torch # rows of these packages
    python tests/support/optimizer_table.py --rest     # what was not tried yet, as after a run that was ended
    python tests/support/optimizer_table.py --page     # the page alone, of the cells that are known

A row is a line of ROWS. Each cell boosts a small model, trains it, saves it half way, resumes, and deletes it, in a fifth of a
second. One process makes all cells of one device, two ranks all others; a cell that ends or stops them says so, and the next
begins with new ones. What is found goes into CELLS as it comes, of which the page is made.
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
import signal
import subprocess
import sys
import tempfile
import textwrap
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
from booster.model import optimizers
from booster.plugin import LowLevelZeroPlugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "optimizers.md"
CELLS = Path(__file__).parents[1] / "data" / "optimizer_table.json"
STEPS, HALF = 6, 3
LIMIT = 600  # seconds that one cell may take, its programs compiled and the machine loaded
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
FLOAT32, MARGIN = 0.02, 0.05
# A step between codes of a packed state, as a share of the root mean square of a group of 32, of which the largest is at most
# sqrt(32) of it: 2 sqrt(x s) / 127 of a signed state x with the scale s, and s / 127 of a ratio. An unsigned state is divided
# by as its root, so that half its step counts: 5826 (2 c + 17) / 2**24 of it, with the code c of 1e-4 of the largest, 131; 2 %
# of squares of random numbers are less.
CODE_STEPS = {"signed": 2 * 32**0.25 / 127, "unsigned": 5826 * (2 * 131 + 17) / 2**24}
RATIO_STEP = 32**0.5 / 127


class Row(NamedTuple):
    """An optimizer. package: as pip knows it. path: module and class. options: of the constructor. modes: it has `train()` and
    `eval()`. closure: `step` wants one. used: how, where it has several rows."""

    package: str
    path: str
    options: dict[str, Any] = {}  # noqa: RUF012
    modes: bool = False
    closure: bool = False
    kind: str = "optimizer"
    used: str = ""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2] + self.used

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


def own_ema(average: torch.Tensor, weight: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return average + 0.1 * (weight - average)


AVERAGED = "torch.optim.swa_utils.AveragedModel"
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
        "ADOPT AdEMAMix AdaBelief AdaBound AdaFactor AdaMod AdaNorm AdaPNM Adai Adalite AdamP AdamS Adan AggMo Amos CAME "
        "DiffGrad FAdam Fromage Grams Kate LaProp Lamb Lion MADGRAD MARS Magma NovoGrad QHAdam SM3 SOAP ScalableShampoo "
        "SignSGD StableAdamW Tiger Yogi",
    ),
    Row("pytorch_optimizer", "pytorch_optimizer.LoRARite", MATRICES),
    Row("pytorch_optimizer", "pytorch_optimizer.Prodigy", {"lr": 1.0}),
    Row("pytorch_optimizer", "pytorch_optimizer.Muon", {"lr": 1e-2, "_muon": True}),
    Row("pytorch_optimizer", "pytorch_optimizer.ScheduleFreeAdamW", {"lr": 1e-3}, modes=True),
    *rows_of("torch-optimi", "optimi", "Adam AdamW Adan Lion RAdam Ranger SGD"),
    Row("torch-optimi", "optimi.StableAdamW", {"lr": 1e-3, "triton": False}),
    *rows_of("bitsandbytes", "bitsandbytes.optim", "Adam8bit AdamW8bit AdamW32bit Lion8bit AdEMAMix8bit PagedAdamW8bit"),
    *rows_of("bitsandbytes", "bitsandbytes.optim", "Adagrad8bit LAMB8bit RMSprop8bit"),
    *rows_of("bitsandbytes", "bitsandbytes.optim", "LARS8bit SGD8bit", momentum=0.9),
    *rows_of("torchao", "torchao.optim", "AdamW8bit AdamW4bit AdamWFp8 Adam8bit"),
    Row("schedulefree", "schedulefree.AdamWScheduleFree", {"lr": 1e-2}, modes=True),
    Row("schedulefree", "schedulefree.SGDScheduleFree", {"lr": 1e-2}, modes=True),
    Row("schedulefree", "schedulefree.RAdamScheduleFree", {"lr": 1e-2}, modes=True),
    Row("prodigyopt", "prodigyopt.Prodigy", {"lr": 1.0}),
    *rows_of("lion-pytorch", "lion_pytorch", "Lion"),
    *rows_of("adan-pytorch", "adan_pytorch", "Adan"),
    *rows_of("came-pytorch", "came_pytorch", "CAME"),
    *rows_of("galore-torch", "galore_torch", "GaLoreAdamW"),
    *rows_of("galore-torch", "galore_torch", "GaLoreAdafactor", relative_step=False, scale_parameter=False),
    *rows_of("apollo-torch", "apollo_torch", "APOLLOAdamW"),  # not for commercial use, so that no extra installs it
    Row("muon-optimizer", "muon.SingleDeviceMuon", MATRICES),
    *rows_of("kron-torch", "kron_torch", "Kron"),
    *rows_of("dadaptation", "dadaptation", "DAdaptAdam DAdaptSGD DAdaptLion DAdaptAdaGrad DAdaptAdan", lr=1.0),
    Row("torch", AVERAGED, kind="average"),
    Row("torch", AVERAGED, {"multi_avg_fn": EMA}, kind="average", used=" with get_ema_multi_avg_fn"),
    Row("torch", AVERAGED, {"avg_fn": own_ema}, kind="average", used=" with avg_fn"),
    Row("timm", "timm.utils.ModelEmaV2", {"decay": 0.9}, kind="average"),
    Row("timm", "timm.utils.ModelEmaV3", {"decay": 0.9}, kind="average"),
    Row("torch-ema", "torch_ema.ExponentialMovingAverage", {"decay": 0.9, "use_num_updates": False}, kind="average"),
    Row(
        "ema-pytorch",
        "ema_pytorch.EMA",
        {"beta": 0.9, "update_after_step": 0, "update_every": 1, "coerce_dtype": True},
        kind="average",
    ),
    Row("torchmetrics", "torchmetrics.MeanMetric", kind="metric"),
    Row("torchmetrics", "torchmetrics.MeanSquaredError", kind="metric"),
    Row("torchmetrics", "torchmetrics.PearsonCorrCoef", kind="metric"),
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

    Rounding is stochastic, to one of two codes, and so has a standard deviation of half a step between codes at most. What it
    makes of a state after one step all later updates go on with: it is that share of their lengths. It is independent from step
    to step, from state to state and from element to element, so that squares add up, and the length of the sum over hundreds of
    elements is its standard deviation within a few per cent.
    """
    lengths = [float((after - before).norm()) for before, after in itertools.pairwise(visited)]
    step = math.hypot(*(CODE_STEPS.get(each, RATIO_STEP) for each in encodings.values()))
    return step / 2 * math.hypot(*(sum(lengths[after:]) for after in range(1, len(lengths))))


REFERENCES: dict[tuple[str, torch.dtype | None, bool], list[torch.Tensor]] = {}


def plain(row: Row, dtype: torch.dtype | None = None, *, naive: bool = False) -> list[torch.Tensor]:
    """Weights at the start and after each step of a loop of torch's own, in float32, under autocast, or with half weights
    compared with float32 ones."""
    key = row.path, dtype, naive
    if key not in REFERENCES:
        REFERENCES[key] = _plain(row, dtype, naive=naive)
    return REFERENCES[key]


def _plain(row: Row, dtype: torch.dtype | None, *, naive: bool) -> list[torch.Tensor]:
    model = net()
    optimizer = row.make(model)
    torch.manual_seed(2)
    if row.modes:
        optimizer.train()
    visited = []
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
    return [*visited, weights(model)]


class Run:
    """A boosted run on this rank."""

    def __init__(self, row: Row, precision: str, placement: str, raw: nn.Module | None = None) -> None:
        self.row = row
        raw = raw or net()
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
            tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
            self.alive |= {f"state {key} {number}": weakref.ref(value) for key, value in tensors.items()}


def words(error: BaseException) -> str:
    """The first sentence of an error, without numbers of this run."""
    said = str(error).strip().splitlines() or [""]
    first = re.sub(r"(?<![\w.])/\S*/", "", said[0].split(". ")[0])
    return f"{type(error).__name__}: {first[:220]}".replace("|", "/")


# What these look at besides single elements needs other options than their rows have, more steps, or larger parameters.
FURTHER = (
    "Lars",
    "ScalableShampoo",
    "GaLoreAdamW",
    "APOLLOAdamW",
    "Prodigy",
    "DAdaptLion",
    "DAdaptAdaGrad",
    "DAdaptAdan",
)


BY_ELEMENTS: dict[str, bool] = {}


def by_elements(row: Row) -> bool:
    """Whether a trial in plain torch finds that every element is treated by itself: the parameters of a net, and the same
    numbers in pieces, each with its own optimizer, get the same updates from gradients of several sizes."""
    if row.package in ("bitsandbytes", "torchao") or row.name in FURTHER or row.closure or "_matrices" in row.options:
        return False
    model = net()
    flat = torch.cat([param.detach().flatten() for param in model.parameters()])
    pieces = [nn.ParameterList([nn.Parameter(piece.clone())]) for piece in flat.split(333)]
    optimizers = [row.make(each) for each in (model, *pieces)]
    params = [*model.parameters(), *(piece[0] for piece in pieces)]
    random = torch.Generator().manual_seed(3)
    for step in range(2 * STEPS):
        gradient = torch.randn(flat.numel(), generator=random) * 10.0 ** (step % 4 - 2)
        parts = gradient.repeat(2).split([param.numel() for param in params])
        for param, part in zip(params, parts, strict=True):
            param.grad = part.view_as(param).clone()
        for optimizer in optimizers:
            if row.modes:
                optimizer.train()
            optimizer.step()
    whole, apart = torch.cat([param.detach().flatten() for param in params]).chunk(2)
    return bool((whole - apart).norm() < 1e-4 * (whole - flat).norm())


def registered_where_asked(make: Any, row: Row, *args: Any) -> str:
    """What `make` finds; with "registered: ", what it finds after `register_elementwise`, where that is asked for and right."""
    found = make(row, *args)
    if "is not known to treat every element by itself" not in found:
        return found
    if row.path not in BY_ELEMENTS:
        BY_ELEMENTS[row.path] = by_elements(row)
    if not BY_ELEMENTS[row.path]:
        return found
    cls = type(row.make(net()))
    booster.register_elementwise(cls)
    try:
        return f"registered: {make(row, *args)}"
    finally:
        optimizers._registered.pop(cls)  # the other cells of this class do without


def cell(row: Row, precision: str, placement: str, folder: Path) -> str:
    """ "yes", or what is not so; a refusal begins with "refused: "; see `registered_where_asked`."""
    return registered_where_asked(_cell, row, precision, placement, folder)


def _cell(row: Row, precision: str, placement: str, folder: Path) -> str:
    try:
        visited = plain(row)
    except Exception as error:
        return f"does not train without this library either: {words(error)}"
    reference = visited[-1]
    way = float((reference - visited[0]).norm())
    bound = FLOAT32
    if precision not in ("fp32", "8-bit states"):
        dtype = torch.float16 if precision.startswith("fp16") else torch.bfloat16
        by_hand = plain(row, dtype, naive=precision.endswith("_naive"))[-1]
        bound = 2.0 * float((by_hand - reference).norm()) / way + MARGIN
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
    return _left(alive, row)


def _left(alive: dict[str, weakref.ref[Any]], row: Row | None = None) -> str:
    def left() -> list[str]:
        return sorted(name for name, ref in alive.items() if ref() is not None)

    if not (names := left()):
        return "yes"
    if row and _keeps_itself(row):
        gc.collect()
        if not left():
            return "freed by Python's collector, as in plain torch: after load_state_dict() it holds itself"
    return f"not freed: {names[0]} and {len(names) - 1} more"


def _keeps_itself(row: Row) -> bool:
    """Whether the optimizer lives on when it was loaded into and is deleted, without this library."""
    model = net()
    optimizer = row.make(model)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ref = weakref.ref(optimizer)
    del model, optimizer
    return ref() is not None


def resumed(row: Row, precision: str, placement: str, folder: Path) -> str:
    """ "yes" where new objects that load a checkpoint end in the same bits ten steps later, or what refuses, and where; all
    else is a fault. See `registered_where_asked`."""
    return registered_where_asked(_resumed, row, precision, placement, folder)


def _resumed(row: Row, precision: str, placement: str, folder: Path) -> str:
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


def _held(average: Any) -> torch.Tensor:
    """The averages, in one piece."""
    if hasattr(average, "shadow_params"):
        return torch.cat([param.detach().float().flatten() for param in average.shadow_params])
    return weights(next(getattr(average, name) for name in ("ema_model", "module") if hasattr(average, name)))


class AveragedRun(Run):
    """A run with an average of its weights, made before boost, as docs/guides/averages.md has it; and `right`, the same average
    of a float32 model that is given the same weights."""

    def __init__(self, row: Row, precision: str, placement: str) -> None:
        self.raw, self.twin = net(), net()
        self.average, self.right = self.averaged(row, self.raw), self.averaged(row, self.twin)
        super().__init__(Row("torch", "torch.optim.SGD", {"lr": 0.2}), precision, placement, self.raw)
        self.start = weights(self.twin)
        self.alive["average"] = weakref.ref(self.average)

    def averaged(self, row: Row, model: nn.Module) -> Any:
        module, _, name = row.path.rpartition(".")
        of = list(model.parameters()) if row.package == "torch-ema" else model
        return getattr(importlib.import_module(module), name)(of, **row.options)

    def train(self, steps: range) -> None:
        for step in steps:
            super().train(range(step, step + 1))
            nn.utils.vector_to_parameters(weights(self.model), self.twin.parameters())
            for average, of in ((self.average, self.model), (self.right, self.twin)):
                if hasattr(average, "update_parameters"):
                    average.update_parameters(of)
                elif hasattr(average, "shadow_params"):
                    average.update(of.parameters())
                else:  # one has the model from its constructor
                    average.update(*([] if hasattr(average, "online_model") else [of]))


def averaged(row: Row, precision: str, placement: str, folder: Path) -> str:
    """What `cell` says, of an average of the weights."""
    try:
        run = AveragedRun(row, precision, placement)
        run.train(range(HALF))
        run.booster.save(folder, run.model, run.optimizer, extra={"average": run.average.state_dict()})
    except Exception as error:
        return f"fails in its own code: {words(error)}"
    run.train(range(HALF, STEPS))
    end, right = _held(run.average), _held(run.right)
    off = float((end - right).norm() / (right - run.start).norm())
    if not off <= FLOAT32:
        return f"is {off:.0%} of its way off"
    try:
        again = AveragedRun(row, precision, placement)
        again.average.load_state_dict(again.booster.load(folder, again.model, again.optimizer).extra["average"])
        again.train(range(HALF, STEPS))
    except Exception as error:
        return f"does not resume: {words(error)}"
    if not torch.equal(_held(again.average), end):
        halves = {param.dtype for param in again.average.shadow_params} - {torch.float32}
        return f"does not resume to the bit{': its load_state_dict() rounds averages as the weights are' if halves else ''}"
    again.note_alive()
    alive = again.alive
    del run, again
    return _left(alive)


def metered(row: Row, precision: str, placement: str, folder: Path) -> str:
    """What `cell` says, of a metric that is a part of the model."""
    module, _, name = row.path.rpartition(".")

    def model() -> nn.Module:
        made = net()
        made[0].metric = getattr(importlib.import_module(module), name)(**row.options)
        made[0].metric.persistent(True)
        return made

    sgd = Row("torch", "torch.optim.SGD", {"lr": 0.2})
    run = Run(sgd, precision, placement, model())
    twin = model()[0].metric
    for step in range(STEPS):
        run.train(range(step, step + 1))
        if step == HALF:
            run.booster.save(folder, run.model, run.optimizer)
        for number in range(50):
            values = torch.rand(8, generator=torch.Generator().manual_seed(50 * step + number)) + 1.0
            given = (values, values.flip(0)) if name != "MeanMetric" else (values,)
            for metric in (run.model[0].metric, twin):
                metric.update(*given)
    found, right = float(run.model[0].metric.compute()), float(twin.compute())
    if abs(found - right) > 1e-5 * abs(right):
        return f"{found:.6g} where {right:.6g} is right"
    again = Run(sgd, precision, placement, model())
    again.booster.load(folder, again.model, again.optimizer)
    again.note_alive()
    alive = again.alive
    del run, again
    return _left(alive)


def quiet_cell(row: Row, *args: Any, of: Any = None) -> str:
    """What a cell is, without what packages print and warn of. of: what makes it; of the page where that is None."""
    if of is None:
        of = {"optimizer": cell, "average": averaged, "metric": metered}[row.kind]
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
        booster.launch_from_torch(timeout=LIMIT / 4)
    for number, precision, placement in wanted:
        signal.alarm(LIMIT)
        gc.collect()
        gc.freeze()  # what packages made at their import is not looked at by the collector for each cell
        base = [tempfile.mkdtemp()]
        if ranks:
            dist.broadcast_object_list(base)
        found = quiet_cell(ROWS[number], precision, placement, Path(base[0]) / "checkpoint", of=of)
        if ranks:
            each: list[Any] = [None] * 2
            dist.all_gather_object(each, found)
            found = next((one for one in each if one not in ("yes", "registered: yes")), each[0])
        if not ranks or dist.get_rank() == 0:
            print(json.dumps([number, precision, placement, found]), flush=True)


def start(wanted: list[tuple[int, str, str]], report: Any, option: str = "--work") -> None:
    """Make cells of one placement, in processes of their own, again where one ends them. report: called with each, and what it
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
                    report((number, precision, placement), result)
        if left:
            report(left.pop(0), "ends or stops the ranks" if ranks else "ends the process")


def version(package: str) -> str | None:
    """Return the version of `package`, without its build; None where it is not installed."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def known() -> dict[str, Any]:
    """Return what was found: versions of packages, and by path, precision and placement what each cell is."""
    return json.loads(CELLS.read_text()) if CELLS.exists() else {"versions": {}, "cells": {}}


def key_of(row: Row, precision: str, placement: str) -> str:
    return f"{row.path}{row.used} | {precision} | {placement}"


def make(words_: list[str], *, rest: bool = False) -> None:
    """Make all cells of those packages and precisions that are among `words_`, where none is, of all that are installed. rest:
    those alone that are not known."""
    packages = {row.package for row in ROWS} & set(words_) or {row.package for row in ROWS if version(row.package)}
    precisions = [each for each in PRECISIONS if each in words_] or list(PRECISIONS)
    numbers = [n for n, row in enumerate(ROWS) if row.package in packages]
    wanted = [(n, each, placement) for n in numbers for each in precisions for placement in PAGED]
    stored = known()
    keys = {of: key_of(ROWS[of[0]], *of[1:]) for of in wanted}
    stored["versions"] |= {package: version(package) for package in packages}
    if not rest:
        stored["cells"] = {key: found for key, found in stored["cells"].items() if key not in keys.values()}

    def report(of: tuple[int, str, str], result: str) -> None:
        stored["cells"][keys[of]] = result
        CELLS.write_text(json.dumps(stored, indent=0, sort_keys=True) + "\n")

    for ranks in (False, True):
        start([of for of in wanted if (of[2] != "one device") is ranks and keys[of] not in stored["cells"]], report)


INTRODUCTION = """# Optimizers, one by one

Find your optimizer, average or metric, and the column of your plugin. {num} runs, one for each optimizer, placement and
precision, were made on a CPU with torch {torch} and the defaults of `Booster`, in {precisions}.

- **yes**: in all six. A training run ends where a float32 loop of plain torch ends, within the format; saved half way and
  resumed, it ends in the same bits; and `del` frees model, optimizer and states at once.
- **yes\\***: the same, after `booster.register_elementwise(ITS_CLASS)` before `boost`, without which it is refused. A trial in
  plain torch found that it treats every element by itself, with the options of the row.
- **but**: yes in all but these. Without it, what is said holds for all six. A number leads to [the words](#words). `-` was not
  tried.
- **refused**: by this library, by name, before a weight changed. **not saved**: it trains, and a WARNING says so after its
  first step. **fails in its own code**: an average does so, of half weights or of shards, and this library is not asked. [What
  works there](../guides/averages.md).

In float32, {float32:.0%} of the way that training goes is near enough. In half it is twice what a loop of plain torch ends off,
the rounding of half weights, and {margin:.0%}. 8-bit states end where `bf16_naive` does, but for what rounding
to their codes can move, 2 to 12 % of the way. An average, made of the
model before `boost`, is right within {float32:.0%} of its way.

`python tests/support/optimizer_table.py` makes the table. To add an optimizer, add a line to `ROWS` there. These versions:

```text
pip install {pins}
```

"""


def page() -> str:
    """The page, as Markdown, of what is known."""
    stored = known()
    packages = [each for each in dict.fromkeys(row.package for row in ROWS) if each in stored["versions"]]
    said: dict[str, int] = {}
    text = INTRODUCTION.format(
        num=f"{len(stored['cells']):,}",
        torch=stored["versions"]["torch"],
        precisions=", ".join(PRECISIONS),
        float32=FLOAT32,
        margin=MARGIN,
        pins=" \\\n    ".join(
            textwrap.wrap(
                " ".join(f"{each}=={stored['versions'][each]}" for each in packages), 90, break_on_hyphens=False
            )
        ),
    )
    for package in packages:
        text += (
            f"## {package} {stored['versions'][package]}\n\n| | {' | '.join(PAGED)} |\n|{'---|' * (len(PAGED) + 1)}\n"
        )
        for row in ROWS:
            if row.package == package:
                found = stored["cells"]
                cells = [
                    _mark({each: found.get(key_of(row, each, placement), "-") for each in PRECISIONS}, said)
                    for placement in PAGED
                ]
                text += f"| {row.name} | {' | '.join(cells)} |\n"
        text += "\n"
    text += "## Words\n\n"
    for result, number in said.items():
        text += f"{number}. `{result}`\n"
    return text


def _mark(found: dict[str, str], said: dict[str, int]) -> str:
    """What the page says of a placement. found: by precision. said: numbers of results, which get new ones."""
    by_result: dict[str, list[str]] = {}
    for precision, result in found.items():
        # Without the way out, and its class: some classes are named otherwise in their packages.
        result = result.removeprefix("registered: ") if result != "registered: yes" else "yes\\*"
        result = re.sub(
            r"(Error: (?:for its parameters, )?)\w+ (would|looks|keeps)\b", r"\1it \2", result.split("; ")[0]
        )
        result = re.sub(r"\w+(\.step\(closure\)| needs whole)", r"it\1", result)
        by_result.setdefault(result, []).append(precision)
    yes = max((result for result in by_result if result.startswith("yes")), default="")

    def described(result: str) -> str:
        if result == "-":
            return result
        label = next(
            (
                each
                for each in ("refused", "not saved", "does not resume", "fails in its own code")
                if result.startswith(each)
            ),
            "not right",
        )
        label = "yes" if result.startswith("freed") else label
        return f"{label} [{said.setdefault(result, len(said) + 1)}](#words)"

    others = {described(result): of for result, of in by_result.items() if not result.startswith("yes")}
    if len(by_result) == 1 and others:
        return next(iter(others))
    least = "; ".join(f"{', '.join(of)} {what}" for what, of in others.items())
    return f"{yes}, but {least}" if yes and least else yes or least


if __name__ == "__main__":
    if sys.argv[1:2] in (["--work"], ["--resume"]):
        work([tuple(each) for each in json.loads(sys.argv[2])], resumed if sys.argv[1] == "--resume" else None)
    else:
        if sys.argv[1:] != ["--page"]:
            make(sys.argv[1:], rest="--rest" in sys.argv)
        PAGE.write_text(page())
