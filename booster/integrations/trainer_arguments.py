"""What the arguments of a Trainer say of precision and parallelism, and which of them a boosted one cannot honour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from booster.mixed_precision import Autopilot, MixedPrecision, PrecisionSchedule, make
from booster.mixed_precision.schedule import Phase
from booster.plugin import Plugin, SingleDevice, TorchDDPPlugin

_DISTRIBUTED = ("NO", "MULTI_CPU", "MULTI_GPU")
_LAUNCH_ONCE_A_DEVICE = (
    "start one process for each GPU, with `booster run --nproc_per_node N` or torchrun, or show it one GPU"
)
_DDP = {  # of TrainingArguments: of TorchDDPPlugin
    "ddp_find_unused_parameters": "find_unused_parameters",
    "ddp_bucket_cap_mb": "bucket_cap_mb",
    "ddp_broadcast_buffers": "broadcast_buffers",
    "ddp_static_graph": "static_graph",
}


Given = str | MixedPrecision | PrecisionSchedule | Autopilot


def precision_of(given: Given | None, args: Any) -> MixedPrecision | PrecisionSchedule | Autopilot:
    """Return the precision that `mixed_precision` and the flags of `args` say together; raises ValueError where they differ."""
    flags = [name for name in ("fp16", "bf16") if getattr(args, name, False)]
    if len(flags) > 1:
        raise ValueError("fp16=True and bf16=True are both set; leave one of them False")
    precision: MixedPrecision | PrecisionSchedule | Autopilot
    if isinstance(given, PrecisionSchedule | Autopilot):
        precision = given
    else:
        precision = make(given if given is not None or not flags else flags[0])
    if flags and type(precision) is not type(make(flags[0])):
        raise ValueError(
            f"mixed_precision={given!r} and {flags[0]}=True of {type(args).__name__} contradict each other; set "
            f"{flags[0]}=False, as mixed_precision says the precision, or leave mixed_precision out"
        )
    if getattr(args, "tf32", None) is False and any(
        getattr(each, "products", None) == "tf32" for each in phases_of(precision)
    ):
        raise ValueError(f"mixed_precision={given!r} and tf32=False contradict each other; leave tf32 out")
    return precision


def phases_of(given: MixedPrecision | PrecisionSchedule | Autopilot) -> list[MixedPrecision]:
    """Return the precisions that a run is in, one after another."""
    made = given.made(make).values() if isinstance(given, PrecisionSchedule) else [Phase.of(given, make)]
    return [phase.precision for phase in made]


def plugin_of(given: Plugin | None, args: Any, *, num_processes: int, checkpointed: bool) -> Plugin:
    """Return the plugin that was given, or what the Trainer does without one: nothing in one process, DDP in several.

    checkpointed: whether the model recomputes activations, as then the Trainer does not look for unused parameters.
    Raises ValueError for arguments of DDP together with a plugin, and for ranks that see the same data.
    """
    options: dict[str, Any] = {ours: getattr(args, name, None) for name, ours in _DDP.items()}
    options = {name: value for name, value in options.items() if value is not None}
    if given is None:
        if num_processes == 1:
            return SingleDevice()
        return TorchDDPPlugin(**({"find_unused_parameters": not checkpointed} | options))
    if options:
        own = [name for name, ours in _DDP.items() if ours in options]
        raise ValueError(
            f"{own} of {type(args).__name__} are for the DDP of the Trainer; give them to plugin={given!r}"
        )
    if given.data_parallel_size != num_processes:
        raise ValueError(
            f"plugin={type(given).__name__} divides data among {given.data_parallel_size} ranks, and the Trainer among all "
            f"{num_processes}; choose TorchDDPPlugin, LowLevelZeroPlugin or TorchFSDPPlugin. Tensor, sequence and pipeline "
            "parallelism need a loop of your own"
        )
    return given


def check_arguments(
    args: Any, phases: Iterable[MixedPrecision], accelerator: Any, model: Any, *, has_reference: bool = False
) -> None:
    """Raise ValueError that names every argument which a boosted Trainer cannot honour, with what to do instead.

    has_reference: the Trainer was given a reference model, which does not train.
    """
    of_numbers = (each for precision in phases for each in _of_numbers(args, precision, has_reference))
    refused = dict.fromkeys([*_of_others(args, accelerator, model), *of_numbers, *_of_optimizers(args)])
    if refused:
        raise ValueError(f"a boosted Trainer cannot honour {'; '.join(refused)}")


def _of_others(args: Any, accelerator: Any, model: Any) -> Iterator[str]:
    if getattr(args, "deepspeed", None) or accelerator.state.distributed_type.value == "DEEPSPEED":
        yield "deepspeed, which steps by itself: give plugin=LowLevelZeroPlugin() or TorchFSDPPlugin()"
    elif getattr(args, "fsdp", None) or accelerator.state.distributed_type.value == "FSDP":
        yield "fsdp, which places the model beside its plugin: give plugin=TorchFSDPPlugin()"
    elif accelerator.state.distributed_type.value not in _DISTRIBUTED:
        yield f"the distributed type {accelerator.state.distributed_type.value}: {_LAUNCH_ONCE_A_DEVICE}"
    if getattr(args, "parallelism_config", None) is not None:
        yield "parallelism_config: data is divided among all ranks, by the plugin"
    if getattr(model, "is_distributed_loading_by_transformers", False) or (getattr(model, "tp_size", None) or 1) > 1:
        yield "a model that was divided as it was loaded: load it whole"
    if args.n_gpu > 1:
        yield f"{args.n_gpu} GPUs in one process (DataParallel): {_LAUNCH_ONCE_A_DEVICE}"
    if getattr(args, "save_on_each_node", False) and accelerator.num_processes > 1:
        yield "save_on_each_node: ranks write one checkpoint together, on a disk that all of them see"


def _of_numbers(args: Any, precision: MixedPrecision, has_reference: bool) -> Iterator[str]:
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name, False):
            yield f"{name}: it would cast the weights that train; evaluation runs in the precision of training already"
    if getattr(args, "half_precision_backend", "auto") == "apex":
        yield "half_precision_backend='apex': give mixed_precision='fp16_apex'"
    if getattr(args, "jit_mode_eval", False):
        yield "jit_mode_eval: a boosted model is not traced"
    if precision.pins_during_run:
        yield "keep_fp32='auto': a Trainer's checkpoint does not keep what was pinned; name the modules"
    if getattr(args, "use_transformers_continuous_batching", False):
        yield "use_transformers_continuous_batching: it casts the weights that train; leave it False"
    if getattr(args, "cast_lm_head_to_fp32", False) and precision.policy.param is not None:
        yield "cast_lm_head_to_fp32 with half weights: keep the head, with keep_fp32=('lm_head',) of the precision"
    converts = precision.policy.param is not None or precision.conversion is not None
    if getattr(args, "precompute_ref_log_probs", False) and converts and not has_reference:
        yield (
            "precompute_ref_log_probs: the reference would be computed before training begins, by weights and layers that "
            f"{type(precision).__name__} has not converted yet; leave it False, or give a ref_model"
        )


def _of_optimizers(args: Any) -> Iterator[str]:
    name = str(getattr(args.optim, "value", args.optim))
    if "lomo" in name or "layerwise" in name:
        yield f"optim={name!r}, which steps within backward: choose another, with release_gradients of a loop of your own"
