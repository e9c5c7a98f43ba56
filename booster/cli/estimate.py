"""`booster estimate`: what training takes of memory, before it is started."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, get_args

from booster.cli import values

__all__ = ["estimate"]

_PRECISIONS = "fp32,bf16,bf16_naive,bf16_naive+8bit"
_PACKED = "+8bit"


def estimate(argv: Sequence[str]) -> int:
    """Run `booster estimate` with the options `argv`; returns 0, or 1 where nothing could be estimated."""
    parser = argparse.ArgumentParser(
        prog="booster estimate",
        description="Estimate the memory of a training step on one rank. Nothing is allocated, and no ranks are needed.",
        allow_abbrev=False,
    )

    def add(name: str, **settings: Any) -> None:
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), **settings)

    add("precision", type=_precisions, default=_PRECISIONS, metavar="A,B", help=f"default: {_PRECISIONS}")
    add(
        "plugin",
        type=_plugins,
        default="single",
        metavar="A,B",
        help="single, ddp, zero1, zero2, fsdp; default: single",
    )
    add("world_size", type=_sizes, default="1", metavar="N,M", help="ranks, for all plugins but single")
    add("batch_size", type=values.whole(1), metavar="N", help="samples of one rank")
    add("memory", type=_gibibytes, metavar="GIB", help="say what fits into so much, the largest batch, what to change")
    add(
        "device",
        default="cpu",
        choices=["cpu", "cuda"],
        help="default: cpu; cuda needs a build of torch for CUDA, and no GPU",
    )
    add("release_gradients", choices=["exact", "previous_norm"], help="step within the backward pass")
    add("clips", action="store_true", help="gradients are clipped; says something with --release_gradients")
    add(
        "offload_states",
        action="store_true",
        help="of optimizers, with masters, into the host's memory; says something with --device cuda",
    )
    add("json", action="store_true", help="print one JSON object instead of a table, bytes as numbers")
    add("picture", type=values.file_path, metavar="FILE", help="write stacked bars too (needs matplotlib)")
    parser.add_argument(
        "job",
        metavar="JOB",
        help="timm:NAME, transformers:NAME, or MODULE:FUNCTION or FILE.py:FUNCTION that returns (model, optimizer, batch, "
        "criterion)",
    )
    options = parser.parse_args(list(argv))
    if set(options.plugin) != {"single"} and options.world_size == [1]:
        parser.error("--plugin with several ranks needs --world_size")
    try:
        print(_answer(options), end="")
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"booster estimate: {error}", file=sys.stderr)
        return 1
    return 0


def _answer(options: argparse.Namespace) -> str:
    import dataclasses

    from booster.memory import compare, named_job, picture, show
    from booster.memory.estimate import estimate as estimate_one
    from booster.memory.fitting import largest_batch, resized, what_to_change

    job = named_job(options.job, options.batch_size)
    precisions = {name: _made(name) for name in options.precision}
    placements: dict[str, Any] = {"plugins": options.plugin, "world_sizes": options.world_size}
    ways: dict[str, Any] = {
        "device": options.device,
        "release_gradients": options.release_gradients or False,
        "clips": options.clips,
        "offload_states": options.offload_states,
    }
    parts = (job.model, job.optimizer, job.batch, job.criterion)
    found = [
        dataclasses.replace(each, precision=name)
        for name, precision in precisions.items()
        for each in compare(*parts, precisions=[precision], **(ways | placements))
    ]
    batches = advice = None
    if options.memory is not None:
        batches = {}
        for each in found:
            placed: dict[str, Any] = {"plugin": each.plugin, "world_size": each.world_size, **ways}
            chosen = {"precision": precisions[each.precision], **placed}

            def peak(size: int, chosen: Any = chosen) -> int:
                batch = resized(job.batch, size)
                return estimate_one(job.model, job.optimizer, batch, job.criterion, **chosen).peak

            batches[each.name] = largest_batch(peak, options.memory)
        advice = what_to_change(found, options.memory)
    if options.picture is not None:
        picture(found, options.picture, limit=options.memory)
    if options.json:
        answer: dict[str, Any] = {"estimates": [each.as_dict() for each in found]}
        if options.memory is not None:
            answer |= {"memory": options.memory, "largest_batch": batches, "advice": advice}
        return json.dumps(answer, indent=2) + "\n"
    show(found, limit=options.memory, batches=batches)
    return f"{advice}\n" if advice else ""


def _made(name: str) -> Any:
    """Return the precision; NAME+8bit is NAME with states of 8 bits, and masters of 24 where there are any."""
    from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, available, make

    if not name.endswith(_PACKED):
        if name not in available():
            raise ValueError(f"{name!r} is no precision; choose from {', '.join(available())}, or add {_PACKED}")
        return name
    kinds: dict[str, Any] = {"bf16_naive": BF16NaiveMixedPrecision, "fp16_naive": FP16NaiveMixedPrecision}
    plain = name.removesuffix(_PACKED)
    if plain in kinds:
        return kinds[plain](master_weights="split24", states="8bit")
    return make(plain).with_states("8bit")


def _precisions(text: str) -> list[str]:
    names = values.listed(text)
    for name in names:
        try:
            _made(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


def _plugins(text: str) -> list[str]:
    from booster.memory.estimate import Plugin

    names = values.listed(text)
    for name in names:
        if name not in get_args(Plugin):
            raise argparse.ArgumentTypeError(f"{name!r} is not estimated; choose from {', '.join(get_args(Plugin))}")
    return names


def _sizes(text: str) -> list[int]:
    return [values.whole(1)(part) for part in values.listed(text)]


def _gibibytes(text: str) -> int:
    return int(values.number(0, 2**20, "an amount of memory in GiB")(text) * 2**30)
