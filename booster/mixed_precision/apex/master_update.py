"""The update of apex where half parameters have float32 masters, which keep the unscaled gradients of all passes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from booster.grads import gradient_values
from booster.masters.local_parts import around, local_part
from booster.masters.masters import Masters
from booster.masters.update import MasterUpdate
from booster.mixed_precision.apex.update import NO_CLOSURE, ApexUpdate
from booster.update.base import Job


class ApexMasterUpdate(ApexUpdate, MasterUpdate):
    """As `ApexUpdate`; the gradients of half parameters add up in float32, beside `.grad`, which keeps those of the last
    pass as it left them: in half, scaled.

    Those sums are what norms, clips and the step use. A step, applied or not, clears them.
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
        masters.gradient_of = self._sum_of  # a method, which follows this object into a deep copy
        MasterUpdate.__init__(self, job, masters=masters)
        self._begin(verbose)

    def reset(self) -> None:
        super().reset()
        self._sums.clear()

    def _find_params(self) -> list[torch.Tensor]:
        return [p for p in self._held() if (p in self._sums if self._has_master(p) else p.grad is not None)]

    def gradients(self, *, written: bool = False) -> list[torch.Tensor]:
        params = self.params()
        others = [p for p in params if not self._has_master(p)]
        plain = iter(gradient_values(self.shards.written(others) if written else others))
        return [self._sums[p] if self._has_master(p) else next(plain) for p in params]

    def master_params(self) -> Iterator[nn.Parameter]:
        """What apex calls master parameters: one float32 parameter for each in the groups.

        For one with a master it is the master (see `Masters.values`), with the very gradient that the next step will use.
        """
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
        for param, value in zip(params, wide, strict=True):
            if not self._has_master(param):
                continue
            if param in self._sums and self._differentiable:
                self._sums[param] = self._sums[param] + value
            elif param in self._sums:
                self._sums[param].add_(value)
            else:
                self._sums[param] = value
        return found

    def _require_backward(self) -> None:
        super()._require_backward()
        if self._num_backwards == 0:  # a bare loss.backward() does not reach the masters
            MasterUpdate._require_backward(self)

    def _has_master(self, param: torch.Tensor) -> bool:
        # As in apex, freezing a weight does not take back the gradient that its master has.
        return param.dtype == torch.float16 and (param.requires_grad or param in self._sums)
