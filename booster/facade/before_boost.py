"""What a boosted model was when its user built it, and how it is looked at as such."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from booster.common.snapshot import ContainerSnapshot
from booster.mixed_precision import MixedPrecision
from booster.mixed_precision.keep_fp32 import Float32Forward
from booster.model.modules import bare
from booster.model.params import Done, set_tensors
from booster.tensors.trees import HALF_DTYPES
from booster.tensors.weak import ForwardProxy, WeakForward


class BeforeBoost:
    """The dtypes and forwards of a model before `boost` changed it; made at that time.

    boosted_dtypes: of tensors that were boosted already, in another model.
    """

    def __init__(self, model: nn.Module, boosted_dtypes: Mapping[torch.Tensor, torch.dtype] | None = None) -> None:
        inner = bare(model)
        self._forwards = {name: child.__dict__.get("forward") for name, child in inner.named_modules()}
        self._dtypes: dict[str, torch.dtype] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        for name, child in inner.named_modules():
            for own, tensor in (*child._parameters.items(), *child._buffers.items()):
                if tensor is not None:
                    self._dtypes[_joined(name, own)] = (boosted_dtypes or {}).get(tensor, tensor.dtype)
            # No checkpoint has these buffers, so their bits are kept where a precision rounds them.
            for own in child._non_persistent_buffers_set:
                buffer = child._buffers.get(own)
                if buffer is not None and buffer.is_floating_point():
                    self._buffers[_joined(name, own)] = buffer

    def again(self, model: nn.Module) -> BeforeBoost:
        """Return the same of `model`, which is as it was built, but for its buffers' place in memory."""
        clone = copy.copy(self)
        clone._buffers = BeforeBoost(model)._buffers
        return clone

    def forget_unrounded(self, model: nn.Module) -> None:
        """Forget buffers that were not rounded; to be called when `model` was placed."""
        now = dict(bare(model).named_buffers(remove_duplicate=False))
        self._buffers = {
            name: buffer for name, buffer in self._buffers.items() if name in now and now[name].dtype != buffer.dtype
        }

    def dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype that the parameter or buffer `name`, which is `tensor` now, was given to `boost` in."""
        return self._dtypes.get(name, tensor.dtype)

    def dtypes(self, model: nn.Module) -> dict[torch.Tensor, torch.dtype]:
        """Return the same of all tensors that `model` has now."""
        return {
            tensor: self.dtype(_joined(name, own), tensor)
            for name, child in bare(model).named_modules()
            for own, tensor in (*child._parameters.items(), *child._buffers.items())
            if tensor is not None
        }

    def buffer(self, name: str, now: torch.Tensor) -> torch.Tensor:
        """Return the buffer `name`, which is `now` under a precision, as it would be without one."""
        kept = self._buffers.get(name)
        # Where the rounded buffer is another one now, the user wrote to it, and the kept bits are out of date.
        if kept is not None and torch.equal(kept.to(now.device, now.dtype), now):
            return kept.to(now.device)
        return now.to(self.dtype(name, now))

    def replaced_forward(self, model: nn.Module) -> str | None:
        """Return why `remove_wrapped_forwards` cannot find the user's own forwards; None: it can."""
        for name, child in bare(model).named_modules():
            chain = _chain(child.__dict__.get("forward"), self._forwards.get(name))
            if chain is None:
                return (
                    f"the forward of {name or 'the model itself'!r} was replaced, by a style of its tp_plan or by hand"
                )
        return None

    def remove_wrapped_forwards(self, model: nn.Module) -> dict[str, Any]:
        """Take from the modules of `model` all forwards but the user's own; return, by name, what plugins put around them."""
        around = {}
        for name, child in bare(model).named_modules():
            own = self._forwards.get(name)
            chain = _chain(child.__dict__.get("forward"), own) or []
            placed = [each for each in chain if not isinstance(each, (Float32Forward, WeakForward))]
            if placed:
                around[name] = placed
            if chain:
                del child.__dict__["forward"]
                if own is not None:
                    child.forward = own
        return around

    @contextmanager
    def as_built(self, model: nn.Module, precision: MixedPrecision) -> Iterator[None]:
        """Inside, `model`, which runs under `precision`, is as it was built, but its tensors are proxies without values."""
        inner = bare(model)
        before = ContainerSnapshot()
        for child in inner.modules():
            for table in (child.__dict__, child._modules, child._parameters, child._buffers):
                before.keep(table)
        try:
            self.remove_wrapped_forwards(model)
            # Modules may be swapped, and forwards replaced: afterwards all is as before.
            precision.revert(model)
            done: dict[Any, Any] = {}
            for name, child in inner.named_modules():
                for table in (child._parameters, child._buffers):
                    for own, tensor in table.items():
                        if tensor is not None:
                            if tensor not in done:
                                dtype = self.dtype(_joined(name, own), tensor)
                                # A proxy of the same shape, which takes no memory.
                                made = torch.zeros((), dtype=dtype, device=tensor.device).expand(tensor.shape)
                                is_param = isinstance(tensor, nn.Parameter)
                                done[tensor] = nn.Parameter(made, tensor.requires_grad) if is_param else made
                            table[own] = done[tensor]
            yield
        finally:
            before.restore()

    @torch.no_grad()
    def restore(self, model: nn.Module, masters: dict[torch.Tensor, torch.Tensor], *, for_masters: bool) -> Done:
        """Give the tensors of `model` the dtypes that they were built in, and the values that a checkpoint would keep.

        masters: float32 numbers behind half parameters, which are taken out one after another. for_masters: where there are
        such, have them, also of what was built in half. Returns the new tensor for each old one.
        """
        done: Done = {}
        for name, child in bare(model).named_modules():

            def value(own: str, tensor: torch.Tensor, name: str = name, child: nn.Module = child) -> torch.Tensor:
                full = _joined(name, own)
                if own in child._buffers:
                    return self.buffer(full, tensor)
                dtype, master = self.dtype(full, tensor), masters.pop(tensor, None)
                if master is not None and (for_masters or dtype not in HALF_DTYPES):
                    # A master keeps the bits that the half parameter lost.
                    return master if dtype in HALF_DTYPES else master.to(dtype)
                return tensor if tensor.dtype == dtype else tensor.detach().to(dtype)

            set_tensors(child, value, done)
        return done


def wrap_forward(model: nn.Module, around: dict[str, Any]) -> None:
    """Put back what `remove_wrapped_forwards` took of plugins, around the forwards that modules have now."""
    inner = bare(model)
    for name, chain in around.items():
        module = inner.get_submodule(name)
        innermost = module.__dict__.get("forward") or MethodType(type(module).forward, module)
        for outer, next_one in zip(chain, [*chain[1:], innermost], strict=True):
            outer.put_around(next_one)
            outer.belong_to(module)
        module.forward = chain[0]


def _chain(forward: Any, own: Any) -> list[Any] | None:
    """Return the wrappers around the forward `own` of a module, or around that of its class, outermost first; None where one of
    them is not of this library, such as a function that calls the forward."""
    chain: list[Any] = []
    while forward is not None and forward is not own:
        if getattr(forward, "__func__", None) is not None:
            return chain if own is None or forward == own else None
        if not isinstance(forward, ForwardProxy):
            return None
        chain.append(forward)
        forward = forward.forward
    return chain


def _joined(module: str, own: str) -> str:
    return f"{module}.{own}" if module else own
