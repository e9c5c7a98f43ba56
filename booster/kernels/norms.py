"""Norms and zeros of gradients, which one launch reads; by torch where a clip asks for more than a norm of order 2."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from booster.kernels.covered import Covered
from booster.kernels.launch_cache import current
from booster.kernels.launches import add_up, clip_by, norm_of
from booster.kernels.released import Along, LookByTorch
from booster.kernels.table import Tables
from booster.ranks import agreement
from booster.tensors.grads import gradient_values, tensor_norms
from booster.update.context import UpdateContext
from booster.update.device import DeviceNorms
from booster.update.gradients import Gradients
from booster.update.outcome import Copy

_GRAD = attrgetter("grad")
_VERSION = attrgetter("_version")  # of a gradient


class KernelNorms(DeviceNorms):
    """Norms of order 2 are read by one launch. A clip that nobody asked for waits for the decision, which reads them then."""

    waits = True

    def __init__(self, context: UpdateContext, covered: Covered) -> None:
        super().__init__(context)
        self._covered, self._counts_zeros = covered, covered.steps.counts_zeros

    def read(self, gradients: Gradients, norm_type: float) -> tuple[Any, Any]:
        tables = self._covered.ready(gradients.params()) if norm_type == 2.0 else None
        if tables is None:
            return super().read(gradients, norm_type)
        with current(tables.device):
            read = self.look(tables, gradients.scale)
            there = self._covered.steps.factor_on
            scale = there("carried", gradients.scale, tables.device)
            return read, read.norm(scale, there("pending", gradients.factor, tables.device))

    def found(self, read: Sequence[Any]) -> torch.Tensor:
        known = read[0].found if len(read) == 1 and isinstance(read[0], Along) else None
        return super().found(read) if known is None else known

    def look(self, tables: Tables, carried: Any) -> LookByKernels:
        """Read the gradients in `tables`, which are multiplied by `carried`. On their device."""
        sums, zeros = tables.first.measure(counts_zeros=self._counts_zeros)
        partials, counts = [sums], [zeros]
        if len(tables.each) > 1:
            totals = [_added_up(sums)]
            for table in tables.each[1:]:
                with current(table.device):
                    found, zeros = table.measure(counts_zeros=self._counts_zeros)
                    totals.append(_added_up(found).to(tables.device))
                partials.append(found)
                counts.append(zeros)
            sums = torch.stack(totals)
        if self.shards.sharded:
            sums = agreement.all_reduce(_added_up(sums), self.group, dist.ReduceOp.SUM).view(1)
        if not self._counts_zeros:
            return LookByKernels(tables, partials, sums, carried)
        return LookByKernels(tables, partials, sums, carried, _together(counts, tables.device), self._versions(tables))

    def zeros(self, tables: Tables, read: LookByKernels | None) -> torch.Tensor | None:
        """Return how many elements of the gradients in `tables` are zero, by tiles. read: a reading of them, which tells unless
        they were written to since."""
        if read is not None and read.versions == self._versions(tables):
            return read.zeros
        counts = []
        for table in tables.each:
            with current(table.device):
                counts.append(table.measure(counts_zeros=True)[1])
        return _together(counts, tables.device)

    def look_by_torch(self, params: Sequence[torch.Tensor]) -> LookByTorch:
        """Read the gradients of `params` by operations of torch."""
        norms = torch.zeros(0, dtype=torch.float64, device=self.device)
        if params:
            norms = tensor_norms(gradient_values(params), 2.0, torch.float64)
        squares = norms.square()
        if self.shards.sharded:
            copies = torch.tensor(self.shards.num_replicas_of(params), dtype=torch.float64).to(norms.device)
            squares = agreement.all_reduce((squares / copies).sum(), self.group, dist.ReduceOp.SUM).view(1)
        return LookByTorch(list(params), norms, squares, self.zeros_by_torch(params) if self._counts_zeros else None)

    def zeros_by_torch(self, params: Sequence[torch.Tensor]) -> torch.Tensor:
        """Count zeros of what kernels do not measure: of each of `params`."""
        counts = [value.numel() - value.count_nonzero().to(self.device) for value in gradient_values(params)]
        return torch.stack(counts) if counts else torch.zeros(0, dtype=torch.int64, device=self.device)

    def _versions(self, tables: Tables) -> list[int]:
        return list(map(_VERSION, map(_GRAD, tables.params)))

    def clipped(self, norm: torch.Tensor, max_norm: float, factor: Any) -> torch.Tensor:
        if norm.dtype != torch.float64 or not isinstance(max_norm, float):
            return super().clipped(norm, max_norm, factor)
        found = torch.empty_like(norm)
        bound = self._covered.steps.device_numbers("bound", (max_norm,), norm.device)
        with current(norm.device):
            pending = self._covered.steps.factor_on("pending", factor, norm.device)
            clip_by[(1,)](norm, bound, pending, found, enable_fp_fusion=False)
        return found


class LookByKernels:
    """What one reading of the gradients found. sums: partial sums of squares, of all ranks where they hold shards.
    carried: what gradients were multiplied by then. zeros: how many elements of each tile are zero, of gradients of these
    `versions`, where that is counted."""

    def __init__(
        self,
        tables: Tables,
        partials: list[torch.Tensor],
        sums: torch.Tensor,
        carried: Any,
        zeros: torch.Tensor | None = None,
        versions: list[int] | None = None,
    ) -> None:
        self._tables, self._partials, self.sums, self.carried = tables, partials, sums, carried
        self.zeros, self.versions = zeros, versions

    def copied(self, copy: Copy) -> LookByKernels:
        """The same, of a copy of what names whose gradients are not finite."""
        return LookByKernels(self._tables, list(map(copy, self._partials)), self.sums, self.carried)

    @cached_property
    def params(self) -> list[torch.Tensor]:
        """Whose gradients were read."""
        return list(dict.fromkeys(self._tables.params))

    def norm(self, carried: torch.Tensor | None, pending: torch.Tensor | None) -> torch.Tensor:
        """The norm, times `pending` and by `carried`, 0-dim on the device."""
        found = torch.empty((), dtype=torch.float64, device=self.sums.device)
        with current(found.device):
            norm_of[(1,)](self.sums, self.sums.numel(), carried, pending, found, None, enable_fp_fusion=False)
        return found

    @cached_property
    def total(self) -> torch.Tensor:
        """The norm of the gradients as they are, 0-dim on the device."""
        return self.norm(None, None)

    @cached_property
    def each(self) -> torch.Tensor:
        """The norms of `params`; waits for the device."""
        squares = self.squares()
        return torch.tensor([squares.get(param, 0.0) for param in self.params], dtype=torch.float64).sqrt()

    def squares(self) -> dict[torch.Tensor, float]:
        """Return the squares of the norms by parameter; waits for the device."""
        squares: dict[torch.Tensor, float] = {}
        for table, partials in zip(self._tables.each, self._partials, strict=True):
            squares |= table.squares_of_params(partials)
        return squares


def _together(counts: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Return counts of several devices on `device`."""
    there = [each.to(device) for each in counts if each is not None]
    return there[0] if len(there) == 1 else torch.cat(there)


def _added_up(partials: torch.Tensor) -> torch.Tensor:
    total = torch.empty((), dtype=torch.float64, device=partials.device)
    add_up[(1,)](partials, partials.numel(), total, enable_fp_fusion=False)
    return total
