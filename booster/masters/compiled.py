"""The step on masters, compiled: each bucket in one pass over its memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from booster.masters.bucket import Bucket
from booster.masters.formats_24 import WEIGHTS, Split24
from booster.masters.formats_compiled import fuses, rows
from booster.masters.kernel import Kernel
from booster.masters.masters import Masters
from booster.masters.options import MasterOptions
from booster.masters.packed import Packed
from booster.masters.stand_in import keeps_state
from booster.masters.state_signs import StateSigns
from booster.masters.step import MasterStep, Told, inverse
from booster.optimizer_kinds import kind_of, unknown

_logger = logging.getLogger(__name__)


class CompiledMasterStep(MasterStep):
    """Steps buckets of elementwise optimizers through `Kernel`; build it where `can_compile_masters` says so.

    The first step of a bucket runs eagerly, as it creates the optimizer's state. Parameters without dimensions, whose
    state cannot be told from the counters of a flat bucket, and float32 parameters always do. What the compiler turns out
    not to understand is stepped eagerly from then on, after one WARNING.
    """

    def __init__(self, masters: Masters) -> None:
        super().__init__(masters)
        self._kernels: dict[Any, Kernel] = {}
        self._understood = True
        self._copies: dict[Any, torch.Tensor] = {}

    def _step_buckets(self, plain: Sequence[Sequence[torch.Tensor]], buckets: Sequence[Bucket], told: Told) -> None:
        try:
            super()._step_buckets(plain, buckets, told)
        finally:
            self._copies = {}

    def _step_bucket(self, bucket: Bucket, scratch: Any, told: Told) -> None:
        optimizer = self.masters.optimizer
        group, state = optimizer.param_groups[0], optimizer.state.get(bucket.handles[0])
        eager = not self._understood or bucket.whole or not fuses(bucket.format)
        if eager or (not state and keeps_state(optimizer, group, bucket.device)):
            super()._step_bucket(bucket, scratch, told)
            return
        state = {} if state is None else state
        ways = {name: value.way for name, value in state.items() if isinstance(value, Packed)}
        key = (bucket.size, bucket.dtype, bucket.device, *ways.items())
        if key not in self._kernels:
            self._kernels[key] = Kernel(optimizer, bucket.format, bucket.dtype, ways)
        dither = self.masters.dither
        drawn = [*ways, *([WEIGHTS] if isinstance(bucket.format, Split24) else [])]
        lanes = {name: dither.lanes(name, bucket.device) for name in drawn}
        working, gradients = bucket.working(), bucket.gradients(self.masters.gradient_of)
        weights = self._joined(bucket, working, "weights")
        grads = self._joined(bucket, gradients, "gradients")
        try:
            self._kernels[key].step(
                group,
                state,
                inverse(told.number),
                rows(bucket.rest),
                weights,
                grads,
                lanes,
                bucket.present() if ways else None,
            )
        except Exception as error:
            self._understood = False
            _logger.warning(
                'fused_optimizer="compile" does not apply to this %s: torch.compile does not understand it (%s); it is '
                "stepped without a compiler from here on",
                type(optimizer).__name__,
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            )
            super()._step_bucket(bucket, scratch, told)
            return
        if weights is not working[0]:
            torch._foreach_copy_(working, bucket.pieces_of(weights))
        if bucket.packing is not None:  # what the step has added to the state
            bucket.packing.pack(bucket, state)

    def _joined(self, bucket: Bucket, pieces: list[torch.Tensor], name: str) -> torch.Tensor:
        """Return the pieces as one tensor of the bucket's size: themselves where there is one of this size, else a copy.

        name: of a memory for copies, which the next bucket uses again.
        """
        if len(pieces) == 1 and pieces[0].numel() == bucket.size and pieces[0].dtype == bucket.dtype:
            return pieces[0]
        key = (bucket.size, bucket.dtype, bucket.device, name)
        if key not in self._copies:
            self._copies[key] = torch.zeros(bucket.size, dtype=bucket.dtype, device=bucket.device)
        torch._foreach_copy_(bucket.pieces_of(self._copies[key]), pieces)
        return self._copies[key]


def can_compile_masters(optimizer: Optimizer, options: MasterOptions) -> bool:
    """Return whether a step on masters of `optimizer` can be compiled, if there is a compiler; one WARNING says why not."""
    reason = None
    if kind_of(optimizer) != "elementwise":
        reason = unknown(optimizer, "would be stepped on flat buckets", "choose fused_optimizer=True")
    elif options.states != "fp32" and StateSigns(optimizer).watched:
        names = sorted(StateSigns(optimizer).watched)
        reason = (
            f"its states {names} were never negative in trial steps, and every step is to look whether they still are not; "
            f"declare them: register_elementwise({type(optimizer).__name__}, states={{{names[0]!r}: 'unsigned', ...}})"
        )
    elif options.rounding == "stochastic":
        reason = 'rounding="stochastic" draws random numbers, which are not compiled'
    if reason is not None:
        _logger.warning(
            'fused_optimizer="compile" does not apply to this %s: %s; it is stepped as with fused_optimizer=True',
            type(optimizer).__name__,
            reason,
        )
    return reason is None


def half_norms(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of each tensor of `values`, in float32, from operations that the compiler makes loops of."""
    return torch.stack([value.float().square().sum() for value in values]).sqrt()
