"""`python -m benchmarks.gpu` gives a verdict, whatever becomes of its rows: they raise, die, never end, or find no space."""

import contextlib
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import weakref
from importlib import import_module
from types import SimpleNamespace

import planted_rows
import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import models, row, timed_rows, verdict, ways, worker
from benchmarks.gpu.row import PARTS, Place, Row, RowFile, begun, ended
from benchmarks.gpu.supervisor import NO_SPACE, Job, left, supervise
from booster.kernels import switches

PLANTED = planted_rows.PART
CARD = "a card; torch 9"


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """(a file of rows, a job of the planted ones)."""
    monkeypatch.setitem(PARTS, PLANTED, ("planted_rows", "planted"))
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(planted_rows.__file__))
    return RowFile(tmp_path), Job((PLANTED,), 600.0, rehearse=True, worker="planted_rows")


def found_in(file):
    return {name: line for (_, name), line in ended(file.lines()).items()}


def test_rows_that_fail_are_told_and_the_part_goes_on_behind_them(planted):
    file, job = planted
    said = []
    assert supervise(job, file, said.append) == 0
    rows = found_in(file)
    assert rows["right"]["right"]
    assert rows["raises"]["error"].startswith("ValueError: it is so at planted_rows.py:")
    assert rows["kills its process"]["error"].startswith("its process ended with SIGKILL")
    assert rows["never ends"]["error"].startswith("it took more than 1 s and was killed")
    assert "illegal memory access" in rows["faults"]["error"]
    assert not rows["wrong"]["right"]
    assert left(file.lines(), PLANTED) == ["long"], "which does not fit into the time"
    assert len(said) == len(rows) == 8
    # The verdict.
    lines, own = file.lines(), list(rows.values())
    last = verdict.last_line(PLANTED, own, left(lines, PLANTED))
    assert last == (
        "part 10, planted: 1 of 2 right; 1 timed; wrong: wrong; slower than the goal: slow: ours; switch off: rule AdamW, rule "
        "SGD, states 8bit and 1 more; failed: raises, kills its process, never ends and 1 more; not here: large; not made: "
        "long"
    )
    decided = "\n".join(
        ["from booster.kernels.switches import KernelSwitch", "DECIDED = {", *verdict.switch_lines(own), "}"]
    )
    (file.folder / "decided.py").write_text(decided)
    table = runpy.run_path(str(file.folder / "decided.py"))["DECIDED"]
    assert set(table) == {"rule AdamW", "rule SGD", "states 8bit", "release"} <= set(switches.NAMES)
    assert not any(switch.on for switch in table.values())
    assert table["release"].why == "slow: 3.00 of torch's time"
    assert table["states 8bit"].card == "a card"
    assert "| kills its process | its process ended with SIGKILL" in verdict.report(lines, [PLANTED], {})
    # Once more: what is right stays, what failed is made anew, at most thrice.
    for tries in (2, 3, 3):
        supervise(job, file, said.append)
        counts = [line["row"] for line in file.lines() if "row" in line and "ended" not in line]
        assert (counts.count("raises"), counts.count("wrong"), counts.count("right")) == (tries, tries, 1)


def test_a_part_that_is_killed_keeps_its_rows_and_goes_on(planted, tmp_path):
    file, job = planted
    program = (
        "import planted_rows; from benchmarks.gpu.supervisor import *; from benchmarks.gpu.row import RowFile\n"
        "planted_rows.title()\n"
        f"supervise(Job((10,), 600.0, rehearse=True, worker='planted_rows'), RowFile(Path({str(tmp_path)!r})))"
    )
    started = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    until = time.monotonic() + 600
    while "right" not in found_in(file) and time.monotonic() < until:
        time.sleep(0.05)
    started.send_signal(signal.SIGKILL)
    started.wait()
    with file.path.open("a") as cut:
        cut.write('{"part": 10, "row": "wr')  # as a process leaves it that is killed while it writes
    before = found_in(file)
    assert before["right"]["right"]
    assert supervise(job, file, lambda text: None) == 0
    assert found_in(file)["right"] == before["right"]
    assert set(found_in(file)) > {"wrong", "slow", "faults"}


