"""A fuzzer of records: what `read_run` takes, all readers take; what it refuses, it refuses by file and line.

A failure names its seed: `spoiled(folder, random.Random(seed))` makes the same record.
"""

import json
import random
import re
import resource
import sys
import time

import pytest
from test_hostile_checkpoints import ODD, places
from test_hostile_records import SAMPLE, written

from booster.cli import main
from booster.numerics import read_run

HUGE = [
    1e308,
    -1e308,
    1e154,
    5e-324,
    2**62,
    2**63,
    2400,
    -2400,
    256,
    "nan",
    "inf",
    "-inf",
    0.0,
    -1.0,
    True,
    [],
    "float64",
]


WHERE = r"line \d+ of .*rank-0000[01]|rank-0000[01]\.jsonl (does not begin|was written by a later)"


def clean(folder):
    """A record of two ranks, three steps and three samples."""
    folder.mkdir(exist_ok=True)
    first = written(folder, run={"world_size": 2}) / "rank-00000.jsonl"
    step = json.loads(first.read_text().splitlines()[1])
    more = [step | {"step": 3, "time": 3.5, "grad_norm": 2.0, "clip": 0.5}]
    more += [SAMPLE, SAMPLE | {"name": "b", "low": -3}, SAMPLE | {"of": "activation", "step": 3}]
    with first.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in more))
    other = first.read_text().replace('"rank": 0', '"rank": 1')
    first.with_name("rank-00001.jsonl").write_text(other)
    return folder


def spoiled(folder, draw):
    """Change one to three places of a clean record, or its bytes."""
    path = draw.choice(sorted(clean(folder).glob("rank-*")))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if draw.randrange(8) == 0:
        data = bytearray(path.read_bytes())
        start = draw.randrange(len(data))
        data[start : start + draw.choice([0, 1, 100])] = draw.randbytes(draw.choice([0, 1, 8]))
        path.write_bytes(data)
        return
    for _ in range(draw.choice([1, 1, 2, 3])):
        holder, key = draw.choice(places(lines))
        how = draw.randrange(6)
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(holder, dict):
            holder[str(draw.choice(ODD))] = holder.pop(key)
        elif how == 2 and isinstance(holder[key], list):
            holder[key] = holder[key] * draw.choice([2, 1000])
        else:
            holder[key] = draw.choice(draw.choice([ODD, HUGE]))
        lines = json.loads(json.dumps(lines))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def numbers_of(folder):
    """What the files say of steps that one rank alone speaks of: their losses, by optimizer and step."""
    found = {}
    for path in sorted(folder.glob("rank-*")):
        own = {}
        for text in path.read_bytes().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and line.get("kind") == "step":
                # A step that is not after the one before it begins anew, without what it went back behind.
                own = {key: kept for key, kept in own.items() if key[0] != line["optimizer"] or key[1] < line["step"]}
                own[line["optimizer"], line["step"]] = line
        for key, line in own.items():
            found.setdefault(key, []).append(line)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory in the units of Linux")
@pytest.mark.parametrize("number", [8, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_changed_record_is_refused_by_file_and_line_or_read_by_every_reader(tmp_path, capsys, number):
    pytest.importorskip("rich", reason="the summary is drawn by rich")
    good, folder, page = clean(tmp_path / "good"), tmp_path / "bad", str(tmp_path / "page.html")
    assert main(["report", "--html", page, str(good)]) == main(["report", str(good)]) == 0
    outcomes = {"refused": 0, "read": 0}
    for seed in range(number):
        spoiled(folder, random.Random(seed))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        began = time.process_time()
        run, refusal = None, ""
        try:
            run = read_run(folder)
        except ValueError as error:
            refusal = str(error)
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        else:
            outcomes["read"] += 1
            said = numbers_of(folder)
            assert {(name, step.number) for name in run.steps for step in run.steps[name]} == {
                (name.encode("unicode_escape").decode() if not name.isprintable() else name, step)
                for name, step in said
            }, f"seed {seed}"
            for name, steps in run.steps.items():
                for step in steps:
                    if (name, step.number) in said:
                        assert step.applied == all(line["applied"] for line in said[name, step.number]), f"seed {seed}"
        refused = run is None
        assert not refused or re.search(WHERE, refusal), f"seed {seed}: {refusal}"
        for argv in (["report"], ["report", "--json"], ["report", "--html", page], ["compare", str(good)]):
            try:
                status = main([*argv, str(folder)])
            except Exception as error:
                raise AssertionError(f"seed {seed}: {argv[0]} {argv[1:2]}: {type(error).__name__}: {error}") from error
            heard = capsys.readouterr()
            if argv[0] == "report":
                assert (status == 0) == (not refused), f"seed {seed}: {argv}: {heard.err}"
            else:
                in_common = "no step in common" in heard.err
                assert (status == 2) == (refused or in_common), f"seed {seed}: {heard.err}"
            assert "\x1b" not in heard.out + heard.err, f"seed {seed}"
        grew = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        assert grew < 64 * 2**20, f"seed {seed}: {grew} bytes"
        assert time.process_time() - began < 60, f"seed {seed}"
    assert min(outcomes.values()) > number // 10, outcomes
