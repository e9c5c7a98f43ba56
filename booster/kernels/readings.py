"""What is read of gradients: squares, norms and zeros.

One launch reads all gradients (`KernelReading`). What kernels cannot read, as sparse gradients, torch does (`TorchReading`). A
backward pass that steps reads some at a time (`PassReadings`). All know which parameters they read, the sum of squares, and,
when somebody asks, which of the gradients were not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from booster.kernels.launch_cache import current
from booster.kernels.launches import add_up, clip_by, norm_of
from booster.kernels.segments import Tables
from booster.kernels.supported import SupportedParams
from booster.ranks import agreement
from booster.tensors.grads import gradient_values, tensor_norms
from booster.update.context import UpdateContext
from booster.update.decision import Copy
from booster.update.device import DeviceNorms
from booster.update.gradients import Gradients

_GRAD = attrgetter("grad")
_VERSION = attrgetter("_version")  # of a gradient


class KernelNorms(DeviceNorms):
    """Norms of order 2 are read by one launch. A clip by `clip_grad_norm=` waits for the decision, which reads them."""

    defers_clips = True

    def __init__(self, context: UpdateContext, supported: SupportedParams) -> None:
        super().__init__(context)
        self._supported, self._counts_zeros = supported, supported.steps.counts_zeros

    def read(self, gradients: Gradients, norm_type: float) -> tuple[Any, Any]:
        # The kernel adds up squares and nothing else; torch reads other norms.
        tables = self._supported.tables(gradients.params()) if norm_type == 2.0 else None
        if tables is None:
            return super().read(gradients, norm_type)
        with current(tables.device):
            read = self.read_tables(tables, gradients.scale)
            there = self._supported.steps.factor_on
            scale = there("current_scale", gradients.scale, tables.device)
            return read, read.norm(scale, there("pending", gradients.factor, tables.device))

    def found_inf(self, read: Sequence[Any]) -> torch.Tensor:
        known = read[0].found_inf if len(read) == 1 and isinstance(read[0], PassReadings) else None
        return super().found_inf(read) if known is None else known

    def read_tables(self, tables: Tables, scale: Any) -> KernelReading:
        """Read the gradients in `tables`, which are multiplied by `scale`. On their device."""
        sums, zeros = tables.first.measure(counts_zeros=self._counts_zeros)
        partials, counts = [sums], [zeros]
        if len(tables.each) > 1:
            # One number from each device goes to the first, where the decision is made.
            totals = [_added_up(sums)]
            for table in tables.each[1:]:
                with current(table.device):
                    partial, zeros = table.measure(counts_zeros=self._counts_zeros)
                    totals.append(_added_up(partial).to(tables.device))
                partials.append(partial)
                counts.append(zeros)
            sums = torch.stack(totals)
        if self.shards.sharded:
            sums = agreement.all_reduce(_added_up(sums), self.group, dist.ReduceOp.SUM).view(1)
        if not self._counts_zeros:
            return KernelReading(tables, partials, sums, scale)
        return KernelReading(tables, partials, sums, scale, _together(counts, tables.device), self._versions(tables))

    def zeros(self, tables: Tables, read: KernelReading | None) -> torch.Tensor | None:
        """Return how many elements of the gradients in `tables` are zero, by tiles."""
        # Counted along with the norm, unless gradients were written to since.
        if read is not None and read.versions == self._versions(tables):
            return read.zeros
        counts = []
        for table in tables.each:
            with current(table.device):
                counts.append(table.measure(counts_zeros=True)[1])
        return _together(counts, tables.device)

    def read_by_torch(self, params: Sequence[torch.Tensor]) -> TorchReading:
        """Read the gradients of `params` by operations of torch."""
        norms = torch.zeros(0, dtype=torch.float64, device=self.device)
        if params:
            norms = tensor_norms(gradient_values(params), 2.0, torch.float64)
        squares = norms.square()
        if self.shards.sharded:
            # What several ranks hold would be added up once by each of them.
            copies = torch.tensor(self.shards.num_replicas(params), dtype=torch.float64).to(norms.device)
            squares = agreement.all_reduce((squares / copies).sum(), self.group, dist.ReduceOp.SUM).view(1)
        return TorchReading(list(params), norms, squares, self.zeros_by_torch(params) if self._counts_zeros else None)

    def zeros_by_torch(self, params: Sequence[torch.Tensor]) -> torch.Tensor:
        """Count zeros of what kernels do not measure: of each of `params`."""
        counts = [value.numel() - value.count_nonzero().to(self.device) for value in gradient_values(params)]
        return torch.stack(counts) if counts else torch.zeros(0, dtype=torch.int64, device=self.device)

    def _versions(self, tables: Tables) -> list[int]:
        return list(map(_VERSION, map(_GRAD, tables.params)))

    def clipped(self, norm: torch.Tensor, max_norm: float, factor: Any) -> torch.Tensor:
        # The kernel compares in float64 with a number of the host; a tensor as bound is read by torch.
        if norm.dtype != torch.float64 or not isinstance(max_norm, float):
            return super().clipped(norm, max_norm, factor)
        clip = torch.empty_like(norm)
        bound = self._supported.steps.device_numbers("bound", (max_norm,), norm.device)
        with current(norm.device):
            pending = self._supported.steps.factor_on("pending", factor, norm.device)
            clip_by[(1,)](norm, bound, pending, clip, enable_fp_fusion=False)
        return clip


class TorchReading:
    """What torch's operations read of the gradients of `params`.

    norms: of each, float64. sums: their squares, or one sum of all ranks' where they hold shards. zeros: how many elements of
    each are zero, where that is counted."""

    def __init__(
        self, params: list[torch.Tensor], norms: torch.Tensor, sums: torch.Tensor, zeros: torch.Tensor | None
    ) -> None:
        self.params, self._norms, self.sums, self.zeros = params, norms, sums, zeros

    def map_tensors(self, copy: Copy) -> TorchReading:
        """The same, of copies of the norms by parameter."""
        return TorchReading(self.params, copy(self._norms), self.sums, self.zeros)

    def squares(self) -> dict[torch.Tensor, float]:
        """Return the squares of the norms by parameter; waits for the device."""
        return dict(zip(self.params, self._norms.square().tolist(), strict=True))


class PassReadings:
    """What a pass read of its gradients, some at a time.

    sums: of squares of all of them. found_inf: 1 where they are not finite, 0 where they are, 0-dim; None: it is not
    known."""

    def __init__(self, readings: Sequence[Any], sums: torch.Tensor, found_inf: torch.Tensor | None) -> None:
        self._readings, self.sums, self.found_inf = readings, sums, found_inf

    def map_tensors(self, copy: Copy) -> PassReadings:
        """The same, of copies of the norms by parameter."""
        return PassReadings([each.map_tensors(copy) for each in self._readings], self.sums, self.found_inf)

    @property
    def params(self) -> list[torch.Tensor]:
        """Whose gradients were read."""
        return [param for each in self._readings for param in each.params]

    @cached_property
    def total(self) -> torch.Tensor:
        """The norm of the gradients as they are, 0-dim on the device."""
        return self.sums.sum().sqrt()

    @cached_property
    def each(self) -> torch.Tensor:
        """The norms of `params`; waits for the device."""
        squares: dict[torch.Tensor, float] = {}
        for reading in self._readings:
            squares |= reading.squares()
        return torch.tensor([squares.get(param, 0.0) for param in self.params], dtype=torch.float64).sqrt()


class KernelReading:
    """What one reading of the gradients found. sums: partial sums of squares, of all ranks where they hold shards.
    current_scale: what gradients were multiplied by then. zeros: how many elements of each tile are zero, of gradients of these
    `versions`, where that is counted."""

    def __init__(
        self,
        tables: Tables,
        partials: list[torch.Tensor],
        sums: torch.Tensor,
        current_scale: Any,
        zeros: torch.Tensor | None = None,
        versions: list[int] | None = None,
    ) -> None:
        self._tables, self._partials, self.sums, self.current_scale = tables, partials, sums, current_scale
        self.zeros, self.versions = zeros, versions

    def map_tensors(self, copy: Copy) -> KernelReading:
        """The same, of copies of the norms by parameter."""
        return KernelReading(self._tables, list(map(copy, self._partials)), self.sums, self.current_scale)

    @cached_property
    def params(self) -> list[torch.Tensor]:
        """Whose gradients were read."""
        # A parameter that lies across buckets is in the tables once for each piece.
        return list(dict.fromkeys(self._tables.params))

    def norm(self, current_scale: torch.Tensor | None, pending: torch.Tensor | None) -> torch.Tensor:
        """The norm, times `pending` and by `current_scale`, 0-dim on the device."""
        norm = torch.empty((), dtype=torch.float64, device=self.sums.device)
        with current(norm.device):
            norm_of[(1,)](self.sums, self.sums.numel(), current_scale, pending, norm, None, enable_fp_fusion=False)
        return norm

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
