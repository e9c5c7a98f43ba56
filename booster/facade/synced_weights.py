"""Weights for a sampler that runs next to training: unsharded, one after another, as the forward reads them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from booster.common import arguments
from booster.common.torch_internals.tensor_internals import gather_full
from booster.facade.booster_state import BoosterState
from booster.interface.model import boosted_wrapper
from booster.mixed_precision.policy import dtypes_read
from booster.model.dtensors import is_dtensor, memory_of
from booster.model.modules import bare

if TYPE_CHECKING:
    from booster.checkpoint.serving import ExportSpec

_logger = logging.getLogger(__name__)


def sync_weights(self: BoosterState, model: nn.Module, *, merge: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and value of every weight and buffer that a sampler needs, whole, to the bit as the forward reads it.

        sampler.load_state_dict(dict(b.sync_weights(model)))

    model: the boosted model.
    merge: with adapters of `enable_lora` added to what they adapt, under the names of the model without them.

    Half weights are yielded as they are, and what autocast or a plugin rounds before a product, rounded; norms, embeddings
    and modules of keep_fp32 that are read in float32, in float32. Under formats of 8 bits weights are yielded before they
    are rounded to these. Tied weights are yielded under each name. What is neither rounded nor gathered is the model's own
    memory: copy it before the next step.

    A collective where ranks hold parts of weights: each is gathered as it is asked for, so all ranks go through all of
    them. Raises RuntimeError for stages of a pipeline, which `save_model` writes.
    """
    # Here and not above: they import torch.distributed.checkpoint, which `import booster` is to leave alone.
    from booster.checkpoint.adapters import check_merges, merged
    from booster.checkpoint.serving import ExportSpec, ends_that_differ

    halves = self.precision.policy.param is not None
    wrapper = boosted_wrapper(model, "sync_weights")
    if getattr(wrapper.module, "is_partial", False):
        raise RuntimeError(
            "sync_weights gathers what ranks hold in parts, and stages of a pipeline hold layers that others lack; write them "
            "with b.save_model(model, folder, shard=True), which a sampler opens"
        )
    own, state = bare(wrapper.module), {k: v for k, v in wrapper.state_dict().items() if isinstance(v, torch.Tensor)}
    dtypes = dtypes_read(own, self.precision.half_dtype, weights=halves)
    sources = {name: ExportSpec(name) for name in state}
    if arguments.flag("merge", merge):
        check_merges(own)
        base, sources = merged(own, state)
        if apart := ends_that_differ(base, lambda one, other: _made_alike(state, sources, one, other)):
            _logger.warning(
                "%s and %s were one matrix and train apart: a sampler that ties them holds the second for both; build it with "
                "tie_word_embeddings=False",
                *apart,
            )
    return _gathered(state, dtypes, sources, halves=halves)


def _gathered(
    state: dict[str, torch.Tensor], dtypes: dict[str, torch.dtype], sources: dict[str, ExportSpec], *, halves: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    def read(name: str) -> torch.Tensor:
        return _whole(state[name], dtypes.get(name) if halves else None)

    left = Counter(memory_of(state[source.stored]) for source in sources.values())
    shared: dict[int, torch.Tensor] = {}  # what was gathered and is asked for again, as tied weights are
    for name, source in sources.items():
        held, dtype = state[source.stored], dtypes.get(source.stored)
        key = memory_of(held)
        left[key] -= 1
        if source != type(source)(source.stored):  # merged with adapters
            value = source.whole(read)
            yield name, value if dtype is None else value.to(dtype)
            continue
        value = shared.pop(key) if key in shared else _whole(held, dtype)
        if left[key]:
            shared[key] = value
        yield name, value


def _made_alike(state: dict[str, torch.Tensor], sources: dict[str, ExportSpec], one: str, other: str) -> bool:
    """Whether two weights are made of the same tensors in the same way, or one of them is not there."""
    ends = [sources[name] for name in (one, other) if name in sources]
    return len(ends) < 2 or (
        ends[0].adapters == ends[1].adapters and len({memory_of(state[end.stored]) for end in ends}) == 1
    )


def _whole(held: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Rounded first, where it is, as fewer bytes travel then."""
    rounded = held if dtype is None else held.to(dtype)
    return gather_full(rounded) if is_dtensor(rounded) else rounded
