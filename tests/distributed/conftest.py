"""Fixtures that run a function on 2 or 4 ranks of one gloo group. See tests/support/pool.py."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool


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


@pytest.fixture(scope="session")
def record_cell(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str], None]]:
    """`record_cell(precision, parallelism)`: the cell passed. With --matrix-out FILE the session's cells go there, as JSON."""
    with _recorded(request.config.getoption("--matrix-out")) as record:
        yield record


@pytest.fixture(scope="session")
def record_resume(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str], None]]:
    """The same of cells that were interrupted and resumed, with --resume-out FILE."""
    with _recorded(request.config.getoption("--resume-out")) as record:
        yield record


@contextmanager
def _recorded(path: str | None) -> Iterator[Callable[[str, str], None]]:
    cells: list[list[str]] = []
    yield lambda precision, parallelism: cells.append([precision, parallelism])
    if path:
        Path(path).write_text(json.dumps({"torch": torch.__version__, "passed": cells}, indent=1) + "\n")
