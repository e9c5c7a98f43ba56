"""What the matrix test writes down."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def record_cell(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str], None]]:
    """`record_cell(precision, parallelism)`: the cell passed. With --matrix-out FILE the session's cells go there, as JSON,
    added to those of earlier sessions, so that a table can be made in several; for a new one delete the file."""
    with _recorded(request.config.getoption("--matrix-out")) as record:
        yield record


@pytest.fixture(scope="session")
def record_resume(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str], None]]:
    """The same of cells that were interrupted and resumed, with --resume-out FILE."""
    with _recorded(request.config.getoption("--resume-out")) as record:
        yield record


@contextmanager
def _recorded(path: str | None) -> Iterator[Callable[[str, str], None]]:
    file = Path(path) if path else None
    before = json.loads(file.read_text()) if file is not None and file.exists() else {}
    cells: list[list[str]] = before["passed"] if before.get("torch") == torch.__version__ else []
    yield lambda precision, parallelism: cells.append([precision, parallelism])
    if file is not None:
        once = [list(cell) for cell in dict.fromkeys(map(tuple, cells))]
        file.write_text(json.dumps({"torch": torch.__version__, "passed": once}, indent=1) + "\n")
