"""A step on masters in parts, each as soon as the gradients of its buckets are there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from booster.masters.bucket import Bucket
from booster.masters.step import MasterStep, Told
from booster.shards import Shards
from booster.update.parts import Parts


class MasterParts(Parts):
    """Parts of `step`: a bucket and its parameters, and what has no master by itself."""

    def __init__(self, step: MasterStep, shards: Shards) -> None:
        super().__init__(step.masters.optimizer, shards)
        self._whole = step
        self._buckets: dict[torch.Tensor, list[Bucket]] = {}

    def units(self) -> list[list[torch.Tensor]]:
        self._whole.follow_params()
        masters = self._whole.masters
        self._follow_buckets()
        # A bucket has one parameter, or several that lie in no other.
        lists = {tuple(bucket.params): None for bucket in masters.buckets}
        return [list(params) for params in lists]

    def begin(self) -> None:
        super().begin()
        self._whole.masters.dither.next()

    def _step(self, params: Sequence[torch.Tensor], grad_scale: float) -> None:
        buckets = list({bucket: None for param in params for bucket in self._buckets.get(param, ())})
        self._whole.refuse_sparse(buckets)
        plain: list[list[torch.Tensor]] = [[] for _ in self._restricted]
        for param in params:
            if param not in self._buckets:
                plain[self._place[param][0]].append(param)
        self._whole.step_those(buckets, plain, Told(grad_scale), self._restricted)

    def rest(self, params: Sequence[torch.Tensor]) -> None:
        self._whole.masters.divide_by_gradients()
        self._follow_buckets()

    def _follow_buckets(self) -> None:
        self._buckets = {}
        for bucket in self._whole.masters.buckets:
            for param in bucket.params:
                self._buckets.setdefault(param, []).append(bucket)
