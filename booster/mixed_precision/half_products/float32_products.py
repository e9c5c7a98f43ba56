"""The torch function mode that computes products of half-precision tensors in float32, and the table of those products.

Autograd keeps the halves that were multiplied, as of a product in half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from booster.common.torch_internals.autograd_internals import (
    compiler_frames,
    interpreters_around,
    saved_tensors_hooks_around,
    uninterceptable,
)
from booster.common.torch_internals.tensor_internals import storage_key, version
from booster.mixed_precision import hardware
from booster.mixed_precision.half_products.half_sums import (
    CONDITIONS,
    FLOAT32_SUMS,
    SMALL,
    is_half,
    rounded,
    without_autocast,
)
from booster.mixed_precision.half_products.probability_losses import REFUSED
from booster.model.params import is_dtensor
from booster.tensors.cast_regions import CastMode, cast_floats, run_engine
from booster.tensors.trees import HALF_DTYPES
from booster.tensors.weak import cast_weak_args


class SavedOperand:
    """A half that products read in float32, for the backward passes that need it again."""

    __slots__ = ("_uses", "_wide", "half")

    def __init__(self, half: torch.Tensor) -> None:
        self.half = half.detach()
        self._uses = 0
        self._wide: torch.Tensor | None = None

    def keep(self) -> SavedOperand:
        """A reference for one backward pass, which `widen` ends."""
        self._uses += 1
        return self

    def widen(self) -> torch.Tensor:
        """In float32, laid out as before; the same tensor from the first to the last backward pass that refers to it."""
        self._uses -= 1
        wide = self.half.float() if self._wide is None else self._wide
        self._wide = wide if self._uses > 0 else None
        return wide


class SaveOperandsInHalf(saved_tensors_hooks):
    """While active, autograd keeps an operand's half where it would save it in float32, and a backward pass widens it again.

    As for what torch saves itself, a backward pass raises RuntimeError where it was written to in between.
    """

    def __init__(self) -> None:
        self._operands: dict[int, tuple[SavedOperand, torch.Tensor]] = {}
        super().__init__(partial(_pack, self._operands), _unpack)

    def add(self, operand: SavedOperand, wide: torch.Tensor) -> None:
        """Know `wide`, and views of it, as that operand in float32."""
        self._operands[storage_key(wide)] = operand, wide

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._operands.clear()  # the graph refers to these hooks, and must not to what they knew


def _pack(operands: dict[int, tuple[SavedOperand, torch.Tensor]], tensor: torch.Tensor) -> Any:
    # By storage, not by tensor: products save transposes and views of what they are given.
    known = operands.get(storage_key(tensor))
    if known is None:
        return tensor, version(tensor), None, None
    operand, wide = known
    whole = tensor.shape == wide.shape and tensor.stride() == wide.stride()
    if not whole and is_dtensor(tensor):  # of which torch takes no view by strides
        return tensor, version(tensor), None, None
    view = None if whole else (tensor.shape, tensor.stride(), tensor.storage_offset())
    return operand.half, version(operand.half), operand.keep(), view


def _unpack(kept: Any) -> torch.Tensor:
    saved, written, operand, view = kept
    # torch checks versions of the tensors that it saves itself, and not of what a hook returns.
    if version(saved) != written:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{saved.type()} {list(saved.shape)}] is at version {version(saved)}; expected version {written} instead"
        )
    if operand is None:
        return saved
    wide = operand.widen()
    return wide if view is None else wide.as_strided(*view)


_CASTABLE = HALF_DTYPES | {torch.float32}  # by autocast
_ROUNDED = {torch.bfloat16: torch.Tensor.bfloat16, torch.float16: torch.Tensor.half}  # half the call that `to` is

_RECOMPUTES: ContextVar[bool] = ContextVar(
    "whether products ran here that a backward pass may run again", default=False
)


class Recomputation:
    """Whether a product ever ran where a backward pass may run it again: of one strategy, or of any in this thread.

    That is without gradients, as reentrant checkpointing and autograd functions run what they recompute, or under hooks on
    saved tensors, by which other checkpointing recomputes. A mode is called for every torch function, in a backward pass also
    for those of hooks: under `fully_shard` as many again as the forward pass has. So backward passes enter it only once this
    was seen. Products of other strategies count too: a backward pass goes through the graphs of all models of a loss.
    """

    def __init__(self) -> None:
        self._seen = False  # besides the context variable, as forward and backward may run in threads of their own

    @property
    def seen(self) -> bool:
        # What is compiled takes no note: it may run inside a checkpoint that the compiler does not see, and may have no side
        # effects where a backward pass is traced with it.
        compiler = compiler_frames()
        return self._seen or _RECOMPUTES.get() or (compiler is not None and any(compiler.cached_backends.values()))

    def record(self) -> None:
        """A product that is not torch's own is about to run."""
        if torch.compiler.is_compiling() or self._seen:
            return
        if not torch.is_grad_enabled() or saved_tensors_hooks_around() is not None:
            self._seen = True
            _RECOMPUTES.set(True)


