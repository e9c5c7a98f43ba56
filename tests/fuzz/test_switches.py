"""Random programs with switches between precisions, skips, groups of micro-batches and checkpoints."""

import logging

import pytest
from program import failure_of, shrink
from switches import DEFAULTS, draw, run


def agree(seed):
    program = draw(seed)
    failure = failure_of(run, program)
    if failure is not None:
        pytest.fail(f"{failure}\n{shrink(run, program, DEFAULTS, limit=40)}")


@pytest.fixture(autouse=True)
def _quiet():
    logger = logging.getLogger("booster")
    before, logger.level = logger.level, logging.ERROR
    yield
    logger.setLevel(before)


@pytest.mark.slow_cases("3", "4", "5")
@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_switches_is_one_that_loads_checkpoints(seed):
    agree(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(6, 206, 20))
def test_so_are_200_others(first):
    for seed in range(first, first + 20):
        agree(seed)
