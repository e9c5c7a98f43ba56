"""The parallelism that the command line names: the one thing in which the runs of the script differ."""

import argparse

from model import GPT_PLAN

from booster import plugin

PLUGINS = {
    "none": plugin.SingleDevice,
    "ddp": plugin.TorchDDPPlugin,
    "fsdp": lambda: plugin.TorchFSDPPlugin(),  # the lambdas load what they name only when they are called
    "zero1": lambda: plugin.LowLevelZeroPlugin(stage=1),
    "zero2": lambda: plugin.LowLevelZeroPlugin(stage=2),
}
STYLES = ("gpipe", "1f1b", "interleaved", "zbv")
HYBRID = {"tp": 1, "pp": 1, "zero_stage": 0, "pp_style": "1f1b", "microbatches": None}  # the options and their defaults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plugin", choices=(*PLUGINS, "hybrid"), default="none", help="parallelism (default: none)")
    group = parser.add_argument_group("with --plugin hybrid", "the processes that these leave over divide the data")
    group.add_argument("--tp", type=int, metavar="N", help="processes that share each layer (default: 1)")
    group.add_argument("--pp", type=int, metavar="N", help="stages of the pipeline (default: 1)")
    group.add_argument("--zero-stage", type=int, choices=(0, 1, 2), help="what is sharded (default: 0, nothing)")
    group.add_argument("--pp-style", choices=STYLES, help="schedule of the pipeline (default: 1f1b)")
    group.add_argument("--microbatches", type=int, metavar="N", help="per batch and process (default: the stages)")


def check_arguments(args: argparse.Namespace) -> None:
    """Fill in the defaults of the hybrid's options; ValueError where they would have no effect."""
    for name, default in HYBRID.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif args.plugin != "hybrid":
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} has no effect with --plugin {args.plugin}; drop it, or use --plugin hybrid")


def make_plugin(args: argparse.Namespace) -> plugin.Plugin:
    """The plugin of the flags, in the world of processes that is there already."""
    if args.plugin != "hybrid":
        return PLUGINS[args.plugin]()
    return plugin.HybridParallelPlugin(
        tp_size=args.tp,
        pp_size=args.pp,
        zero_stage=args.zero_stage,
        pp_style=args.pp_style,
        num_model_chunks=2 if args.pp_style == "interleaved" else 1,
        num_micro_batches=args.microbatches,
        tp_plan=GPT_PLAN if args.model == "gpt" else None,  # None: derived from timm's modules
    )


def describe(args: argparse.Namespace) -> str:
    """The plugin of the flags, in a few words that also make a file name."""
    if args.plugin != "hybrid":
        return "single" if args.plugin == "none" else args.plugin
    words = ["hybrid", f"tp{args.tp}", f"pp{args.pp}"]
    if args.pp > 1 and args.pp_style != HYBRID["pp_style"]:
        words.append(args.pp_style)
    if args.zero_stage:
        words.append(f"zero{args.zero_stage}")
    return "-".join(words)
