"""A short run of the random programs, the same each time; `make fuzz` runs as many others as wanted."""

import functools

import one_device
import pytest
import ranks
from pool import RankPool
from program import Disagreement, Program, failure_of, shrink


def check(run, draw, defaults, seeds, limit):
    """Run the programs of `seeds`; of the first that differs, print a smaller one."""
    for seed in seeds:
        program = draw(seed)
        failure = failure_of(run, program)
        if failure is not None:
            small = shrink(run, program, defaults, limit)
            pytest.fail(f"program {seed}: {failure}\n{small}\n# {failure_of(run, small)}")


@pytest.mark.parametrize("first", range(0, 80, 20))
@pytest.mark.filterwarnings("ignore")
def test_programs_on_one_device(first):
    check(one_device.run, one_device.draw, one_device.DEFAULTS, range(first, first + 20), limit=200)


@pytest.fixture(scope="module")
def run_on_two():
    pool = RankPool(2)
    yield lambda function, world_size, program: pool.run(function, program)
    pool.close()


@pytest.mark.parametrize("placement", [name for name, (size, _) in ranks.PLACEMENTS.items() if size == 2])
@pytest.mark.filterwarnings("ignore")
def test_programs_on_two_ranks(run_on_two, placement):
    draw = functools.partial(ranks.draw, placement)
    check(ranks.OnRanks(run_on_two), draw, ranks.DEFAULTS, range(4), limit=20)


def test_ranks_that_drift_apart_by_a_rounding_are_found(run_on_two):
    program = Program("DDP", {"seed": 3, "precision": "fp32", "scale": 1.0}, [("drift", 1), ("step",)])
    with pytest.raises(Disagreement, match=r"operation 1, \('step',\): rank 0: norm.bias differs among ranks"):
        ranks.OnRanks(run_on_two)(program)


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
