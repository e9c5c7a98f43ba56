"""Plugins and precisions by short names, for tests that run through several of them."""

from collections.abc import Callable
from typing import Any

from booster.mixed_precision import (
    BF16NaiveMixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
)
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin

_SPELLED = {"one device": "single", "zero-1": "zero1", "zero 1": "zero1", "zero-2": "zero2", "zero 2": "zero2"}


def plugins(*names: str, tp_plan: Any = None, **pipeline: Any) -> dict[str, Callable[[], Any]]:
    """By each name, in any case, what makes its plugin on two ranks. tp_plan: of "tp"; pipeline: options of "pp"."""
    made: dict[str, Callable[[], Any]] = {
        "single": SingleDevice,
        "ddp": TorchDDPPlugin,
        "zero1": LowLevelZeroPlugin,
        "zero2": lambda: LowLevelZeroPlugin(stage=2),
        "zero2 overlapping": lambda: LowLevelZeroPlugin(stage=2, overlap_allgather=True),
        "fsdp": TorchFSDPPlugin,
        "dp": lambda: HybridParallelPlugin(1, 1),
        "dp zero": lambda: HybridParallelPlugin(1, 1, zero_stage=1),
        "tp": lambda: HybridParallelPlugin(2, 1, tp_plan=tp_plan),
        "fsdp + tp": lambda: HybridParallelPlugin(2, 1, zero_stage=1, tp_plan=tp_plan),
        "pp": lambda: HybridParallelPlugin(1, 2, **pipeline),
        "interleaved": lambda: HybridParallelPlugin(1, 2, pp_style="interleaved", num_model_chunks=2, zero_stage=1),
    }
    return {name: made[_SPELLED.get(name.lower(), name.lower())] for name in names}


_MASTERS: dict[str, dict[str, str]] = {
    **{name: {"master_weights": name} for name in ("fp32", "split", "split24", "none")},
    **{name: {"master_weights": "none", "rounding": name} for name in ("stochastic", "kahan")},
    "8bit": {"states": "8bit"},
}


def precisions(*names: str, scale: float | None = None, **naive: Any) -> dict[str, Callable[[], Any]]:
    """By each name what makes its precision.

    names: "fp32", "fp16", "bf16"; "fp16_naive" and "bf16_naive", and after them how masters are kept, how weights are rounded,
    how states are quantized ("bf16_naive split24 8bit"); "O0" to "O3", also as "fp16_apex O2".
    scale: the first loss scale, and for O1 and O2 the largest; None: each precision's own. naive: options of fp16_naive.
    """
    return {name: _precision(name.replace(",", ""), scale, naive) for name in names}


def _precision(name: str, scale: float | None, naive: dict[str, Any]) -> Callable[[], Any]:
    kind, *words = name.removeprefix("fp16_apex ").split()
    if kind in ("O0", "O1", "O2", "O3"):
        largest = {} if scale is None or kind in ("O0", "O3") else {"max_loss_scale": scale}
        return lambda: FP16ApexMixedPrecision(kind, verbosity=0, **({"loss_scale": 128.0} if kind == "O3" else largest))
    options = {key: value for word in words for key, value in _MASTERS[word].items()}
    if kind == "bf16_naive":
        return lambda: BF16NaiveMixedPrecision(**options)
    if kind == "fp16_naive":
        first = {} if scale is None else {"initial_scale": scale}
        return lambda: FP16NaiveMixedPrecision(**first, **naive, **options)
    if kind == "fp16" and scale is not None:
        return lambda: FP16TorchMixedPrecision(init_scale=scale)
    return lambda: kind
