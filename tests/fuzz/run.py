"""Run many random programs in every placement, and print those that differ, made smaller; `make fuzz` calls this."""

import argparse
import collections
import functools
import sys
import time
import warnings

import one_device
import ranks
from pool import RankPool
from program import failure_of, shrink


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--placement", nargs="*", default=["one device", *ranks.PLACEMENTS])
    parser.add_argument("--programs", type=int, default=1000, help="of each placement")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="to spend on each placement at most")
    parser.add_argument(
        "--shrink", type=int, default=5, help="how many programs that differ to make smaller, of each placement"
    )
    parser.add_argument("--skip", default="", help="leave out programs whose text holds one of these, by commas")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    differ = 0
    for placement in options.placement:
        differ += run_placement(placement, options)
    return bool(differ)


def run_placement(placement, options):
    pool = None
    if placement == "one device":
        run, draw, defaults = one_device.run, one_device.draw, one_device.DEFAULTS
    else:
        pool = RankPool(ranks.PLACEMENTS[placement][0], case_timeout=90)
        run = ranks.OnRanks(lambda function, _, program: pool.run(function, program))
        draw, defaults = functools.partial(ranks.draw, placement), ranks.DEFAULTS
    start, kinds, count = time.monotonic(), collections.Counter(), 0
    for seed in range(options.seed, options.seed + options.programs):
        if time.monotonic() - start > options.seconds:
            break
        program = draw(seed)
        if any(word and word in str(program) for word in options.skip.split(",")):
            continue
        count += 1
        failure = failure_of(run, program)
        if failure is None:
            continue
        kinds[program.setting["precision"]] += 1
        print(f"{placement}, seed {seed}: {failure}", flush=True)
        if sum(kinds.values()) <= options.shrink:
            small = shrink(run, program, defaults, limit=200 if pool is None else 60)
            print(f"{small}\n# {failure_of(run, small)}\n", flush=True)
    if pool is not None:
        pool.close()
    took = time.monotonic() - start
    print(f"{placement}: {count} programs, {sum(kinds.values())} differ, {took:.0f} s; {dict(kinds)}", flush=True)
    return sum(kinds.values())


if __name__ == "__main__":
    sys.exit(main())
