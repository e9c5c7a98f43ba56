"""What kernels step of one optimizer: parameters as they are, or the buckets of masters."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch

from booster.common.torch_internals.optimizer_internals import step_hooks
from booster.kernels.rule import Rule
from booster.kernels.steps import KernelSteps
from booster.kernels.stretches import Stretches
from booster.kernels.table import Table, Tables
from booster.masters.bucket import Bucket
from booster.masters.formats import Stochastic
from booster.masters.rounding import RoundingRNG
from booster.masters.step import MasterStep
from booster.update.context import UpdateContext

_GRAD = attrgetter("grad")
_SPARSE, _GROUP = attrgetter("is_sparse"), attrgetter("group")  # of a gradient; of a bucket


class Covered:
    """What kernels step of one optimizer: parameters as they are."""

    def __init__(self, context: UpdateContext, rule: Rule, *, counts_zeros: bool = False) -> None:
        self._optimizer, self._shards = context.optimizer, context.shards
        self.sharded = context.shards.sharded
        self.steps = KernelSteps(rule, context.optimizer, context.group, counts_zeros=counts_zeros)

    def look(self, looks: KernelSteps, params: list[torch.Tensor]) -> Tables | None:
        """Return those of `looks` of the gradients of `params`, which are only read."""

        def collect(stretches: Stretches) -> None:
            for param in params:
                stretches.add_reading(param)

        return looks.table(params, (), self._shards, collect)

    def part(self, steps: KernelSteps, params: list[torch.Tensor]) -> Tables | None:
        """Return those of `steps` of the gradients of `params`, which are stepped before the others of their step."""
        only = {id(param) for param in params}

        def collect(stretches: Stretches) -> None:
            for index, group in enumerate(self._optimizer.param_groups):
                for param in group["params"]:
                    if id(param) in only:
                        stretches.add(index, param)

        return steps.table(params, (), self._shards, collect)

    def ready(self, params: list[torch.Tensor]) -> Tables | None:
        """Return the tables of the gradients of `params`, all that are there; None where this step is not for kernels."""
        if any(step_hooks(self._optimizer)):
            return None
        return self.steps.table(params, self._layout(params), self._shards, self._collect)

    def _collect(self, stretches: Stretches) -> None:
        """Add what is to be stepped. Raises Unfit."""
        for index, group in enumerate(self._optimizer.param_groups):
            for param in group["params"]:
                if param.grad is not None:
                    stretches.add(index, param)

    def _layout(self, params: list[torch.Tensor]) -> Any:
        """What is compared, by identity, to know whether stretches are what they were."""
        return ()

    @property
    def rng(self) -> RoundingRNG | None:
        """What gives random numbers to what is rounded by chance."""
        return None

    def draw(self) -> dict[Bucket, torch.Tensor]:
        """Make the random numbers of this step of buckets whose weights have one each."""
        return {}

    def visit(self, table: Table, noise: dict[Bucket, torch.Tensor]) -> Iterator[Bucket]:
        """Yield each bucket whose states lie on the host while they are on the device and `table` knows where."""
        return iter(())


class CoveredMasters(Covered):
    """The buckets of masters, and beside them float32 parameters. whole: what steps them otherwise."""

    def __init__(self, context: UpdateContext, rule: Rule, whole: MasterStep, *, counts_zeros: bool = False) -> None:
        super().__init__(context, rule, counts_zeros=counts_zeros)
        self._whole = whole

    def part(self, steps: KernelSteps, params: list[torch.Tensor]) -> Tables | None:
        only = {id(param) for param in params}
        self._plain = [[param for param in group if id(param) in only] for group in self._whole.plain()]
        self._buckets = [b for b in self._whole.masters.buckets if not only.isdisjoint(map(id, b.params))]
        self._whole.refuse_sparse(self._buckets)
        return steps.table(params, tuple(self._buckets), self._shards, self._collect)

    def _collect(self, stretches: Stretches) -> None:
        for index, params in enumerate(self._plain):
            for param in params:
                if param.grad is not None:
                    stretches.add(index, param)
        for bucket in self._buckets:
            stretches.add_bucket(bucket)

    def _layout(self, params: list[torch.Tensor]) -> Any:
        if any(map(_SPARSE, map(_GRAD, params))):
            return ()
        self._plain, self._buckets = self._whole.prepare()
        return tuple(self._buckets)

    @property
    def rng(self) -> RoundingRNG | None:
        return self._whole.masters.rng

    def draw(self) -> dict[Bucket, torch.Tensor]:
        return {
            bucket: bucket.format.noise(bucket.size, bucket.dtype, bucket.device)
            for bucket in sorted(self._buckets, key=_GROUP)  # the order in which `MasterStep` steps them
            if isinstance(bucket.format, Stochastic)
        }

    def visit(self, table: Table, noise: dict[Bucket, torch.Tensor]) -> Iterator[Bucket]:
        if not self._whole.masters.hosts:
            return
        state, groups = self._optimizer.state, self._optimizer.param_groups
        prefetches = self._whole.prefetches(self._buckets)
        for bucket in sorted(self._buckets, key=_GROUP):
            if bucket.host is not None and bucket in table.buckets:
                with prefetches[bucket.host].on_device(bucket):
                    own, names = state[bucket.handles[0]], self.steps.rule.states(groups[bucket.group])
                    table.move(bucket, noise.get(bucket, bucket.residual), [own[name] for name in names])
                    yield bucket
