"""Products of half tensors computed in float32, where a CPU multiplies halves slowly or not at all.

A product of two halves is exact in float32. Hardware with units for a half dtype rounds operands, sums in float32 and rounds
the result; so does what is here: operands are rounded, computed with in float32, and the result is rounded once. Such numbers
differ from those of the hardware by the order of the sum alone, and an overflow of float16 is an infinity in both.

Under autocast, products that it has no rule for are cast here as well, on every device: those of experts, above all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from booster.common import arguments
from booster.common.torch_internals import (
    has_saved_tensors_hooks,
    interpreters_around,
    saved_tensors_hooks_around,
    uninterceptable,
    version,
)
from booster.mixed_precision import hardware
from booster.mixed_precision.engine import run_engine
from booster.mixed_precision.half_sums import SUMS, is_half, of_sparse_product, without_autocast
from booster.mixed_precision.kept_operands import KeptOperands, WideOperand
from booster.tensors.cast_regions import CastMode, cast_floats
from booster.tensors.trees import HALF_DTYPES
from booster.tensors.weak import settled

Choice = Literal["auto", "native", "float32"]
CHOICES: tuple[Choice, ...] = ("auto", "native", "float32")

# Elements of an operand that autograd keeps in float32, as it saves it: to keep the half and widen that again costs more time
# than such a product, and the bytes that it saves are fewer than those of the gradients that come after.
SMALL = 2**12
_CASTABLE = HALF_DTYPES | {torch.float32}  # by autocast
_ROUNDED = {torch.bfloat16: torch.Tensor.bfloat16, torch.float16: torch.Tensor.half}  # half the call that `to` is

_logger = logging.getLogger(__name__)
_SEEN: ContextVar[bool] = ContextVar("whether products ran here that a backward pass may run again", default=False)


class HalfProducts:
    """How one strategy has products of halves computed: as torch does, or in float32 where that is faster.

    dtype: the half dtype that the strategy computes in; None where it computes in none. sdpa_fp32: attention in float32 while
    training, whatever else is widened; "auto" goes by the table as other products do; False leaves it to torch.
    """

    widens: bool
    """Whether anything is computed in float32, or cast, in some region; where it is False, nobody need ask for a context."""

    refuses_probabilities = True
    """Whether losses of probabilities are refused, see `half_sums.UNSAFE`; apex.amp has a rule of its own."""

    def __init__(self, dtype: torch.dtype | None, sdpa_fp32: bool | Literal["auto"] = "auto") -> None:
        self.dtype = dtype if dtype in HALF_DTYPES else None
        self._sdpa_fp32 = arguments.choice("sdpa_fp32", sdpa_fp32, (True, False, "auto"))
        self._recomputation = Recomputation()
        self._settled = False
        self._groups = self._falls_back = False
        self._regions: dict[tuple[str, bool], frozenset[hardware.Kind]] = {}
        self.choice: Choice = "auto"
        self.choose("auto")

    def choose(self, choice: Choice) -> None:
        """Take `half_products` of `Booster`: "auto" goes by what this CPU has units for, "native" leaves all products to torch,
        but attention where `sdpa_fp32` is True, "float32" widens them all."""
        self.choice = arguments.choice("half_products", choice, CHOICES)
        self._settled = False
        if self.dtype is None or choice == "native":
            self.kinds: frozenset[hardware.Kind] = frozenset()
        else:
            self.kinds = hardware.KINDS if choice == "float32" else hardware.slow_products(self.dtype)
        self._plan()

    def settle(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Have all ranks of `group` widen what any of them has no units for, and say once what that is. Cost: the first time,
        one MAX all-reduce of a few bytes, where "auto" was chosen for a CPU."""
        if self._settled or device.type != "cpu" or self.dtype is None:
            return
        self._settled = True
        if self.choice == "auto" and group is not None:
            ordered = sorted(hardware.KINDS)
            found = torch.tensor([kind in self.kinds for kind in ordered], dtype=torch.int32)
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
            self.kinds = frozenset(kind for kind, widened in zip(ordered, found.tolist(), strict=True) if widened)
            self._plan()
        report = self.report()
        if report and (not dist.is_initialized() or dist.get_rank() == 0):
            _logger.info(report)

    def look_at(self, model: nn.Module) -> None:
        """Cast from now on what autocast has no rule for, if `model`, which runs under it, has a parameter that such products
        read: several matrices in one, as experts and `nn.Bilinear` have. Others need no mode, which would cost each function
        a call."""
        if self.dtype is None:
            return
        filters = {
            id(each) for module in model.modules() if isinstance(module, _CONVOLUTIONS) for each in module.parameters()
        }
        if any(each.dim() == 3 and len(each) > 1 and id(each) not in filters for each in model.parameters()):
            self._groups = self.widens = True
        # What transformers multiplies experts by where torch.compile or the GPU has no grouped_mm.
        self._falls_back = self._falls_back or hasattr(torch.ops.transformers, "grouped_mm_fallback")

    def report(self) -> str:
        """What is widened on a CPU, as a sentence; empty where nothing is."""
        inference, training = (self._regions.get(("cpu", each), _NONE) for each in (False, True))
        if not training:
            return ""
        name = str(self.dtype).removeprefix("torch.")
        kinds = [kind if kind == "attention" else f"{kind}s" for kind in sorted(inference)]
        kinds += [f"{kind} while training" for kind in sorted(training - inference)]
        asked = "half_products='float32' asks" if self.choice == "float32" else "sdpa_fp32=True asks"
        slower = f"this CPU ({hardware.cpu_name()}) is slower in it"
        where = asked if self.choice == "float32" or (not inference and self._sdpa_fp32 is True) else slower
        leaves = ["half_products='native'"] if inference else []
        leaves += ["sdpa_fp32=False"] if "attention" in training else []
        return (
            f"{name} is multiplied in float32, with operands and results rounded to {name}, where {where}: {', '.join(kinds)}; "
            f"{' and '.join(leaves)} {'leave' if len(leaves) > 1 else 'leaves'} {'them' if len(kinds) > 1 else 'it'} to torch"
        )

    def forward_context(self, device_type: str) -> WideProducts | None:
        """A new context for one forward pass, to be entered inside `torch.autocast`; None where products are torch's."""
        training = torch.is_grad_enabled()
        kinds = self._regions.get((device_type, training))
        if kinds is None and not self._groups:
            return None
        own = SUMS if self.refuses_probabilities else _WITHOUT_REFUSALS
        if kinds is None or self.choice == "native":
            own = {}
        wide = WideProducts(device_type, kinds or _NONE, self._recomputation, own, training=training)
        # Where it is entered with gradients alone, a function would be cast while training and raise in evaluation.
        wide.casts = self._groups or bool(self._regions.get((device_type, False)))
        if self._falls_back:
            wide.fallback = torch.ops.transformers.grouped_mm_fallback
        return wide

    def backward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """A new context for one backward pass: that of a forward pass in training, once anything ran that may run again."""
        return (self.forward_context(device_type) if self._recomputation.seen else None) or nullcontext()

    def _plan(self) -> None:
        """Work out which products are widened in a region, by its device type and whether it records gradients. Where none
        are, the mode is entered for the sums alone, but by "native"."""
        self._regions = {}
        if self.dtype is not None and self.choice != "native":
            kinds = self.kinds if self._sdpa_fp32 is not False else self.kinds - {"attention"}
            training = kinds if self._sdpa_fp32 is False else kinds | hardware.SLOW_BACKWARD
            self._regions = {("cpu", False): kinds, ("cpu", True): training}
        if self.dtype is not None and self._sdpa_fp32 is True:
            self._regions["cpu", True] = self._regions.get(("cpu", True), _NONE) | {"attention"}
            self._regions["cuda", True] = frozenset({"attention"})
        self.widens = self._groups or bool(self._regions)


