"""Names of styles, as plans of transformers models write them, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from booster.plugin.tensor_parallel.attention import HeadParallel
from booster.plugin.tensor_parallel.experts import Experts
from booster.plugin.tensor_parallel.styles import Colwise, EmbeddingParallel, Region, Rowwise


def _colwise(module: nn.Module) -> ParallelStyle:
    if isinstance(module, nn.Embedding):
        return EmbeddingParallel(by="features")
    if isinstance(module, nn.MultiheadAttention):
        return HeadParallel()
    return Colwise()


def _rowwise(module: nn.Module) -> ParallelStyle:
    return EmbeddingParallel(by="vocabulary") if isinstance(module, nn.Embedding) else Rowwise()


STYLES: dict[str, Callable[[nn.Module], ParallelStyle]] = {
    "all_reduce": lambda module: Region(out="reduce"),
    "colwise": _colwise,
    "colwise_gather_output": lambda module: Colwise(gather_output=True),
    "colwise_rep": lambda module: Colwise(gather_output=True),
    "embedding_colwise": lambda module: EmbeddingParallel(by="features"),
    "embedding_rowwise": lambda module: EmbeddingParallel(by="vocabulary"),
    "moe_tp_experts": lambda module: Experts({}),
    "packed_colwise": lambda module: Colwise(num_parts=2),
    "replicate": lambda module: Region(),
    "replicated_with_grad_allreduce": lambda module: Region(partial_gradients=True),
    "rowwise": _rowwise,
    "rowwise_rep": lambda module: Rowwise(split_input=True),
    "rowwise_split_input": lambda module: Rowwise(split_input=True),
    "sequence_parallel": lambda module: Region(partial_gradients=True),
}


def style_of(name: str, module: nn.Module, value: object) -> ParallelStyle:
    """The style that a plan gives `module`, called `name`, as an object. Raises as `check_style`."""
    check_style(name, value)
    return value if isinstance(value, ParallelStyle) else STYLES[str(value)](module)


def check_style(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless `value`, which a plan gives the modules of `name`, is a style."""
    if isinstance(value, ParallelStyle):
        return
    if not isinstance(value, str):
        raise TypeError(
            f"tp_plan gives {name!r} {value!r}; a style is a torch.distributed.tensor.parallel.ParallelStyle or one of "
            f"{sorted(STYLES)}"
        )
    if value not in STYLES:
        raise ValueError(
            f"tp_plan gives {name!r} the style {value!r}; choose one of {sorted(STYLES)}, or a ParallelStyle"
        )
