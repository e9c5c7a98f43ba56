"""How one precision has products of half-precision tensors computed, as torch does or in float32 where that is faster; and
which weights only autocast's products read, so that rounding them to half before they are gathered changes nothing.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from booster.common import arguments
from booster.mixed_precision import hardware
from booster.mixed_precision.half_products.float32_products import Float32Products, Recomputation
from booster.mixed_precision.half_products.half_sums import FLOAT32_SUMS
from booster.mixed_precision.half_products.probability_losses import REFUSED, names_probability_loss
from booster.mixed_precision.keep_fp32 import Float32Forward
from booster.model.modules import tensor_places
from booster.ranks.agreement import all_names
from booster.tensors.trees import HALF_DTYPES

Choice = Literal["auto", "native", "float32"]
CHOICES: tuple[Choice, ...] = ("auto", "native", "float32")

_CONVOLUTIONS = nn.Conv1d, nn.ConvTranspose1d  # their parameters have three dimensions, too
_NONE: frozenset[hardware.ProductKind] = frozenset()
_WITHOUT_REFUSALS = {func: how for func, how in FLOAT32_SUMS.items() if func not in REFUSED}

_logger = logging.getLogger(__name__)


class HalfProducts:
    """The choice of one precision, and the contexts that follow from it.

    dtype: the half dtype that the precision computes in; None where it computes in none.
    sdpa_fp32: attention in float32 while training, whatever else is widened; "auto" goes by the table as other products do;
        False leaves it to torch.

    Attributes:
        choice: what `Booster(half_products=...)` was given.
        kinds: which products are computed in float32, by that choice and this CPU.
        widens: whether anything is computed in float32, or cast, in some region; where it is False, no context is needed.
        refuses_probabilities: whether losses of probabilities are refused, see `probability_losses`; apex.amp has its own rule.
    """

    widens: bool
    refuses_probabilities = True

    def __init__(self, dtype: torch.dtype | None, sdpa_fp32: bool | Literal["auto"] = "auto") -> None:
        self.dtype = dtype if dtype in HALF_DTYPES else None
        self._sdpa_fp32 = arguments.choice("sdpa_fp32", sdpa_fp32, (True, False, "auto"))
        self._recomputation = Recomputation()
        self._groups = False  # a model has a parameter of several matrices, which autocast has no rule for
        self._refuses = False  # code that regions run names a loss of probabilities
        self._falls_back = False  # transformers multiplies these by another function
        # By device type and whether gradients are recorded.
        self._regions: dict[tuple[str, bool], frozenset[hardware.ProductKind]] = {}
        self.choice: Choice = "auto"
        self.choose("auto")

    def choose(self, choice: Choice) -> None:
        """Take `half_products` of `Booster`: "auto" goes by what this CPU has units for, "native" leaves all products to torch,
        but attention where `sdpa_fp32` is True, "float32" widens them all."""
        self.choice = arguments.choice("half_products", choice, CHOICES)
        self._is_agreed = False
        if self.dtype is None or choice == "native":
            self.kinds = _NONE
        else:
            self.kinds = hardware.KINDS if choice == "float32" else hardware.slow_products(self.dtype)
        self._plan()

    def agree(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Have all ranks of `group` widen what any of them has no units for, and log once what that is."""
        if self._is_agreed or device.type != "cpu" or self.dtype is None:
            return
        self._is_agreed = True
        if self.choice == "auto" and group is not None:
            # Two small collectives, once.
            slow = all_names(tuple(sorted(self.kinds)), group)
            self.kinds = frozenset(kind for kind in hardware.KINDS if kind in slow)
            self._plan()
        report = self.report()
        if report and (not dist.is_initialized() or dist.get_rank() == 0):
            _logger.info(report)

    def inspect(self, model: nn.Module) -> None:
        """Cast from now on what autocast has no rule for, if `model` has a parameter that such products read: several matrices
        in one, as experts and `nn.Bilinear` have."""
        if self.dtype is None:
            return
        convolutions = [each for each in model.modules() if isinstance(each, _CONVOLUTIONS)]
        filters = {id(each) for module in convolutions for each in module.parameters()}
        if any(each.dim() == 3 and len(each) > 1 and id(each) not in filters for each in model.parameters()):
            # Other models enter no mode, which would cost each function a call.
            self._groups = self.widens = True
        # What transformers multiplies experts by where torch.compile or the GPU has no grouped_mm.
        self._falls_back = self._falls_back or hasattr(torch.ops.transformers, "grouped_mm_fallback")

    def find_losses(self, models: Iterable[Any]) -> None:
        """Refuse losses of probabilities from now on, if code of `models`, modules and criteria, names one."""
        if self.dtype is not None and self.refuses_probabilities and names_probability_loss(models):
            self._refuses = self.widens = True

    def report(self) -> str:
        """What is widened on a CPU, as a sentence; empty where nothing is widened."""
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

    def forward_context(self, device_type: str) -> Float32Products | None:
        """A new context for one forward pass, to be entered inside `torch.autocast`; None where products are torch's."""
        training = torch.is_grad_enabled()
        kinds = self._regions.get((device_type, training))
        if kinds is None and not self._groups and not self._refuses:
            return None
        # "native" leaves all to torch, sums too; a region that only casts products of groups has none.
        own = FLOAT32_SUMS if self.refuses_probabilities else _WITHOUT_REFUSALS
        if kinds is None or self.choice == "native":
            own = REFUSED if self._refuses else {}
        mode = Float32Products(device_type, kinds or _NONE, self._recomputation, own, training=training)
        # A region that is entered with gradients alone casts nothing: a function would be cast while training, and raise in
        # evaluation, where no mode is.
        mode.casts = self._groups or bool(self._regions.get((device_type, False)))
        if self._falls_back:
            mode.fallback = torch.ops.transformers.grouped_mm_fallback
        return mode

    def backward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """A new context for one backward pass: that of a forward pass in training, once anything ran that may run again."""
        return (self.forward_context(device_type) if self._recomputation.seen else None) or nullcontext()

    def _plan(self) -> None:
        """Fill `_regions`. Where no product is widened, the mode is entered for the sums alone, but by "native"."""
        self._regions = {}
        if self.dtype is not None and self.choice != "native":
            kinds = self.kinds if self._sdpa_fp32 is not False else self.kinds - {"attention"}
            training = kinds if self._sdpa_fp32 is False else kinds | hardware.SLOW_BACKWARD
            self._regions = {("cpu", False): kinds, ("cpu", True): training}
        if self.dtype is not None and self._sdpa_fp32 is True:
            self._regions["cpu", True] = self._regions.get(("cpu", True), _NONE) | {"attention"}
            self._regions["cuda", True] = frozenset({"attention"})
        self.widens = self._groups or self._refuses or bool(self._regions)


