"""What `import booster` adds to `import torch`, in milliseconds: the goal is less than 100.

    python -m benchmarks.import_time

The sum of the own times, as `python -X importtime` reports them, of all modules that torch alone does not load; the
shortest of six runs, because a busy machine only ever adds.
"""

import subprocess
import sys

from benchmarks.timing import describe_machine

RUNS = 6


def own_times(statement: str) -> dict[str, int]:
    """Microseconds of each module that `statement` loads, without those it imports in turn."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", statement], capture_output=True, text=True, check=True
    )
    rows = (line.removeprefix("import time:").split("|") for line in done.stderr.splitlines() if line.count("|") == 2)
    return {name.strip(): int(own) for own, _, name in rows if own.strip().isdigit()}


def main() -> None:
    torch_alone = own_times("import torch")
    runs = [own_times("import torch; import booster") for _ in range(RUNS)]
    added = [{name: time for name, time in run.items() if name not in torch_alone} for run in runs]
    best = min(added, key=lambda run: sum(run.values()))
    print(describe_machine())
    print(f"import booster adds {sum(best.values()) / 1e3:.0f} ms in {len(best)} modules to import torch")
    for name, microseconds in sorted(best.items(), key=lambda item: -item[1])[:5]:
        print(f"  {microseconds / 1e3:6.1f} ms  {name}")


if __name__ == "__main__":
    main()
