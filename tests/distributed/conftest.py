"""What the matrix test writes down."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch


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