class Float32Products(CastMode):
    """While active, products of halves compute in float32, on operands rounded to half, and return halves.

    Under autocast, what it would cast counts as half, but for the mask of attention, which is read as it is; what autocast
    would not cast follows the rules of `_PRODUCTS`. Products of unlike dtypes that nothing casts, of float64 and on other
    devices are torch's.

    Autograd differentiates the float32 computation, so gradients that flow into a product and out of it are halves, and the
    backward pass needs no mode: only what is recomputed there does, see `Recomputation`, so the mode stays active in
    `torch.autograd.backward`, which torch runs outside of modes. Autograd keeps operands in half, see `SaveOperandsInHalf`.

    Thread-local, as every torch function mode is. Make a new one for each region: a weight is widened once in it.

    device_type: where autocast may be on, e.g. "cpu".
    kinds: what is widened.
    sums: how functions that add up halves compute, see `half_sums`, on a CPU.
    training: whether the region that it is entered for records gradients. A product does not ask torch: a checkpointed block
        runs without gradients first, and must compute the same twice.

    Attributes:
        casts: whether the rules hold for what is not widened, too.
        fallback: another function that multiplies groups.
    """

    casts = False
    fallback: Any = None

    def __init__(
        self,
        device_type: str,
        kinds: frozenset[hardware.ProductKind],
        recomputation: Recomputation,
        sums: Mapping[Any, Callable[..., Any]] = FLOAT32_SUMS,
        *,
        training: bool,
    ) -> None:
        super().__init__()
        self._sums = sums
        self._device_type = device_type
        self._kinds = kinds
        self._recomputation = recomputation
        self._training = training
        # By id: the weight, its version then, in float32, in half, and the operand that autograd saved.
        self._weights: dict[int, tuple[torch.Tensor, int, torch.Tensor, torch.Tensor, SavedOperand | None]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        # The first lines run for every torch function of a forward pass: one look-up, no call of ours.
        product = _PRODUCTS.get(func) if func is not self.fallback else _GROUPED
        if product is None or not self.enabled:
            if (instead := self._sums.get(func)) is not None and self.enabled:
                if (condition := CONDITIONS.get(func)) is not None and not condition(args, kwargs):
                    return func(*args, **kwargs)
                again = not torch.compiler.is_compiling() and (
                    not torch.is_grad_enabled() or saved_tensors_hooks_around() is not None
                )
                # A checkpoint runs it again in backward, and must sum as here.
                if again and self._training and any(map(is_half, (*args, *kwargs.values()))):
                    self._recomputation.record()
                return instead(func, *args, **kwargs)
            # torch runs this function outside of modes, so what a checkpoint recomputes in it would be torch's own product.
            if func is torch.autograd.backward and self.enabled and self._recomputation.seen:
                with self:
                    return run_engine(*args, **kwargs)
            return func(*args, **kwargs)
        if types:
            # Weakly typed tensors come to their own rule after all modes, and what follows decides by dtypes.
            args, kwargs = cast_weak_args(func, args, kwargs)
        kind, rule, instead = product
        if func is F.multi_head_attention_forward:
            with self:  # in its body, which hands all of it to the mode otherwise
                return _multi_head_attention_forward(*args, **kwargs)
        first = (
            None if torch.compiler.is_compiling() else args and args[0]
        )  # graphs of backward passes may not ask for layouts
        if isinstance(first, torch.Tensor) and first.layout is not torch.strided and self._sums.keys() - REFUSED:
            return rounded(func, *args, **kwargs)  # torch sums the rows of a sparse matrix in half
        if kind not in self._kinds:
            return self._cast_only(func, rule, args, kwargs) if self.casts else func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if not kwargs and instead is None and kind != "recurrent layer":
            out = self._small_product(func, rule, args)
            if out is not None:
                return out
        return self._product(func, rule, instead, args, kwargs)

    def _cast_only(self, func: Any, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func` in the dtypes of its operands, which are cast where autocast is on and has no rule for it."""
        casts = rule in ("half", "widest") and torch.is_autocast_enabled(self._device_type)
        if casts and kwargs.get("out_dtype") is None:  # which torch ties to the dtype of the operands
            if self._training:
                self._recomputation.record()
            found = {each.dtype for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)}
            half = torch.get_autocast_dtype(self._device_type)
            dtype = half if rule == "half" else torch.float32 if torch.float32 in found else None
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        autocast = torch.is_autocast_enabled(self._device_type)
        half, small = self._common_half((query, key, value), {}, autocast)
        if half is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.float()
        kept, caches = self._prepare(autocast, small=small)
        wide = [self._widened(each, half, kept, caches) for each in (query, key, value)]
        whole = (*wide, attn_mask, *args)
        out: torch.Tensor = self._computed(F.scaled_dot_product_attention, kept, whole, kwargs, autocast)
        return out.to(half)

    def _prepare(self, autocast: bool, *, small: bool) -> tuple[SaveOperandsInHalf | None, bool]:
        """Before a product: hooks that have autograd keep its operands in half, or None where they are `small` or other hooks
        are around; and whether this region keeps the weights that it widens."""
        compiles, records = torch.compiler.is_compiling(), torch.is_grad_enabled()
        hooked = not compiles and saved_tensors_hooks_around() is not None
        if self._training and (hooked or not records):
            self._recomputation.record()
        # Hooks on saved tensors hide the operands from transforms of torch.func, and the compiler traces none.
        if compiles or not records or interpreters_around() is not None:
            return None, False
        caches = not autocast or torch.is_autocast_cache_enabled()
        return (None if small or hooked else SaveOperandsInHalf()), caches

    def _small_product(self, func: Any, rule: Rule, args: tuple[Any, ...]) -> torch.Tensor | None:
        """As `_product`, of small tensors alone; None where it is not that."""
        if torch.compiler.is_compiling():  # asked here, as after a graph break this is compiled by itself
            return None
        device_type = self._device_type
        autocast = torch.is_autocast_enabled(device_type)
        half = cast_to = torch.get_autocast_dtype(device_type) if autocast and rule in _TO_HALF else None
        # All in one function: for such products Python calls cost more than the arithmetic does.
        for each in args:
            if isinstance(each, torch.Tensor):
                dtype = each.dtype
                if dtype is not half and (cast_to is None or dtype not in _CASTABLE):
                    if half is not None or dtype not in HALF_DTYPES:
                        return None
                    half = dtype
                if each.numel() > SMALL or not each.is_cpu or each.layout is not torch.strided:
                    return None
            elif isinstance(each, (list, tuple)) and each and isinstance(each[0], torch.Tensor):
                return None
        if half is None:
            return None
        records, hooked = torch.is_grad_enabled(), saved_tensors_hooks_around() is not None
        if self._training and (hooked or not records):
            self._recomputation.record()
        # A weight that autocast itself does not cache, as in a session of apex_amp, may be written before it is read again.
        caches = records and interpreters_around() is None and (not autocast or torch.is_autocast_cache_enabled())
        weights, to_half, wide_args = self._weights, _ROUNDED[half], []
        for each in args:
            if isinstance(each, torch.Tensor):
                known = weights.get(id(each)) if caches else None
                if known is not None and known[0] is each and known[1] == version(each) and known[3].dtype is half:
                    wide = known[2]
                else:
                    narrow = each if each.dtype is half else to_half(each)
                    wide = narrow.float()
                    if caches and each.requires_grad and each.is_leaf:
                        weights[id(each)] = each, version(each), wide, narrow, None
                wide_args.append(wide)
            else:
                wide_args.append(each)
        if not autocast:
            return to_half(func(*wide_args))
        torch.set_autocast_enabled(device_type, False)  # instead of a context, which would cost as much as the product
        try:
            return to_half(func(*wide_args))
        finally:
            torch.set_autocast_enabled(device_type, True)

    def _product(self, func: Any, rule: Rule, instead: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        autocast = torch.is_autocast_enabled(self._device_type)
        half, small = self._common_half(args, kwargs, autocast and rule in _TO_HALF)
        if half is None or (kwargs and kwargs.get("out_dtype") is not None):
            return self._cast_only(func, rule, args, kwargs)
        into = args[0] if instead is not None else kwargs.get("out")
        if into is not None:
            if into.dtype != half or (instead is None and (_records(args) or into.requires_grad)):
                return func(*args, **kwargs)
            kwargs = {key: value for key, value in kwargs.items() if key != "out"}
        kept, caches = self._prepare(autocast, small=small)
        wide_args = [self._widened(each, half, kept, caches) for each in args]
        wide_kwargs = {key: self._widened(value, half, kept, caches) for key, value in kwargs.items()}
        out = self._computed(instead or func, kept, wide_args, wide_kwargs, autocast)
        if into is not None:
            if into.shape != out.shape:
                return func(*args, **kwargs) if instead is not None else func(*args, out=into, **kwargs)
            return into.copy_(out)
        result = torch.float32 if func in _PROMOTING and _hidden_dtype(args) is torch.float32 else half
        if isinstance(out, torch.Tensor):
            return out.to(result)
        return type(out)(each.to(result) for each in out)

    def _computed(self, func: Any, kept: SaveOperandsInHalf | None, args: Any, kwargs: Any, autocast: bool) -> Any:
        """The product in float32, with autocast off."""
        if kept is not None:
            with kept:
                return self._computed(func, None, args, kwargs, autocast)
        return without_autocast(self._device_type, func, args, kwargs) if autocast else func(*args, **kwargs)

    def _common_half(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], cast: bool
    ) -> tuple[torch.dtype | None, bool]:
        """The half dtype that operands have, or are `cast` to by autocast; None where the product is left to torch. And whether
        all of them are small."""
        found: torch.dtype | None = None
        small = True
        for value in (*args, *kwargs.values()) if kwargs else args:
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(each, torch.Tensor) or not each.is_floating_point():
                    continue
                dtype = each.dtype
                # Autocast casts these before the product, which this takes the place of.
                if cast and (dtype is torch.float32 or dtype in HALF_DTYPES):
                    dtype = torch.get_autocast_dtype(self._device_type)
                # Torch has kernels of sparse halves, and no others; a graph of a backward pass may not ask.
                if not torch.compiler.is_compiling() and each.layout is not torch.strided:
                    return None, False
                if dtype not in HALF_DTYPES or found not in (None, dtype) or each.device.type != self._device_type:
                    return None, False
                found = dtype
                small = small and each.numel() <= SMALL
        return found, small

    def _widened(self, value: Any, half: torch.dtype, kept: SaveOperandsInHalf | None, caches: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            several = isinstance(value, (list, tuple))
            return type(value)([self._widened(each, half, kept, caches) for each in value]) if several else value
        if not value.is_floating_point():
            return value
        is_weight = caches and value.requires_grad and value.is_leaf
        if is_weight:
            written = version(value)
            known = self._weights.get(id(value))
            # It was not written to, nor is this in another autocast.
            if known is not None and known[0] is value and known[1] == written and known[3].dtype is half:
                if kept is not None:
                    kept.add(SavedOperand(known[3]) if known[4] is None else known[4], known[2])
                return known[2]
        narrow = value if value.dtype is half else value.to(half)
        wide = narrow.float()
        operand = None
        if kept is not None:
            operand = SavedOperand(narrow)
            kept.add(operand, wide)
        if is_weight:
            self._weights[id(value)] = value, written, wide, narrow, operand
        return wide


_multi_head_attention_forward = uninterceptable(F.multi_head_attention_forward)

# How autocast casts operands: to half on every device, by a kernel of torch's; to half or to the widest of them by what is
# here, as torch itself does on CUDA at most; or not at all, as all that is written in place.
Rule = Literal["autocast", "half", "widest", "never"]
_TO_HALF = frozenset(("autocast", "half"))
# Of each function: its kind, its rule, and of one in place, that which makes a new tensor.
_Product = tuple[hardware.ProductKind, Rule, "Callable[..., Any] | None"]
_GROUPED: _Product = "matrix product", "half", None


def _named(kind: hardware.ProductKind, rule: Rule, names: str) -> dict[Any, _Product]:
    holders = (torch, torch.Tensor, torch.linalg, F)
    return {
        getattr(holder, name): (kind, rule, None)
        for name in names.split()
        for holder in holders
        if hasattr(holder, name)
    }


def _products() -> Mapping[Any, _Product]:
    found = _named(
        "matrix product", "autocast", "mm bmm matmul __matmul__ __rmatmul__ addmm addbmm baddbmm linear vecdot"
    )
    found |= _named("matrix product", "half", "_grouped_mm mv addmv addr einsum tensordot multi_dot chain_matmul")
    found |= _named("matrix product", "widest", "dot vdot inner bilinear cross")
    # In place the result must be rounded into the tensor itself, so the form that returns a new one is computed first.
    for name in ("addmm", "addbmm", "baddbmm", "addmv"):
        found[getattr(torch.Tensor, f"{name}_")] = "matrix product", "never", getattr(torch, name)
    for names in (
        "conv1d conv2d conv3d conv_tbc convolution",
        "conv_transpose1d conv_transpose2d conv_transpose3d _convolution",
    ):
        found |= _named("convolution", "autocast", names)
    for names in ("lstm gru rnn_tanh rnn_relu", "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"):
        found |= _named("recurrent layer", "autocast", names)
    return found | _named("attention", "autocast", "scaled_dot_product_attention multi_head_attention_forward")


_PRODUCTS = _products()
# Under autocast these add products in half to a hidden state in float32, and return that.
_PROMOTING = frozenset({torch.gru, torch.lstm_cell, torch.gru_cell})


def _hidden_dtype(args: tuple[Any, ...]) -> torch.dtype:
    """The dtype of the hidden state that a recurrent function is given: its second argument, or the third of packed ones."""
    hidden = args[1][0] if isinstance(args[1], (list, tuple)) else args[1]
    return (hidden if hidden.is_floating_point() else args[2]).dtype


def _records(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in args)
