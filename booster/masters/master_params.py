"""Float32 parameters in the place of half ones, for methods of an optimizer that are no steps."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from booster.masters.masters import Masters, replaced_params
from booster.masters.states import copy_masters, state_of_bucket, write_pieces
from booster.model.params import local_shard
from booster.shards.base import State


class MasterParams:
    """All masters of an optimizer as parameters in the shapes that the user knows, in its groups and as keys of its state.

    For whole parameters these are the handles of their buckets, which the optimizer knows from its steps; for flat buckets
    they are new. They stay until `restore_groups`; `adopt` then makes masters, weights and states of what was written.
    grad_scale: what gradients are multiplied by; None: they have none.
    """

    def __init__(self, masters: Masters, grad_scale: float | None) -> None:
        if masters.hosts:
            raise RuntimeError(
                f"a method of {type(masters.optimizer).__name__} other than step() would need all states on the device at "
                "once, and offload_states=True keeps them in the host's memory; leave it False"
            )
        masters.sync()
        self._masters, self._state, self._scale = masters, masters.optimizer.state, grad_scale
        self._copies = {bucket: bucket.copy_masters() for bucket in masters.buckets}
        self._flat = [bucket for bucket in masters.buckets if not bucket.whole]
        groups = masters.optimizer.param_groups
        self._plain: list[Any] = [p for each in groups for p in masters.outside(each["params"]) if p.grad is not None]
        self._before = [param.detach().clone() for param in self._plain if grad_scale is not None]
        self._tensors = self._make_params()
        states = masters.states_of(self._flat)
        self._kept = {bucket: self._state.pop(bucket.handles[0], None) for bucket in self._flat}
        self._written: dict[torch.Tensor, State] = {}
        self._state.update({self._tensors[param]: own for param, own in states.items()})
        self._grads = self._give_gradients()
        self._in_groups = ExitStack()
        self._in_groups.enter_context(replaced_params(masters.optimizer, self._tensors))

    def restore_groups(self) -> None:
        """Have groups, states and gradients as they were, but for what the method wrote to gradients."""
        self._in_groups.close()
        for param, (grad, given) in self._grads.items():
            self._set_gradient(param, grad, given, self._tensors.get(param, param).grad)
        for tensor in self._tensors.values():
            tensor.grad = None
        for param in {param: None for bucket in self._flat for param in bucket.params}:
            if self._tensors[param] in self._state:
                self._written[param] = self._state.pop(self._tensors[param])
        self._state.update({bucket.handles[0]: own for bucket, own in self._kept.items() if own is not None})
        for bucket, values in self._copies.items():
            if bucket.whole:
                bucket.detach()
                continue
            write_pieces(bucket, values, [self._tensors[param] for param in bucket.params], None, None)

    def changed(self) -> bool:
        """Return whether weights or masters were written."""
        self._changed = [
            bucket
            for bucket, values in self._copies.items()
            if not torch.equal(values.view(torch.int32), bucket.copy_masters().view(torch.int32))
        ]
        plain = self._scale is not None and not all(map(torch.equal, self._plain, self._before))
        return plain or bool(self._changed)

    def put_back(self) -> None:
        """Have weights without masters as they were."""
        for param, before in zip(self._plain, self._before, strict=True):
            param.copy_(before)

    def adopt(self) -> None:
        """Make masters, weights and states of what was written."""
        masters = self._masters
        if self._changed:
            masters.rng.next()
        for bucket in self._flat:
            self._state.pop(bucket.handles[0], None)
        # Buckets stay where their parameters still share one history.
        if masters.fits_buckets(self._written):
            for bucket in self._flat:
                self._state.update(state_of_bucket(bucket, self._written))
            for bucket in self._changed:
                bucket.commit_masters(self._copies[bucket], bucket.scratch())
        else:  # parameters of one bucket have come to different states
            values: dict[torch.Tensor, torch.Tensor] = {}
            for bucket, own in self._copies.items():
                if bucket.whole:
                    values |= zip(bucket.params, bucket.handles_of(own), strict=True)
                    for param, handle in zip(bucket.params, bucket.handles, strict=True):
                        if handle in self._state:
                            self._written[param] = self._state.pop(handle)
                else:
                    values |= {param: self._tensors[param].detach() for param in bucket.params}
            masters.rebuild(self._written, values)
        masters.rng.drawn.clear()

    # ------------------------------------------------------------------ inside

    def _make_params(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the float32 parameter of each parameter that has a master."""
        made: dict[torch.Tensor, torch.Tensor] = {}
        wholes: dict[torch.Tensor, torch.Tensor] = {}
        for bucket, values in self._copies.items():
            if bucket.whole:
                bucket.attach(values, None)
                made |= zip(bucket.params, bucket.handles, strict=True)
            else:
                copy_masters(bucket, values, wholes)
        return made | {p: nn.Parameter(whole, requires_grad=p.requires_grad) for p, whole in wholes.items()}

    def _give_gradients(self) -> dict[torch.Tensor, tuple[Any, torch.Tensor]]:
        """Give these parameters unscaled gradients; return, by the user's parameter, its own gradient and the one given."""
        given: dict[torch.Tensor, tuple[Any, torch.Tensor]] = {}
        if self._scale is None:
            return given
        for param in [*self._tensors, *self._plain]:
            tensor, own = self._tensors.get(param, param), param.grad
            if own is not None:
                tensor.grad = self._unscaled(own, tensor.dtype)
                given[param] = own, tensor.grad
        return given

    def _set_gradient(self, param: torch.Tensor, own: Any, given: torch.Tensor, left: torch.Tensor | None) -> None:
        """Make of `left`, where `given` was, the gradient of `param`, which is `own` where nothing was written."""
        if left is None:
            param.grad = None
            return
        if left is not given or not torch.equal(local_shard(given), local_shard(self._unscaled(own, given.dtype))):
            own.copy_(left * self._scale)  # type: ignore[operator]
        param.grad = own

    def _unscaled(self, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return grad.to(dtype) * (1.0 / self._scale)  # type: ignore[operator]
