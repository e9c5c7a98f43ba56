"""What every test shares: one thread per process, the `gpu` marker, packages that lean on torchvision, and fixtures that run
a function on 2 or 4 ranks of one gloo group (tests/support/pool.py)."""

import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

# Before torch is imported, and inherited by every process that a test starts: ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Torch's compiler would compile and load ten programs, in each folder of its cache, to see which vectors the CPU has; what the
# CPU says of itself is believed. An empty value has it look.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Where Triton is installed, its compiler would start processes to compile in, which import torch, for each worker of pytest.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Workers of pytest-xdist have 80 columns, and so has what they start; tests of a narrow terminal set their own.
os.environ.pop("COLUMNS", None)

import pytest
import torch
from pool import RankPool
from quick_interpreter import quicken
from selection import make_crossed_slow, make_named_cases_slow, make_repeats_slow, tries_values_once

from booster.kernels import eligibility as choice

torch.set_num_threads(1)
PARTED = pytest.StashKey[bool]()
# Before all others, in this order, come files that take longest: who comes last has the other workers wait.
LONGEST = (
    "matrix", "tensor_parallel", "fsdp", "zero", "pipeline_engine", "hybrid", "fuzz", "memory_ranks", "at_rest", "launcher",
    "capture", "docs", "masters_compiled", "model_wrapper", "update_scalars", "zoo", "memory_estimate", "apex_reference",
)  # fmt: skip

if torch.cuda.is_available():
    # Torch's compiler imports inductor when it is reset where there is a GPU, and warns that parts of itself are deprecated.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("torch._inductor.cudagraph_trees")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix-out", metavar="FILE", help="write which precisions passed on which parallelism, as JSON")
    parser.addoption("--kernels", action="store_true", help="step by Triton kernels wherever they can, interpreted")
    parser.addoption("--resume-out", metavar="FILE", help="write the same of interrupted and resumed runs")


def pytest_configure(config: pytest.Config) -> None:
    _part_workers(config)
    quicken()
    if torch.__version__.startswith("2.11"):  # its compiler looks whether a tensor that is no leaf has a gradient
        config.addinivalue_line("filterwarnings", "ignore:The .grad attribute of a Tensor:UserWarning")
    if not config.getoption("--kernels"):
        return
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("--kernels needs Triton, and TRITON_INTERPRET=1; `make kernels` has both")
    choice.TAKEN_BY_TRUE = ("cpu",)
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton")  # numpy's, of inf and NaN


def _part_workers(config: pytest.Config) -> None:
    """Have each worker of pytest-xdist collect the files in its own order, where all are collected.

    In one order they would all rewrite the assertions of a file at once; so one of them does, and the others read its work.
    """
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count == 1 or config.args != config.getini("testpaths"):
        return
    files = sorted(str(path) for path in Path(__file__).parent.rglob("test_*.py"))
    first = len(files) * int(worker.removeprefix("gw")) // count
    config.args[:] = files[first:] + files[:first]
    config.stash[PARTED] = True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected is no garbage, and is looked through once, at the end, and not again as it grows."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What was imported and collected stays until the end: no later search for unreachable objects walks through it again."""
    gc.collect()
    gc.freeze()