def test_a_part_whose_rows_cannot_be_listed_says_why(planted, monkeypatch):
    file, job = planted
    monkeypatch.setenv("PLANTED_WITHOUT", "1")
    assert supervise(job, file, lambda text: None) == 0
    (only,) = found_in(file).values()
    assert only["error"].startswith("ModuleNotFoundError: No module named 'pytest'")


def test_a_part_with_processes_that_die_before_any_row_has_failed(planted, monkeypatch):
    file, job = planted
    monkeypatch.setenv("PLANTED_DEATH", "1")
    said = []
    assert supervise(job, file, said.append) == 0
    (only,) = found_in(file).values()
    assert only["error"].startswith("a process was ended outside of any row, its process ended with exit code 1")
    assert len(said) == 4, "thrice a process, and the row"
    assert verdict.is_bad([only])
    assert verdict.last_line(PLANTED, [only], []) == "part 10, planted: failed: all"


def test_a_rehearsal_by_triton_without_numpy_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(worker, "find_spec", lambda name: None if name == "numpy" else name)
    assert worker.prepared(Place("cpu", True)).startswith(
        "--rehearse runs kernels by Triton's interpreter, which needs numpy"
    )


def test_a_part_ends_when_its_time_is_over(planted):
    file, job = planted
    job.seconds, job.only = 4.0, "never ends|slow"
    begin = time.monotonic()
    assert supervise(job, file, lambda text: None) == 0
    assert time.monotonic() - begin < 900  # of the 1000 that the row would take
    assert "error" in found_in(file)["never ends"]


def test_without_space_it_says_so_and_leaves_no_process(planted, capfd, tmp_path):
    file, job = planted
    file.path.symlink_to("/dev/full")
    said = []
    assert supervise(job, file, said.append) == NO_SPACE
    assert said == [f"cannot write to {file.path}: No space left on device"]
    (tmp_path / "file").write_text("")
    assert command.main(["--part", "1", "--rehearse", "--out", str(tmp_path / "file")]) == NO_SPACE
    assert "cannot write to" in capfd.readouterr().out


