"""Commands that read what runs wrote: `booster checkpoint` a checkpoint, `booster report` and `booster compare` records."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from booster.cli import option_values as values
from booster.cli.option_values import exit_on
from booster.common.untrusted_files import printable, replace_regular


def checkpoint(argv: Sequence[str]) -> int:
    """Run `booster checkpoint` with the options `argv`; returns 0, or 1 for a checkpoint that is damaged or missing."""
    options = _parser().parse_args(list(argv))
    from booster.checkpoint import CheckpointError

    with exit_on("checkpoint", CheckpointError, OSError, ImportError, status=1):
        return {"show": _show, "verify": _verify, "convert": _convert}[options.action](options)


def _parser() -> argparse.ArgumentParser:
    parser = values.command_parser("checkpoint", "List, verify and convert checkpoints of Booster.save.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="{show,verify,convert}")
    show = actions.add_parser("show", help="list what a checkpoint holds", allow_abbrev=False)
    show.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    verify = actions.add_parser(
        "verify", help="compare every byte of every checkpoint with its hash", allow_abbrev=False
    )
    convert = actions.add_parser("convert", help="write the weights as plain files", allow_abbrev=False)
    convert.add_argument("--model", default="0", help="the name of the model, where several were saved (default: 0)")
    convert.add_argument("--masters", action="store_true", help="float32 masters in place of half weights, where kept")
    convert.add_argument("--torch", action="store_true", help="write files of torch.save instead of safetensors")
    convert.add_argument(
        "--shard", type=values.whole(1), metavar="MB", help="write files of at most so many MB and an index"
    )
    for action in (show, verify, convert):
        action.add_argument("folder", type=values.file_path, metavar="FOLDER", help="a checkpoint, or a folder of them")
    convert.add_argument(
        "target", type=values.file_path, metavar="TARGET", help="the file, or with --shard the folder, to write"
    )
    return parser


def _show(options: argparse.Namespace) -> int:
    from booster.checkpoint.folder import standing
    from booster.checkpoint.manifest import read_manifest
    from booster.checkpoint.state_tree import read_tree

    folder = _newest(standing(options.folder))
    manifest = read_manifest(folder)
    tree = read_tree(folder, manifest)
    kinds: dict[str, list[Any]] = {}
    for name, tensor in manifest.tensors.items():
        kinds.setdefault("/".join(name.split("/")[:2]), []).append(tensor)
    report = {
        "folder": str(folder),
        "step": manifest.step,
        "world_size": manifest.world_size,
        **dict(manifest.versions),
        **tree.get("run", {}),
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "tensors": {
            kind: {
                "number": len(tensors),
                "elements": sum(math.prod(tensor.shape) for tensor in tensors),
                "dtypes": sorted({tensor.dtype for tensor in tensors}),
            }
            for kind, tensors in sorted(kinds.items())
        },
        "parameters": {
            name: [tensor.dtype, list(tensor.shape)]
            for name, tensor in manifest.tensors.items()
            if name.startswith("models/")
        },
    }
    if options.json:
        print(json.dumps(report, indent=2))
        return 0
    for key in [key for key in report if key not in ("tensors", "parameters")]:
        print(values.wrapped(printable(f"{key:<12}{report[key]}")))
    for kind, own in report["tensors"].items():
        of = ", ".join(own["dtypes"])
        print(values.wrapped(printable(f"{kind:<24}{own['number']:>6} tensors {own['elements']:>14,} elements  {of}")))
    for name, (dtype, shape) in report["parameters"].items():
        print(values.wrapped(printable(f"  {name.partition('/')[2]}  {dtype} {tuple(shape)}")))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from booster.checkpoint.folder import checkpoints, damage, standing
    from booster.checkpoint.manifest import MANIFEST, CheckpointError

    folder = standing(options.folder)
    found = [folder] if (folder / MANIFEST).exists() else [path for _, path in checkpoints(folder)]
    if not found:
        raise CheckpointError(f"there is no checkpoint in {options.folder}")
    bad = 0
    for path in found:
        problems = damage(path)
        bad += bool(problems)
        print(printable(f"{path}: {'whole' if not problems else '; '.join(problems)}"))
    return 1 if bad else 0


def _convert(options: argparse.Namespace) -> int:
    from booster.checkpoint.folder import damage, standing
    from booster.checkpoint.manifest import CheckpointError, read_manifest
    from booster.checkpoint.saved_checkpoint import SavedCheckpoint
    from booster.checkpoint.weight_files import ExportedTensor, FileOptions, export

    folder = _newest(standing(options.folder))
    problems = damage(folder)
    if problems:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(problems)}")
    manifest = read_manifest(folder)
    prefix = f"models/{options.model}/"
    names = {name.removeprefix(prefix): name for name in manifest.tensors if name.startswith(prefix)}
    if not names:
        models = sorted({name.split("/")[1] for name in manifest.tensors if name.startswith("models/")})
        raise CheckpointError(f"{folder} holds no model {options.model!r}; choose one of {models}")
    if options.masters:
        masters = SavedCheckpoint(folder).masters_behind("models", options.model)
        names |= {key: name for key, name in masters.items() if key in names}
    export(
        folder,
        manifest,
        {name: ExportedTensor.as_stored(stored, manifest.tensors[stored]) for name, stored in names.items()},
        options.target,
        FileOptions(options.shard is not None, None, options.shard or 0, not options.torch),
    )
    print(f"wrote {options.target}")
    return 0


def _newest(folder: Path) -> Path:
    from booster.checkpoint.folder import latest
    from booster.checkpoint.manifest import MANIFEST, CheckpointError

    if (folder / MANIFEST).exists():
        return folder
    found = latest(folder)
    if found is None:
        raise CheckpointError(f"there is no valid checkpoint in {folder}")
    return found


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