class Recomputation:
    """Whether a product ever ran where a backward pass may run it again: of one strategy, or of any in this thread.

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
        """A product that is not torch's own is about to run."""
        if torch.compiler.is_compiling():
            # It may run inside a checkpoint that the compiler does not see. A variable would break the graph; an attribute
            # that is read before it is written would be a guard, which fails in the next call and compiles a second time.
            self._seen = True
        elif not self._seen and (not torch.is_grad_enabled() or has_saved_tensors_hooks()):
            self._seen = True
            _SEEN.set(True)


class WideProducts(CastMode):
    """While active, products of halves compute in float32, on operands rounded to half, and return halves.

    Under autocast, what it would cast counts as half, but for the mask of attention, which is read as it is; what it would not
    is cast by the rules of `_PRODUCTS`. Autograd differentiates the float32 computation, so gradients that flow into a product
    and out of it are halves, and the backward pass needs no mode: only what is recomputed there does, see `Recomputation`, so
    it stays active in `torch.autograd.backward`, which a mode otherwise leaves. Autograd keeps operands in half, see
    `KeptOperands`. Products of unlike dtypes that nothing casts, of float64 and on other devices are torch's.

    device_type: where autocast may be on, e.g. "cpu". kinds: what is widened. sums: how functions that add up halves compute,
    see `half_sums`, on a CPU. training: whether the region that it is entered for records gradients; a product does not ask,
    since a checkpointed block runs without them first, and must compute the same twice. casts: whether rules hold for what is
    not widened, too. fallback: another function that multiplies groups. Thread-local, as every torch function mode is. Make a
    new one for each region: a weight is widened once in it.
    """

    casts = False
    fallback: Any = None

    def __init__(
        self,
        device_type: str,
        kinds: frozenset[hardware.Kind],
        recomputation: Recomputation,
        sums: Mapping[Any, Callable[..., Any]] = SUMS,
        *,
        training: bool,
    ) -> None:
        super().__init__()
        self._sums = sums
        self._device_type = device_type
        self._kinds = kinds
        self._recomputation = recomputation
        self._training = training
        self._weights: dict[int, tuple[torch.Tensor, int, torch.Tensor, torch.Tensor, WideOperand | None]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        product = _PRODUCTS.get(func) if func is not self.fallback else _GROUPED
        if product is None or not self.enabled:
            if (instead := self._sums.get(func)) is not None and self.enabled:
                again = (
                    torch.compiler.is_compiling()
                    or not torch.is_grad_enabled()
                    or saved_tensors_hooks_around() is not None
                )
                # A checkpoint runs it again in backward, and must sum as here. Of other dtypes a graph may not take note.
                if again and self._training and any(map(is_half, (*args, *kwargs.values()))):
                    self._recomputation.look()
                return instead(func, args, kwargs)
            if func is torch.autograd.backward and self.enabled:
                return self._backward(func, args, kwargs)
            return func(*args, **kwargs)
        if types:  # before what it decides by dtypes, as weak tensors come to their own rule last
            args, kwargs = settled(func, args, kwargs)
        kind, rule, instead = product
        if func is F.multi_head_attention_forward:
            with self:  # in its body, which hands all of it to the mode otherwise
                return _multi_head_attention_forward(*args, **kwargs)
        compiles = torch.compiler.is_compiling()  # graphs of backward passes may not ask for layouts
        if (
            args
            and not compiles
            and isinstance(args[0], torch.Tensor)
            and args[0].layout is not torch.strided
            and self._sums
        ):
            return of_sparse_product(func, args, kwargs)
        if kind not in self._kinds:
            return self._as_torch_has_it(func, rule, args, kwargs) if self.casts else func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if not kwargs and instead is None and kind != "recurrent layer":
            out = self._small_product(func, rule, args)
            if out is not None:
                return out
        return self._product(func, rule, instead, args, kwargs)

    def _as_torch_has_it(self, func: Any, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func` in the dtypes of its operands, which are cast where autocast is on and has no rule of its own."""
        casts = rule in ("half", "widest") and torch.is_autocast_enabled(self._device_type)
        if casts and kwargs.get("out_dtype") is None:  # which torch ties to the dtype of the operands
            if self._training:
                self._recomputation.look()
            found = {each.dtype for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)}
            half = torch.get_autocast_dtype(self._device_type)
            dtype = half if rule == "half" else torch.float32 if torch.float32 in found else None
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        return func(*args, **kwargs)

    def _backward(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._recomputation.seen:
            return func(*args, **kwargs)
        with self:
            return run_engine(*args, **kwargs)

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
        kept, caches = self._begin(autocast, small=small)
        wide = [self._widened(each, half, kept, caches) for each in (query, key, value)]
        whole = (*wide, attn_mask, *args)
        out: torch.Tensor = self._computed(F.scaled_dot_product_attention, kept, whole, kwargs, autocast)
        return out.to(half)

    def _begin(self, autocast: bool, *, small: bool) -> tuple[KeptOperands | None, bool]:
        """Of a product that is about to be made: what takes note of its operands, where autograd keeps them in half, and not
        where they are `small`; and whether weights that it widens are kept for others in this region."""
        compiles, records = torch.compiler.is_compiling(), torch.is_grad_enabled()
        hooked = not compiles and saved_tensors_hooks_around() is not None
        if self._training and (compiles or hooked or not records):
            self._recomputation.look()
        if compiles or not records or interpreters_around() is not None:
            return None, False
        caches = not autocast or torch.is_autocast_cache_enabled()
        return (None if small or hooked else KeptOperands()), caches

    def _small_product(self, func: Any, rule: Rule, args: tuple[Any, ...]) -> torch.Tensor | None:
        """As `_product`, of small tensors alone, in one call, since calls cost more than they do; None where it is not that."""
        if torch.compiler.is_compiling():  # asked here, as after a graph break this is compiled by itself
            return None
        device_type = self._device_type
        autocast = torch.is_autocast_enabled(device_type)
        half = cast_to = torch.get_autocast_dtype(device_type) if autocast and rule in _TO_HALF else None
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
            self._recomputation.look()
        caches = records and interpreters_around() is None and (not autocast or torch.is_autocast_cache_enabled())
        weights, rounded, wide_args = self._weights, _ROUNDED[half], []
        for each in args:
            if isinstance(each, torch.Tensor):
                known = weights.get(id(each)) if caches else None
                if known is not None and known[0] is each and known[1] == version(each) and known[3].dtype is half:
                    wide = known[2]
                else:
                    narrow = each if each.dtype is half else rounded(each)
                    wide = narrow.float()
                    if caches and each.requires_grad and each.is_leaf:
                        weights[id(each)] = each, version(each), wide, narrow, None
                wide_args.append(wide)
            else:
                wide_args.append(each)
        if not autocast:
            return rounded(func(*wide_args))
        torch.set_autocast_enabled(device_type, False)  # instead of a context, which would cost as much as the product
        try:
            return rounded(func(*wide_args))
        finally:
            torch.set_autocast_enabled(device_type, True)

    def _product(self, func: Any, rule: Rule, instead: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        autocast = torch.is_autocast_enabled(self._device_type)
        half, small = self._common_half(args, kwargs, autocast and rule in _TO_HALF)
        if half is None or (kwargs and kwargs.get("out_dtype") is not None):
            return self._as_torch_has_it(func, rule, args, kwargs)
        into = args[0] if instead is not None else kwargs.get("out")
        if into is not None:
            if into.dtype != half or (instead is None and (_records(args) or into.requires_grad)):
                return func(*args, **kwargs)
            kwargs = {key: value for key, value in kwargs.items() if key != "out"}
        kept, caches = self._begin(autocast, small=small)
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

    def _computed(self, func: Any, kept: KeptOperands | None, args: Any, kwargs: Any, autocast: bool) -> Any:
        """The product in float32, with autocast off."""
        if kept is not None:
            with kept:
                return self._computed(func, None, args, kwargs, autocast)
        return without_autocast(self._device_type, func, args, kwargs) if autocast else func(*args, **kwargs)

    def _common_half(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], cast: bool
    ) -> tuple[torch.dtype | None, bool]:
        """The half dtype that operands have, or are `cast` to by autocast; None where the product is torch's own affair. And
        whether all of them are small."""
        found: torch.dtype | None = None
        small = True
        for value in (*args, *kwargs.values()) if kwargs else args:
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(each, torch.Tensor) or not each.is_floating_point():
                    continue
                dtype = each.dtype
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

    def _widened(self, value: Any, half: torch.dtype, kept: KeptOperands | None, caches: bool) -> Any:
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
                    kept.add(WideOperand(known[3]) if known[4] is None else known[4], known[2])
                return known[2]
        narrow = value if value.dtype is half else value.to(half)
        wide = narrow.float()
        operand = None
        if kept is not None:
            operand = WideOperand(narrow)
            kept.add(operand, wide)
        if is_weight:
            self._weights[id(value)] = value, written, wide, narrow, operand
        return wide


_WITHOUT_REFUSALS = {func: how for func, how in SUMS.items() if func is not F.binary_cross_entropy}
_multi_head_attention_forward = uninterceptable(F.multi_head_attention_forward)

# How autocast casts operands: to half on every device, by a kernel of torch's; to half or to the widest of them by what is
# here, as torch itself does on CUDA at most; or not at all, as all that is written in place.
Rule = Literal["autocast", "half", "widest", "never"]
_TO_HALF = frozenset(("autocast", "half"))
# Of each function: its kind, its rule, and of one in place, that which makes a new tensor.
_Product = tuple[hardware.Kind, Rule, "Callable[..., Any] | None"]
_GROUPED: _Product = "matrix product", "half", None
_NONE: frozenset[hardware.Kind] = frozenset()
_CONVOLUTIONS = nn.Conv1d, nn.ConvTranspose1d  # whose parameters have three dimensions, too


def _named(kind: hardware.Kind, rule: Rule, names: str) -> dict[Any, _Product]:
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
    for name in ("addmm", "addbmm", "baddbmm", "addmv"):
        found[getattr(torch.Tensor, f"{name}_")] = "matrix product", "never", getattr(torch, name)
    for names in (
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc",
        "convolution _convolution",
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