class _File(pytest.Module):
    """A file of tests. Where all of them would be skipped for one reason it is skipped itself, and its cases are not made."""

    def collect(self) -> Any:
        marks = getattr(self.obj, "pytestmark", [])
        for mark in marks if isinstance(marks, list) else [marks]:
            if mark.name == "gpu" and not torch.cuda.is_available():
                pytest.skip("needs a CUDA device", allow_module_level=True)
            if mark.name == "skipif" and mark.args[0] is True:
                pytest.skip(mark.kwargs["reason"], allow_module_level=True)
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return _File.from_parent(parent, path=module_path)


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tests that want a card or Triton are skipped in one line of the summary each, not in one of each file and place."""
    for report in terminalreporter.stats.get("skipped", ()):
        for reason in ("needs a CUDA device", "needs Triton"):
            if isinstance(report.longrepr, tuple) and reason in report.longrepr[2]:
                report.longrepr = str(Path(__file__).parent), None, f"Skipped: {reason}"


@pytest.hookimpl(tryfirst=True)  # before what is slow is deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if PARTED in config.stash:
        places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
        items.sort(
            key=lambda item: (
                places.get(item.path.stem, len(places)),
                "distributed" not in item.path.parts,
                str(item.path),
            )
        )
    functions = [item for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    make_crossed_slow([item for item in functions if item.get_closest_marker("crossed")])
    all_collected = PARTED in config.stash or config.args == config.getini("testpaths")
    named = [item for item in functions if item.get_closest_marker("slow_cases")]
    make_named_cases_slow(named, check=all_collected and not config.getoption("lf", False))
    make_repeats_slow([item for item in functions if tries_values_once(item.path)])
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _import_beside_torchvision(name: str, fragments: list[Any]) -> ModuleType:
    """Import a package that imports torchvision, also where torchvision's compiled operators do not load.

    A torchvision built for CUDA fails with a CPU-only torch while it registers shapes for two operators that its
    library would have declared. Declaring them is safe only after that failure: where the library does load, a second
    declaration aborts the process. `fragments` keeps the declarations alive for the session.
    """
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    try:
        import_module("torchvision")
    except ModuleNotFoundError:
        pass
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        for module in [m for m in sys.modules if m.partition(".")[0] == "torchvision"]:
            del sys.modules[module]
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        fragments.append(library)
        import_module("torchvision")
    return import_module(name)


def _import_quietly(name: str, fragments: list[Any]) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their import-time warnings are not ours to fix
        return _import_beside_torchvision(name, fragments)


def _loggers() -> list[logging.Logger]:
    """The root logger, and those of this library that somebody asked for."""
    named = [each for name, each in logging.root.manager.loggerDict.items() if name.partition(".")[0] == "booster"]
    return [logging.root, *(each for each in named if isinstance(each, logging.Logger))]


@pytest.fixture(autouse=True)
def levels_as_before() -> Iterator[None]:
    """What a test logs does not depend on the level that another one, or a program that it ran, set for good."""
    before = {logger: logger.level for logger in _loggers()}
    yield
    for logger in _loggers():
        if logger.level != (level := before.get(logger, logging.NOTSET)):
            logger.setLevel(level)  # which empties a cache of every logger of the process


def _state() -> dict[str, Any]:
    """What of this process the next test would find as a test leaves it. A few microseconds."""
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_autocast_enabled('cpu')": torch.is_autocast_enabled("cpu"),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "os.getcwd()": os.getcwd(),
        **{f"os.environ[{name!r}]": os.environ.get(name) for name in _VARIABLES},
    }


_VARIABLES = ("COLUMNS", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HOME")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail the test that leaves another state of the process to the next one, and not the next one."""
    before = _state()
    yield
    if (after := _state()) != before:
        left = [
            f"{name} is {after[name]!r}, and was {value!r}" for name, value in before.items() if after[name] != value
        ]
        pytest.fail("; ".join(left), pytrace=False)


@pytest.fixture(scope="session")
def import_package() -> Callable[[str], ModuleType]:
    """Import timm, transformers or torchvision by name; skips where the package is not installed."""
    fragments: list[Any] = []

    return lambda name: _import_quietly(name, fragments)


@pytest.fixture(scope="session")
def timm(import_package: Callable[[str], ModuleType]) -> ModuleType:
    return import_package("timm")


@pytest.fixture(scope="session")
def transformers(import_package: Callable[[str], ModuleType]) -> ModuleType:
    return import_package("transformers")


@pytest.fixture(scope="session")
def run_on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`run_on_ranks(fn, world_size, *args)` -> what `fn(rank, world_size, *args)` returned, in rank order."""
    pools: dict[int, RankPool] = {}

    def run(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        return pools.setdefault(world_size, RankPool(world_size)).run(fn, *args)

    yield run
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks2(run_on_ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """`ranks2(fn, *args)` -> the two results of `fn(rank, 2, *args)`."""
    return partial(_with_world_size, run_on_ranks, 2)


@pytest.fixture
def ranks4(run_on_ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """`ranks4(fn, *args)` -> the four results of `fn(rank, 4, *args)`."""
    return partial(_with_world_size, run_on_ranks, 4)


def _with_world_size(run: Callable[..., list[Any]], world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return run(fn, world_size, *args)


@pytest.fixture
def nothing_compiled() -> None:
    """As in a process that never called torch.compile, where a step looks for less."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
