"""A short run of the random programs, the same each time; `make fuzz` runs as many others as wanted."""

import functools
import itertools
import re
import sys
from types import SimpleNamespace

import one_device
import pytest
import ranks
import run as run_programs
from pool import RankPool
from program import Disagreement, Program, outcome_of, shrink


def check(run, draw, defaults, seeds, limit):
    """Run the programs of `seeds`, of which most make sense; of the first that differs, print a smaller one."""
    valid = 0
    for seed in seeds:
        program = draw(seed)
        outcome = outcome_of(run, program)
        valid += outcome.valid
        if outcome.failure is not None:
            small = shrink(run, program, defaults, limit)
            pytest.fail(f"program {seed}: {outcome.failure}\n{small}\n# {outcome_of(run, small).failure}")
    assert valid > len(seeds) / 2


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (20, 40, 60))])
@pytest.mark.filterwarnings("ignore")
def test_programs_on_one_device(first):
    check(one_device.run, one_device.draw, one_device.DEFAULTS, range(first, first + 20), limit=200)


@pytest.fixture(scope="module")
def run_on_two():
    pool = RankPool(2, num_cases=1000)
    yield lambda function, world_size, program: pool.run(function, program)
    pool.close()


@pytest.mark.slow_cases("PP interleaved", "ZeRO-1")
@pytest.mark.parametrize("placement", [name for name, (size, _) in ranks.PLACEMENTS.items() if size == 2])
@pytest.mark.filterwarnings("ignore")
def test_programs_on_two_ranks(run_on_two, placement):
    draw = functools.partial(ranks.draw, placement)
    check(ranks.OnRanks(run_on_two), draw, ranks.DEFAULTS, range(5), limit=20)


def test_ranks_that_drift_apart_by_a_rounding_are_found(run_on_two):
    program = Program("DDP", {"seed": 3, "precision": "fp32", "scale": 1.0}, [("drift", 1), ("step",)])
    with pytest.raises(Disagreement, match=r"operation 1, \('step',\): norm.bias differs among ranks"):
        ranks.OnRanks(run_on_two)(program)


@pytest.mark.crossed
@pytest.mark.parametrize("placement", ["FSDP", "TP", "PP interleaved"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_part_of_a_weight_is_found_on_either_rank(run_on_two, placement, rank):
    setting = {"seed": 3, "precision": "fp32", "scale": 1.0, "parts": ["mlp"] * 4}
    program = Program(placement, setting, [("evaluate", 1), ("spoil", rank)])
    with pytest.raises(Disagreement, match=rf"operation 1, .*: rank {rank}: weight parts\.\d.* is 0\.1 off"):
        ranks.OnRanks(run_on_two)(program)


def test_a_later_run_goes_on_where_one_ended(tmp_path, monkeypatch, capsys):
    record = tmp_path / "counts"
    monkeypatch.setattr(sys, "argv", ["run.py", "--placement", "one device", "--turn=1", f"--record={record}"])
    monkeypatch.setattr(one_device, "run", lambda program: None)
    drawn = []
    monkeypatch.setattr(one_device, "draw", drawn.append)
    for _ in range(2):
        sys.argv.append("--programs=2")
        assert run_programs.main() == 0
    assert drawn == [0, 1, 2, 3]
    assert "next seeds: one device 4" in capsys.readouterr().out
    assert [turn["next_seed"] for turn in run_programs.turns_of(record)] == [1, 2, 3, 4]


def test_a_run_ends_by_time_and_says_what_it_has_done(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "--placement", "one device", "--turn=2", "--seconds=5"])
    monkeypatch.setattr(one_device, "run", lambda program: None)
    monkeypatch.setattr(one_device, "draw", lambda seed: None)
    clock = itertools.count()
    monkeypatch.setattr(run_programs, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert run_programs.main() == 0
    out = capsys.readouterr().out
    assert re.search(r"\| one device \| .* \| 4 \| 0 \| 0 \| 2 \|\nnext seeds: one device 4\n", out)


BACKWARD, CLIP, STEP, CLEAR = ("backward", 1, None), ("clip_norm", 0.1), ("step",), ("zero_grad", True)
LOOP = [BACKWARD, CLIP, STEP, CLEAR]


@pytest.mark.parametrize("precision", one_device.PRECISIONS)
def test_a_program_that_computes_something_else_is_found_and_made_smaller(monkeypatch, precision):
    unclipped = one_device.Oracle.norm
    monkeypatch.setattr(
        one_device.Oracle, "clip_norm", lambda self, max_norm, norm_type=2.0: unclipped(self, norm_type)
    )
    setting = {"seed": 3, "precision": precision, "scale": 16.0, "num_groups": 2, "parts": ["linear"]}
    program = Program("one device", setting, [BACKWARD, STEP, CLEAR, ("evaluate", 5), *LOOP, *LOOP])
    small = shrink(one_device.run, program, one_device.DEFAULTS)
    assert small.operations == [BACKWARD, CLIP, STEP]
    assert small.setting == {"seed": 3, "precision": precision, "scale": 16.0}
    with pytest.raises(Disagreement, match=r"operation 2, \('step',\): weight .* off, allowed"):
        one_device.run(small)


def test_a_program_prints_as_what_makes_it():
    program = Program("one device", {"seed": 1, "frozen": [2]}, [("backward", 4, None), ("step",)])
    assert str(program) == (
        "Program(\n    'one device',\n    {'seed': 1, 'frozen': [2]},\n    [\n"
        "        ('backward', 4, None),\n        ('step',),\n    ],\n)"
    )
