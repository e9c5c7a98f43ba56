"""`booster report` and `booster compare`: what runs did, and where two of them part, from the records that they wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence

from booster.cli import option_values as values
from booster.cli.option_values import exit_on
from booster.common.untrusted_files import replace_regular


def report(argv: Sequence[str]) -> int:
    """Run `booster report` with the options `argv`; returns 0, or 1 where there is no record, or a damaged one."""
    parser = values.command_parser("report", "Show what a run did, from the record of Booster.record.")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    output.add_argument(
        "--html",
        type=values.file_path,
        nargs="?",
        const=True,  # a string would have to be a legal name
        metavar="FILE",
        help="write one page with pictures instead of tables (needs matplotlib); FOLDER/report.html without a name",
    )
    parser.add_argument(
        "folder", type=values.file_path, nargs="?", metavar="FOLDER", help="the folder given to Booster.record"
    )
    options = parser.parse_args(list(argv))
    if options.folder is None and options.html not in (None, True):  # `--html FOLDER`: argparse takes it for the page
        options.folder, options.html = options.html, True
    if options.folder is None:
        parser.error("the following arguments are required: FOLDER")
    if options.html is True:
        options.html = options.folder / "report.html"
    from booster.numerics.record.record_file import as_json
    from booster.numerics.record.recorded_run import read_run
    from booster.numerics.reports.page import page
    from booster.numerics.reports.summary import summarise
    from booster.numerics.reports.terminal import show

    with exit_on("report", OSError, ValueError, ImportError, status=1):
        run = read_run(options.folder)
        if options.html is not None:
            replace_regular(options.html, page(run).encode())
            print(f"wrote {options.html}")
        elif options.json:
            print(json.dumps(as_json(summarise(run).as_dict()), indent=2))
        else:
            show(run)
    return 0


def compare(argv: Sequence[str]) -> int:
    """Run `booster compare` with the options `argv`; returns 0 where the runs are alike, 1 where they part, 2 for trouble."""
    parser = values.command_parser(
        "compare",
        "Say in which step two runs part by more than their formats explain, and by which parameter.",
        epilog="status: 0 the runs are alike, 1 they part, 2 trouble",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("a", type=values.file_path, metavar="RUN_A", help="a folder that was given to Booster.record")
    parser.add_argument("b", type=values.file_path, metavar="RUN_B", help="another")
    options = parser.parse_args(list(argv))
    from booster.numerics.record.record_file import as_json
    from booster.numerics.record.recorded_run import read_run
    from booster.numerics.reports.compare import compare as compared

    with exit_on("compare", OSError, ValueError, status=2):
        found = compared(read_run(options.a), read_run(options.b))
    if options.json:
        print(json.dumps(as_json(found.as_dict()), indent=2))
    else:
        print("\n".join(values.wrapped(line) for line in str(found).split("\n")))
    return 0 if found.alike else 1