@pytest.mark.parametrize("part", ["0", "10", "right", ""])
def test_a_wrong_part_is_refused_with_those_that_there_are(part, capsys):
    with pytest.raises(SystemExit):
        command.main(["--part", part, "--out", "."])
    assert "choose from" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--seconds", "0"], ["--seconds", "nan"], ["--only", "("]])
def test_a_wrong_option_is_refused(options, capsys):
    with pytest.raises(SystemExit):
        command.main(["--part", "1", "--out", ".", *options])
    assert options[0] in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_says_so_in_one_line_and_fails(capsys, tmp_path):
    assert command.main(["--part", "1", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().out.count("\n") == 1


def test_rows_of_another_machine_count_for_nothing_and_again_makes_all():
    rows = [Row(name, dict) for name in "abcd"]
    old = {"part": 1, "machine": CARD, "begun": 1.0}
    lines = [
        {**old, "row": "a"},
        {**old, "row": "a", "ended": "then", "right": True},
        {**old, "row": "b"},
        {**old, "row": "c", "machine": "another"},
        {**old, "row": "c", "machine": "another", "ended": "then"},
    ]
    names = lambda since, lines: [each.name for each in row.order(rows, 1, lines, {"machine": CARD}, since)]  # noqa: E731
    assert names(2.0, lines) == ["c", "d", "b"], "b was cut off, so it comes last"
    assert names(0.5, lines) == ["c", "d"], "b began in this run"
    assert names(2.0, []) == list("abcd")
    assert set(begun(lines)) == {(1, "b")}


def test_a_row_that_needs_more_memory_than_there_is_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**31))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    made = worker._made(Row("large", lambda place: pytest.fail("made"), gib=2.5), Place("cuda"))
    assert made == {"skipped": "it needs 2.5 GiB, and 1.0 are free"}
    assert worker._made(Row("small", lambda place: {"right": True}, gib=0.5), Place("cuda")) == {"right": True}


def test_a_step_that_torch_made_is_not_timed_for_one_of_kernels():
    steps = SimpleNamespace(reason=None)
    decision = SimpleNamespace(steps=steps, _parts=[SimpleNamespace(reason=None)], _readings=[])
    optimizer = SimpleNamespace(_update=SimpleNamespace(decision=decision))
    ways.check_stepped(optimizer)
    decision._parts[0].reason = "it does not compile"
    with pytest.raises(RuntimeError, match="torch stepped, and not kernels: it does not compile"):
        ways.check_stepped(optimizer)
    found = timed_rows.measured(
        {"torch": lambda: list, "by Triton": lambda: ways.check_stepped(optimizer)}, Place("cpu", True)
    )
    assert set(found["ways"]) == {"torch"}
    assert found["error"].startswith("by Triton: RuntimeError: torch stepped, and not kernels")


def test_times_of_a_rehearsal_decide_nothing():
    line = {"part": 2, "row": "fp32", "ended": "2026", "machine": "rehearsal on x", **planted_rows._timed(None)}
    line["judges"] = {"rule AdamW": ["ours", "torch"]}
    assert verdict.switch_lines([line]) == []
    assert verdict.over_goal(line) == []
    assert len(verdict.switch_lines([{**line, "machine": CARD}])) == 1


@pytest.mark.parametrize("part", PARTS)
def test_a_part_takes_at_most_eight_minutes_of_a_card_by_its_own_estimate(part):
    rows = import_module(PARTS[part][0]).rows(part, Place("meta"))
    assert sum(each.seconds for each in rows) / row.TOGETHER.get(part, 1) <= 480
    assert len({each.name for each in rows}) == len(rows)


# Of every part a row or two that cost little; `--part all --rehearse` makes all.
FEW = r"^(AdamW, float32|kernels|planted slow_body|e4m3fn, row, float32|fp32|one product|matrices rounded)$"
FEW += (
    r"|^4 x Linear\(64\), bf16$|tokens, eager, fp8 rowwise|ViT-S/16, bf16$|^test_cuda_apex$|^ZeRO-2, fp16$|, ring_attn"
)


@pytest.mark.slow
def test_every_part_is_rehearsed(tmp_path, capsys):
    assert command.main(["--part", "all", "--rehearse", "--out", str(tmp_path), "--only", FEW]) == 0
    check(tmp_path, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_of_every_part_is_rehearsed(tmp_path, capsys):
    assert command.main(["--part", "all", "--rehearse", "--out", str(tmp_path), "--seconds", "2000"]) == 0
    rows = check(tmp_path, capsys.readouterr().out)
    assert len(rows) > 100
    assert {name for line in rows.values() for name in line.get("judges", {})} <= set(switches.NAMES)


def check(folder, said):
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    rows = ended(lines)
    assert {part for part, _ in rows} == set(PARTS)
    assert not [line for line in rows.values() if "error" in line or line.get("right") is False]
    assert all(f"part {part}, {title}: " in said for part, (_, title) in PARTS.items())
    assert all(f"## Part {part}: " in (folder / "report.md").read_text() for part in PARTS)
    return rows


class Recording:
    """In the place of `torch.cuda`: torch's optimizers know when something is recorded."""

    def __init__(self, monkeypatch):
        self.is_on, self.replay = False, lambda: None
        self.Stream = self.current_stream = self.CUDAGraph = lambda: self
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_on)
        stream = SimpleNamespace(is_capturing=lambda: self.is_on)  # which torch 2.13 asks
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)

    def wait_stream(self, stream):
        pass

    def stream(self, stream):
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def graph(self, graph):
        self.is_on = True
        yield
        self.is_on = False


@pytest.mark.parametrize("precision", ways.HALF)
def test_a_graph_by_hand_lets_torch_record_its_step_and_keeps_what_it_reads(precision, monkeypatch):
    net, x, y = models.tiny("cpu"), torch.randn(8, 64), torch.randint(0, 64, (8,))
    weight = weakref.ref(net[0].weight)
    replay = ways.torch_graph(net, torch.nn.CrossEntropyLoss(), x, y, precision, cuda=Recording(monkeypatch))
    del net
    gc.collect()
    assert weight() is not None
    replay()
