"""`booster report`: what a run did, from the record that it wrote."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from booster.cli import values
from booster.cli.trouble import told

__all__ = ["report"]


def report(argv: Sequence[str]) -> int:
    """Run `booster report` with the options `argv`; returns 0, or 1 where there is no record, or a damaged one."""
    parser = argparse.ArgumentParser(
        prog="booster report", description="Show what a run did, from the record of Booster.record.", allow_abbrev=False
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    output.add_argument(
        "--html", type=values.file_path, metavar="FILE", help="write one page with pictures instead of tables"
    )
    parser.add_argument("folder", type=values.file_path, metavar="FOLDER", help="the folder given to Booster.record")
    options = parser.parse_args(list(argv))
    from booster.numerics.lines import as_json
    from booster.numerics.page import page
    from booster.numerics.run import read_run
    from booster.numerics.summary import summarise
    from booster.numerics.terminal import show

    with told("report", OSError, ValueError, ImportError, status=1):
        run = read_run(options.folder)
        if options.html is not None:
            options.html.write_text(page(run), encoding="utf-8")
            print(f"wrote {options.html}")
        elif options.json:
            print(json.dumps(as_json(summarise(run).as_dict()), indent=2))
        else:
            show(run)
    return 0
