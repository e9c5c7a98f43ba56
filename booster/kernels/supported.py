"""Which parameters of one optimizer kernels step: all as they are, or the buckets of master weights and what has none."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import torch

from booster.common.torch_internals.optimizer_internals import step_hooks
from booster.kernels.rule import Rule
from booster.kernels.segments import Segments, Table, Tables
from booster.kernels.steps import KernelSteps
from booster.masters.bucket import Bucket
from booster.masters.formats import Stochastic
from booster.masters.rounding import RoundingRNG
from booster.masters.step import MasterStep
from booster.update.context import UpdateContext

_GRAD = attrgetter("grad")
_SPARSE, _GROUP = attrgetter("is_sparse"), attrgetter("group")  # of a gradient; of a bucket


class SupportedParams:
    """What kernels step of one optimizer: parameters as they are."""

    def __init__(self, context: UpdateContext, rule: Rule, *, counts_zeros: bool = False) -> None:
        self._optimizer, self._shards = context.optimizer, context.shards
        self.sharded = context.shards.sharded
        self.steps = KernelSteps(rule, context.optimizer, context.group, counts_zeros=counts_zeros)

    def tables(self, params: list[torch.Tensor]) -> Tables | None:
        """Return the tables of the gradients of `params`, all that are there; None where this step is not for kernels."""
        return None if any(step_hooks(self._optimizer)) else self._whole_tables(params)

    def _whole_tables(self, params: list[torch.Tensor]) -> Tables | None:
        return self.partial_tables(self.steps, params)

    def reading_tables(self, readings: KernelSteps, params: list[torch.Tensor]) -> Tables | None:
        """Return those of `readings` of the gradients of `params`, which are only read."""

        def collect(segments: Segments) -> None:
            for param in params:
                segments.add_reading(param)

        return readings.tables(params, (), self._shards, collect)

    def partial_tables(self, steps: KernelSteps, params: list[torch.Tensor]) -> Tables | None:
        """Return those of `steps` of the gradients of `params`, which are stepped before the others of their step."""

        def collect(segments: Segments) -> None:
            only = {id(param) for param in params}
            for index, group in enumerate(self._optimizer.param_groups):
                for param in group["params"]:
                    if id(param) in only:
                        segments.add(index, param)

        return steps.tables(params, (), self._shards, collect)

    @property
    def rng(self) -> RoundingRNG | None:
        """The random numbers of stochastic rounding."""
        return None

    def draw(self) -> dict[Bucket, torch.Tensor]:
        """Make the random numbers of this step of buckets that need one for each weight."""
        return {}

    def bring_in(self, table: Table, noise: dict[Bucket, torch.Tensor]) -> Iterator[Bucket]:
        """Yield each offloaded bucket while its states are on the device and `table` has their addresses."""
        return iter(())


class SupportedMasters(SupportedParams):
    """The buckets of master weights, and the float32 parameters that have none. whole: what steps them by torch."""

    def __init__(self, context: UpdateContext, rule: Rule, whole: MasterStep, *, counts_zeros: bool = False) -> None:
        super().__init__(context, rule, counts_zeros=counts_zeros)
        self._whole = whole

    def partial_tables(self, steps: KernelSteps, params: list[torch.Tensor]) -> Tables | None:
        only = {id(param) for param in params}
        self._plain = [[param for param in group if id(param) in only] for group in self._whole.plain()]
        self._buckets = [b for b in self._whole.masters.buckets if not only.isdisjoint(map(id, b.params))]
        self._whole.refuse_sparse(self._buckets)
        return steps.tables(params, tuple(self._buckets), self._shards, self._collect)

    def _whole_tables(self, params: list[torch.Tensor]) -> Tables | None:
        if any(map(_SPARSE, map(_GRAD, params))):
            return self.steps.tables(params, (), self._shards, self._collect)  # which says why it has none
        self._plain, self._buckets = self._whole.prepare()
        return self.steps.tables(params, tuple(self._buckets), self._shards, self._collect)

    def _collect(self, segments: Segments) -> None:
        for index, params in enumerate(self._plain):
            for param in params:
                if param.grad is not None:
                    segments.add(index, param)
        for bucket in self._buckets:
            segments.add_bucket(bucket)

    @property
    def rng(self) -> RoundingRNG | None:
        return self._whole.masters.rng

    def draw(self) -> dict[Bucket, torch.Tensor]:
        return {
            bucket: bucket.format.noise(bucket.size, bucket.dtype, bucket.device)
            for bucket in sorted(self._buckets, key=_GROUP)  # the order in which `MasterStep` steps them
            if isinstance(bucket.format, Stochastic)
        }

    def bring_in(self, table: Table, noise: dict[Bucket, torch.Tensor]) -> Iterator[Bucket]:
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
