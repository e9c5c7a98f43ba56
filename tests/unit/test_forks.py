"""The runner of the quick suite: what its workers find is told as if one process had run it."""

import os
import re
from pathlib import Path

import forks
import pytest
from programs import run

CONFTEST = """
import logging
import pytest, forks

logging.getLogger("early").addHandler(logging.StreamHandler())  # on what takes the place of stderr while tests are collected

def pytest_addoption(parser):
    parser.addoption("--forks", type=int)

def pytest_runtestloop(session):
    forks.run(session, session.config.getoption("--forks"))
    return True

@pytest.fixture(scope="session")
def late():
    yield
    raise ValueError("the end of a fixture")
"""
TESTS = """
import logging, os, subprocess, sys, warnings
import pytest
from pool import RankPool

def test_passes(tmp_path):
    assert tmp_path.is_dir()

def test_fails():
    print("printed here")
    subprocess.run(["echo", "and by a child"])
    assert [1, 2] == [1, 3]

def test_dies():
    os._exit(3)

def test_after_a_death():
    raise ValueError("it has run")

@pytest.mark.filterwarnings("always")
def test_warns():
    warnings.warn("seen by all")

def test_logs():
    logging.getLogger("early").warning("logged in a worker")
    raise ValueError("and seen")

def pid(rank, world_size):
    print("printed by a rank", flush=True)
    logging.getLogger("early").warning("logged by a rank")
    return os.getppid()

def test_ranks():
    pool = RankPool(2)
    assert len({*pool.run(pid), os.getpid()}) == 2
    pool.close()
    raise ValueError("ranks have run")

@pytest.mark.skip(reason="not today")
def test_skipped():
    pass
"""
LATE = """
def test_of_another_file(late):
    pass
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What a session in two forks prints; the session is a program of its own."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_b.py").write_text(TESTS)
    (folder / "test_a.py").write_text(LATE)
    where = os.pathsep.join([str(Path(forks.__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = ("-m", "pytest", "--forks", "2", "-ra", f"--rootdir={folder}", "-p", "no:cacheprovider", folder)
    ran = run(*command, folder=folder, environment={**os.environ, "PYTHONPATH": where, "COLUMNS": "200"})
    assert ran.returncode == 1, ran.stdout + ran.stderr
    return ran.stdout


def test_every_outcome_is_counted_once(told):
    assert re.search(r"= 5 failed, 3 passed, 1 skipped, 1 warning, 1 error in ", told), told


def test_a_failure_shows_its_assertion_and_what_was_printed(told):
    assert "assert [1, 2] == [1, 3]" in told
    assert "At index 1 diff: 2 != 3" in told
    assert "printed here\nand by a child" in told


def test_a_worker_that_dies_fails_its_test_and_the_next_ones_run(told):
    assert "the process died that ran test_b.py::test_dies" in told
    assert "ValueError: it has run" in told


def test_ranks_start_in_a_worker_and_their_prints_are_captured(told):
    assert "ValueError: ranks have run" in told
    assert "printed by a rank" in told


def test_the_end_of_a_session_fixture_and_a_warning_are_told(told):
    assert "ValueError: the end of a fixture" in told
    assert "UserWarning: seen by all" in told


def test_what_was_told_to_write_before_the_fork_writes_into_the_worker(told):
    assert "logged in a worker" in told
    assert "logged by a rank" in told
    assert "Logging error" not in told
