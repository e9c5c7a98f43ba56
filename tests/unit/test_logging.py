"""get_dist_logger: quiet until asked, on the chosen ranks, one file a rank."""

import logging
import subprocess
import sys

import pytest
import torch.distributed as dist
from programs import run

from booster.common.installed import tell_untried
from booster.logging import get_dist_logger


@pytest.fixture
def logger(request):
    """A logger with its own name, left without handlers and level afterwards."""
    name = f"booster.test.{request.node.name}"
    yield get_dist_logger(name)
    standard = logging.getLogger(name)
    for handler in list(standard.handlers):
        standard.removeHandler(handler)
        handler.close()
    standard.setLevel(logging.NOTSET)


@pytest.fixture
def rank_1_of_2(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)


def test_nothing_is_printed_unless_the_application_configures_logging():
    code = "from booster.logging import get_dist_logger as g; l = g(); l.error('e'); l.warning('w'); l.info('i')"
    done = run("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_records_have_their_level_their_caller_and_the_rank(logger, caplog, rank_1_of_2):
    logger.set_level("DEBUG")
    for log in (logger.debug, logger.info, logger.warning, logger.error):
        log("100 % done")
    assert [record.levelname for record in caplog.records] == ["DEBUG", "INFO", "WARNING", "ERROR"]
    assert {record.getMessage() for record in caplog.records} == {"100 % done"}
    assert {(record.rank, record.world_size) for record in caplog.records} == {(1, 2)}
    assert {record.filename for record in caplog.records} == {"test_logging.py"}


def test_only_the_named_ranks_log(logger, caplog, rank_1_of_2):
    logger.set_level("INFO")
    logger.info("all")
    logger.info("zero", ranks=[0])
    logger.info("one", ranks=[1])
    assert [record.getMessage() for record in caplog.records] == ["all", "one"]


def test_records_below_the_level_are_dropped(logger, caplog):
    logger.set_level("WARNING")
    logger.info("low")
    logger.warning("high")
    assert [record.getMessage() for record in caplog.records] == ["high"]


def test_the_file_carries_rank_and_suffix_and_keeps_only_its_level(logger, tmp_path, rank_1_of_2):
    file = logger.log_to_file(tmp_path / "logs", level="WARNING", suffix="train")
    assert file == tmp_path / "logs" / "rank_1_train.log"
    logger.info("low")
    logger.warning("high")
    lines = file.read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("rank 1/2: high")


def test_the_same_file_is_attached_once(logger, tmp_path):
    file = logger.log_to_file(tmp_path)
    assert logger.log_to_file(tmp_path) == file == tmp_path / "rank_0.log"
    logger.info("a line")
    assert file.read_text().count("a line") == 1


def test_a_file_that_is_asked_for_again_has_the_level_asked_for_last(logger, tmp_path):
    file = logger.log_to_file(tmp_path)
    logger.log_to_file(tmp_path, level="DEBUG")
    logger.debug("a detail")
    logger.log_to_file(tmp_path, level="ERROR")
    logger.warning("a word")
    assert file.read_text().count("a detail") == 1
    assert "a word" not in file.read_text()


@pytest.mark.parametrize(("mode", "kept"), [("a", True), ("w", False)])
def test_mode_a_appends_and_mode_w_starts_anew(logger, tmp_path, mode, kept):
    (tmp_path / "rank_0.log").write_text("earlier\n")
    file = logger.log_to_file(tmp_path, mode=mode)
    logger.info("now")
    assert ("earlier" in file.read_text()) is kept
    assert "now" in file.read_text()


def test_a_launched_job_must_know_its_ranks_before_it_names_files(logger, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="launch_from_torch.. before log_to_file"):
        logger.log_to_file(tmp_path)


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cpu", "2.16.0.dev20261101", "3.0", "main"])
def test_a_torch_that_was_not_tried_is_told_in_one_warning(version, caplog):
    tell_untried(version)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"tried on torch 2.11 to 2.15, not on {version}: " in record.getMessage()


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.1+cu132"])
def test_of_a_torch_that_was_tried_nothing_is_said(version, caplog):
    tell_untried(version)
    assert not caplog.records


@pytest.mark.slow
def test_the_import_looks_at_torch():
    code = "import torch; torch.__version__ = '9.1'; import booster"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "not on 9.1" in done.stderr
