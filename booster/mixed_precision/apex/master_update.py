"""The update of apex where half parameters have float32 masters, which keep the unscaled gradients of all passes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from booster.grads import gradient_values, own_memory, scale_values, unscale_values
from booster.masters.local_parts import around, local_part
from booster.masters.masters import Masters
from booster.masters.update import MasterUpdate
from booster.mixed_precision.apex.update import NO_CLOSURE, ApexUpdate
from booster.torch_internals import sparse_values, version
from booster.update.base import Job


class _Left:
    """A gradient as it was left: its memory, kept so that no other gets its address, and how often it was written to."""

    def __init__(self, grad: torch.Tensor, shown: torch.Tensor | None) -> None:
        """shown: the gradient that users see, where another."""
        local = local_part(grad)
        values = sparse_values(local) if local.is_sparse else local
        self._memory = values.untyped_storage()
        self._address = values.data_ptr()
        self._writes = version(values) + (0 if shown is None else version(shown))

    def is_as(self, other: _Left) -> bool:
        """Whether the other is the same memory, not written to in between."""
        return self._writes == other._writes and self._address == other._address


class ApexMasterUpdate(ApexUpdate, MasterUpdate):
    """As `ApexUpdate`; the gradients of half parameters add up in float32, beside `.grad`, which keeps those of the last
    pass as it left them: in half, scaled.

    Those sums are what norms, clips and the step use. A step, applied or not, clears them. Where somebody has written to a
    `.grad` since the pass, put another tensor there, or None, that is the gradient instead, with the scale of the pass; after
    `unscale`, which writes the sums there, without one.
    """

    short_circuits = False

    def __init__(
        self,
        job: Job,
        *,
        masters: Masters,
        verbose: bool,
    ) -> None:
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._left: dict[torch.Tensor, _Left] = {}
        self._has_older: set[torch.Tensor] = set()  # whose sums hold more than the last pass brought
        self._in_grad = False  # whether `.grad` is what the sums are, and not scaled
        self._compares = False  # whether the sums are as they were put into `.grad`
        self._is_noted = False  # whether `_left` tells of the gradients that there are
        self._left_scale = 1.0
        masters.gradient_of = self._sum_of  # a method, which follows this object into a deep copy
        MasterUpdate.__init__(self, job, masters=masters)
        self._begin(verbose)

    def reset(self) -> None:
        super().reset()
        # New ones: what is set aside for a while keeps those that it has.
        self._sums, self._left, self._has_older = {}, {}, set()
        self._in_grad = self._compares = self._is_noted = False

    def _find_params(self) -> list[torch.Tensor]:
        self._take_written()
        return [p for p in self._held() if (p in self._sums if self._has_master(p) else p.grad is not None)]

    def gradients(self, *, written: bool = False) -> list[torch.Tensor]:
        params = self.params()
        others = [p for p in params if not self._has_master(p)]
        plain = iter(gradient_values(self.shards.written(others) if written else others))
        self._compares = self._compares and not written
        return [self._sums[p] if self._has_master(p) else next(plain) for p in params]

    def master_params(self) -> Iterator[nn.Parameter]:
        """What apex calls master parameters: one float32 parameter for each in the groups.

        For one with a master it is the master (see `Masters.values`), with the very gradient that the next step will use.
        """
        with self.shards.local():
            self._take_written()
        self._compares = False
        values = self.masters.values()
        for param in self._held():
            if not self._has_master(param):
                yield param  # type: ignore[misc]
                continue
            master = nn.Parameter(values[param].detach())
            total = self._sums.get(param)
            master.grad = None if total is None else around(total, param)
            yield master

    @property
    def closure_refusal(self) -> str | None:
        return NO_CLOSURE

    def _leave_graph(self) -> None:
        super()._leave_graph()
        with torch.enable_grad():
            self._sums = {param: total.clone() for param, total in self._sums.items()}

    def _sum_of(self, param: torch.Tensor) -> torch.Tensor | None:
        return self._sums.get(param)

    def _set_aside(self) -> None:
        self._take_written()
        self._is_noted = False
        halves = [p for p in self.shards.holders() if self._has_master(p)]
        for param in halves:
            if param.grad is not None:
                self._before[param] = param.grad if self._group is None else param.grad.clone()
                param.grad = None
        super()._set_aside()

    def _fresh(self) -> list[torch.Tensor]:
        # Of half parameters this rank's parts, to which its masters and sums belong.
        halves = [p for p in self._held() if self._has_master(p) and p.grad is not None]
        return halves + [p for p in super()._fresh() if not self._has_master(p)]

    def _unscale_fresh(self, params: list[torch.Tensor], values: list[torch.Tensor], check: bool) -> bool:
        wide = [
            local_part(p.grad).to_dense().to(torch.float32, copy=True) if self._has_master(p) else value  # type: ignore[arg-type]
            for p, value in zip(params, values, strict=True)
        ]
        found = super()._unscale_fresh(params, wide, check)
        self._has_older = set(self._sums)
        for param, value in zip(params, wide, strict=True):
            if not self._has_master(param):
                continue
            if param in self._sums and self._differentiable:
                self._sums[param] = self._sums[param] + value
            elif param in self._sums:
                self._sums[param].add_(value)
            else:
                self._sums[param] = value
        self._in_grad = self._compares = False
        self._left_scale = self._loss_scale
        self._note_left()
        return found

    def abandon_backward(self) -> None:
        super().abandon_backward()
        if self._delayed is None and self._num_backwards:
            with self.shards.local():
                self._note_left()  # what was set aside may have come back as a copy

    def _unscale(self) -> None:
        pending = self._pending
        super()._unscale()
        if not self._sums:
            return
        halves = [p for p in self._held() if p in self._sums]
        written = self.shards.written([p for p in halves if p.grad is not None])
        if not {id(p) for p in halves if p.grad is not None} <= set(map(id, written)):
            # `.grad` is whole on every rank, and each has the sum of its part.
            if self._has_older and not self._in_grad:
                raise RuntimeError(
                    "unscale_grads() cannot show the gradients of half parameters here: several backward passes were added up "
                    "in float32, on each rank its part, and `.grad` is whole and holds the last pass. Run the passes inside "
                    "booster.accumulate(), which adds them up in `.grad`"
                )
            whole = [param for param in written if param.dtype == torch.float16]
            own_memory(whole)
            scale_values(gradient_values(whole), pending if self._in_grad else pending / self._left_scale)
        for param in halves:
            self._put_into_grad(param, self._sums[param])
        self._in_grad = self._compares = True
        self._note_left()

    def _put_into_grad(self, param: torch.Tensor, total: torch.Tensor) -> None:
        grad = param.grad
        if grad is None or grad.is_sparse or grad.requires_grad:
            with torch.set_grad_enabled(total.requires_grad):
                param.grad = around(total.to(param.dtype), param)
        else:
            own_memory([param])
            local_part(param.grad).copy_(total.detach())  # type: ignore[arg-type]

    def _note_left(self) -> None:
        self._left = {
            p: _Left(p.grad, self.shards.param_of(p).grad)
            for p in self._held()
            if p.dtype == torch.float16 and p.grad is not None
        }
        self._is_noted = True

    def _take_written(self) -> None:
        """Make gradients that were written to since the last pass, replaced or removed, those of the next step."""
        if not self._is_noted:
            return
        for param in self._held():
            if param.dtype != torch.float16:
                continue
            left = self._left.get(param)
            if param.grad is None:
                if left is not None:
                    del self._left[param]
                    self._sums.pop(param, None)
                continue
            now = _Left(param.grad, self.shards.param_of(param).grad)
            if left is not None and now.is_as(left) and not (self._compares and self._differs(param)):
                continue
            if param in self._has_older and not self._in_grad:
                raise RuntimeError(
                    f"the gradient of {self.name_of(param)} was changed by hand after several backward passes, of which "
                    "`.grad` holds only the last: O2 adds them up in float32. Call optimizer.unscale_grads() before, which "
                    "puts their sum there, or run the passes inside booster.accumulate()"
                )
            self._left[param] = now
            value = local_part(param.grad).to_dense().to(torch.float32, copy=True)
            if not self._in_grad:
                unscale_values([value], 1.0 / self._left_scale, check=False)
            self._sums[param] = value

    def _differs(self, param: torch.Tensor) -> bool:
        """Whether `.grad` is not what was put there: a write through `.data` counts in no version."""
        total = self._sums.get(param)
        grad = local_part(param.grad)  # type: ignore[arg-type]
        return total is None or grad.is_sparse or not torch.equal(grad, total.to(grad.dtype))

    def _require_backward(self) -> None:
        super()._require_backward()
        if self._num_backwards == 0:  # a bare loss.backward() does not reach the masters
            MasterUpdate._require_backward(self)

    def _has_master(self, param: torch.Tensor) -> bool:
        # As in apex, freezing a weight does not take back the gradient that its master has.
        return param.dtype == torch.float16 and (param.requires_grad or param in self._sums)
