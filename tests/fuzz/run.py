"""Run many random programs in every placement, and print those that differ, made smaller; `make fuzz` calls this.

Placements take turns, so that a run that ends by time has done about as much of each. With --record a later run goes on where
this one ended, and counts are kept by the commit they were counted at.
"""

import argparse
import collections
import functools
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

import one_device
import ranks
from pool import RankPool
from program import outcome_of, shrink

SIZES = {"one device": 1, **{name: size for name, (size, _) in ranks.PLACEMENTS.items()}}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--placement", nargs="*", default=list(SIZES), choices=list(SIZES), metavar="PLACEMENT")
    parser.add_argument("--programs", type=int, default=1000, help="of each placement")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further turn begins")
    parser.add_argument("--turn", type=int, default=25, help="programs of one placement before the next has its turn")
    parser.add_argument("--record", type=Path, help="file of counts, to which this run adds; seeds go on where it ends")
    parser.add_argument("--table", action="store_true", help="print the counts of --record, and run nothing")
    parser.add_argument(
        "--shrink", type=int, default=5, help="how many programs that differ to make smaller, of each placement"
    )
    parser.add_argument("--skip", default="", help="leave out programs with one of these in their text, by commas")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.table:
        print(table(turns_of(options.record)))
        return 0
    return bool(run(options))


def run(options):
    """Return how many programs differ."""
    before = turns_of(options.record)
    seeds = {
        placement: max([options.seed, *(turn["next_seed"] for turn in before if turn["placement"] == placement)])
        for placement in options.placement
    }
    left = dict.fromkeys(options.placement, options.programs)
    commit, start, turns = commit_now(), time.monotonic(), []
    pools = Pools()
    try:
        while any(left.values()) and time.monotonic() - start < options.seconds:
            # Who has least has the next turn.
            placement = min((name for name in left if left[name]), key=lambda name: options.programs - left[name])
            count = min(options.turn, left[placement])
            shrinks = options.shrink - sum(len(turn["differ"]) for turn in turns if turn["placement"] == placement)
            turn = take_turn(pools, placement, range(seeds[placement], seeds[placement] + count), shrinks, options)
            seeds[placement] += count
            left[placement] -= count
            turns.append({"commit": commit, **turn, "next_seed": seeds[placement]})
            if options.record:
                with options.record.open("a") as file:
                    print(json.dumps(turns[-1]), file=file)
    finally:
        pools.close()
    print(table(turns), flush=True)
    print("next seeds: " + ", ".join(f"{name} {seed}" for name, seed in seeds.items()), flush=True)
    return sum(len(turn["differ"]) for turn in turns)


class Pools:
    """One pool of ranks for each number of ranks, kept warm; one of them works at a time."""

    def __init__(self):
        self._pools = {}

    def runner(self, placement):
        """Return what runs one program of `placement`."""
        if placement == "one device":
            return one_device.run
        size = SIZES[placement]
        if size not in self._pools:
            # A new group costs seconds; meshes are shared between programs, so that nothing adds up in an old one.
            self._pools[size] = RankPool(size, case_timeout=300, num_cases=2000)
        pool = self._pools[size]
        return ranks.OnRanks(lambda function, _, program: pool.run(function, program))

    def close(self):
        for pool in self._pools.values():
            pool.close()


def take_turn(pools, placement, seeds, shrinks, options):
    """Run the programs of `seeds`, print those that differ, and return the counts."""
    run = pools.runner(placement)
    draw = one_device.draw if placement == "one device" else functools.partial(ranks.draw, placement)
    defaults = one_device.DEFAULTS if placement == "one device" else ranks.DEFAULTS
    start, agree, invalid, differ = time.monotonic(), 0, 0, []
    for seed in seeds:
        program = draw(seed)
        if any(word and word in str(program) for word in options.skip.split(",")):
            continue
        valid, failure = outcome_of(run, program)
        if failure is None:
            agree += valid
            invalid += not valid
            continue
        differ.append(seed)
        print(f"{placement}, seed {seed}, {program.setting['precision']}: {failure}", flush=True)
        if len(differ) <= shrinks:
            small = shrink(run, program, defaults, limit=200 if placement == "one device" else 60)
            print(f"{small}\n# {outcome_of(run, small).failure}\n", flush=True)
    took = round(time.monotonic() - start, 1)
    return {"placement": placement, "agree": agree, "invalid": invalid, "differ": differ, "seconds": took}


# ---------------------------------------------------------------------- counts


def turns_of(record):
    if record is None or not record.exists():
        return []
    return [json.loads(line) for line in record.read_text().splitlines()]


def table(turns):
    """Counts by placement and commit, as a table of Markdown."""
    rows = collections.defaultdict(collections.Counter)
    for turn in turns:
        row = rows[turn["placement"], turn["commit"]]
        row.update({"agree": turn["agree"], "invalid": turn["invalid"], "differ": len(turn["differ"])})
        row["seconds"] += turn["seconds"]
    lines = ["| placement | commit | agree | make no sense | differ | seconds |", "|---|---|---|---|---|---|"]
    for (placement, commit), row in rows.items():
        numbers = [row["agree"], row["invalid"], row["differ"], round(row["seconds"])]
        lines.append(f"| {placement} | {commit} | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(lines)


def commit_now():
    """The short name of the commit that is checked out, with a + where files differ from it."""
    where = Path(__file__).parent
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=where, capture_output=True, text=True
    )
    return found.stdout.strip() or "no commit"


if __name__ == "__main__":
    sys.exit(main())