# The forward of each hands these parameters to functions that autocast runs in half, and to no others.
_PRODUCTS: tuple[tuple[Any, frozenset[str]], ...] = (
    *(
        (kind, frozenset({"weight", "bias"}))
        for kind in (nn.Linear, *_CONVOLUTIONS, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    ),
    (nn.MultiheadAttention, frozenset({f"{each}_proj_weight" for each in ("in", "q", "k", "v")} | {"in_proj_bias"})),
)


def product_modules(model: nn.Module, *, placed: bool = False) -> frozenset[str]:
    """Return the names of modules of `model` with parameters that nothing reads but products which autocast runs in half.

    Linear and convolution layers, MultiheadAttention, and Conv1D of transformers, as long as their forward is that of the
    class; with float32 parameters that belong to no other kind of module as well. Not those inside a module that leaves
    autocast by `keep_fp32`. A forward that reads the weight of such a module by itself, or leaves autocast by itself, is not
    seen.
    placed: those, too, with a forward that a plugin wrapped to run it on a shard.
    """
    places = [(tensor, place) for tensor, found in tensor_places(model).items() for place in found]
    refused = {
        place.holder
        for tensor, place in places
        if tensor.dtype != torch.float32
        or not _is_product(place.holder, place.own, placed=placed)
        or any(isinstance(vars(module).get("forward"), Float32Forward) for module in place.path)
    }
    while True:
        # A parameter that two modules share follows the stricter one, and takes what else that module holds along.
        strict = {tensor for tensor, place in places if place.holder in refused}
        more = {place.holder for tensor, place in places if tensor in strict}
        # Attention that stays in float32 reads the weight of its output projection, and does not call that module.
        more |= {each.out_proj for each in refused if isinstance(each, nn.MultiheadAttention)}
        if more <= refused:
            break
        refused |= more
    holders = {place.holder for _, place in places} - refused
    return frozenset(name for name, module in model.named_modules() if module in holders)


def multiplies(module: nn.Module) -> bool:
    """Return whether `module` is a layer that multiplies by its weight, so that autocast runs it in half."""
    return _is_conv1d(module) or any(isinstance(module, base) for base, _ in _PRODUCTS)


def _is_conv1d(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _is_product(module: nn.Module, own: str, *, placed: bool) -> bool:
    kind, forward = type(module), vars(module).get("forward")
    if placed and forward is not None:
        forward = None if getattr(inspect.unwrap(forward), "__func__", None) is kind.forward else forward
    if _is_conv1d(module):
        return own in {"weight", "bias"}
    for base, names in _PRODUCTS:
        if isinstance(module, base):
            same = kind.forward is base.forward
            same &= getattr(kind, "_conv_forward", None) is getattr(base, "_conv_forward", None)
            return same and forward is None and own in names
    return False
