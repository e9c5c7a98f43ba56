"""`booster compare`: where two runs part by more than their formats explain."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from booster.cli import values
from booster.cli.trouble import told

__all__ = ["compare"]


def compare(argv: Sequence[str]) -> int:
    """Run `booster compare` with the options `argv`; returns 0 where the runs are alike, 1 where they part, 2 for trouble."""
    parser = argparse.ArgumentParser(
        prog="booster compare",
        description="Say in which step two runs part by more than their formats explain, and by which parameter.",
        epilog="status: 0 the runs are alike, 1 they part, 2 trouble",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("a", type=values.file_path, metavar="RUN_A", help="a folder that was given to Booster.record")
    parser.add_argument("b", type=values.file_path, metavar="RUN_B", help="another")
    options = parser.parse_args(list(argv))
    from booster.numerics.compare import compare as compared
    from booster.numerics.lines import as_json
    from booster.numerics.run import read_run

    with told("compare", OSError, ValueError, status=2):
        found = compared(read_run(options.a), read_run(options.b))
    print(json.dumps(as_json(found.as_dict()), indent=2) if options.json else found)
    return 0 if found.alike else 1
