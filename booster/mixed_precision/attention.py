"""Running scaled_dot_product_attention in float32 while training in half precision.

The half-precision backward of the CPU flash kernel is several times slower than the float32 one, so a bfloat16
transformer spends most of its step there. Inference keeps the half kernel, whose forward is the faster one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from booster.cast_regions import CastMode
from booster.casting import HALF_DTYPES
from booster.mixed_precision.engine import run_engine
from booster.torch_internals import has_saved_tensors_hooks

_SEEN: ContextVar[bool] = ContextVar("whether attention ran here that a backward pass may run again", default=False)


class Recomputation:
    """Whether attention ever ran where a backward pass may run it again: of one strategy, or of any in this thread.

    That is without gradients, as reentrant checkpointing and autograd functions run what they recompute, or under hooks on
    saved tensors, by which other checkpointing recomputes. A mode sees every torch function, in a backward pass also those of
    hooks: under `fully_shard` as many again as the forward pass has. So backward passes enter it only once this was seen.
    That of other strategies counts too, since a backward pass goes through the graphs of all models that a loss is made of.
    """

    def __init__(self) -> None:
        self._seen = False  # beside the variable, as forward and backward may run in threads of their own

    @property
    def seen(self) -> bool:
        return self._seen or _SEEN.get()

    def look(self) -> None:
        """Attention is about to run."""
        if torch.compiler.is_compiling():
            self._seen = (
                True  # it may run inside a checkpoint that the compiler does not see; a variable would break the graph
            )
        elif not torch.is_grad_enabled() or has_saved_tensors_hooks():
            self._seen = True
            _SEEN.set(True)

    def backward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Return a context for backward passes of what ran in `Float32Attention` with this."""
        return Float32Attention(device_type, self) if self.seen else nullcontext()


class Float32Attention(CastMode):
    """While active, attention computes in float32 and returns the dtype it would have returned.

    device_type: where autocast may be on, e.g. "cpu". Thread-local, as every torch function mode is. It does not ask
    whether gradients are needed: a checkpointed block runs without them first, and must compute the same twice. It stays
    active in `torch.autograd.backward`, which a mode otherwise leaves, so that recomputed activations meet it; but only where
    `recomputation` says that there are any.
    """

    def __init__(self, device_type: str, recomputation: Recomputation | None = None) -> None:
        super().__init__()
        self._device_type = device_type
        self._recomputation = Recomputation() if recomputation is None else recomputation

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if not self.enabled:
            return func(*args, **(kwargs or {}))
        if func is torch.autograd.backward and self._recomputation.seen:
            with self:
                return run_engine(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self._recomputation.look()
            return self._attention(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            self._recomputation.look()
            # The call inside it is out of a mode's reach; the math backend computes half inputs in float32.
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        dtype = self._autocast_dtype(query)
        if dtype not in HALF_DTYPES:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.float()
        with torch.autocast(self._device_type, enabled=False):
            out = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), attn_mask, *args, **kwargs)
        return out.to(dtype)

    def _autocast_dtype(self, query: torch.Tensor) -> torch.dtype:
        if query.dtype != torch.float64 and torch.is_autocast_enabled(self._device_type):
            return torch.get_autocast_dtype(self._device_type)
        return query.dtype
