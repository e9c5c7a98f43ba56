"""Every operation of a replay, and of those with an inf or NaN in their result, where it came from.

A dispatch mode sees each operation after autograd, forward and backward, with plain tensors. It keeps, by memory, the operation
that wrote an inf or NaN there last. When an operation makes one, those of its inputs are its `parents`: the graph that `cause`
walks back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from booster.common.arguments import dtype_name
from booster.common.torch_internals.autograd_internals import without_function_modes
from booster.common.torch_internals.tensor_internals import TorchDispatchMode, is_fake_kind, storage_key, written_values
from booster.numerics.diagnosis.places import MemoryNames, Numbers, Place, PlaceFinder, bad_rows, numbers_of
from booster.tensors.trees import HALF_DTYPES, map_tensors, tensors


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What makes infinities on purpose, for masks; and what reads such masks.
_FILLS = _names(
    "full full_like new_full fill fill_ masked_fill masked_fill_ scalar_tensor lift_fresh where constant_pad_nd add add_ sub "
    "sub_ index_put index_put_ zero_ copy_"
)
_MASKING = _FILLS | _names(
    "mul mul_ div exp tanh sigmoid clamp clamp_min minimum min amin maximum max amax gather topk sort relu neg bitwise_not cat "
    "stack roll flip index index_select slice expand repeat tril triu clone baddbmm logsumexp nll_loss_forward _to_copy "
    "_unsafe_view _softmax _safe_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_attention_math"
)
_UNINITIALISED = _names("empty empty_like new_empty empty_strided new_empty_strided resize_ set_")
# They do not read what they write to.
_WRITES = _names("copy_ _foreach_copy_ fill_ zero_ _foreach_zero_ normal_ uniform_ bernoulli_ random_")
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_dtensor", "symm_mem"})  # namespaces
# Collectives with a first argument for what they bring.
_FILLS_FIRST = _names(
    "_allgather_base_ allgather_ _reduce_scatter_base_ reduce_scatter_ alltoall_base_ alltoall_ recv_ gather_ scatter_ "
    "allgather_into_tensor_coalesced_ reduce_scatter_tensor_coalesced_"
)
SUMMING_COLLECTIVES = _names(
    "allreduce_ allreduce_coalesced_ _reduce_scatter_base_ reduce_scatter_ reduce_scatter_tensor_coalesced_ reduce_ all_reduce "
    "all_reduce_ all_reduce_coalesced reduce_scatter_tensor"
)
"""Collectives that add: the sum of finite numbers may overflow."""
_HANDS_ON = _names("wait_tensor _wrap_tensor_autograd")  # what a collective brought
# What is multiplied in float32 where a CPU has no units for halves, and rounded to half next.
_PRODUCTS = _names(
    "mm addmm bmm baddbmm mv addmv dot convolution convolution_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward"
)
# Of those that read more than they multiply, such as results of the forward pass: how many first arguments they multiply.
_MULTIPLIED = {"mkldnn_rnn_layer_backward": 5, "_scaled_dot_product_flash_attention_for_cpu_backward": 4}
_HALVES = {dtype_name(dtype): dtype for dtype in HALF_DTYPES}
_LOWER = frozenset({*HALF_DTYPES, torch.float32})  # than float64

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_Product = tuple[str, Any, Arguments]  # its operation, the function, and what that was called with


@dataclass(eq=False)
class NonFiniteInput:
    """A tensor with an inf or NaN that the replay read and did not make.

    Attributes:
        key: of its memory.
        name: of a parameter or buffer, else "".
        masking: it holds -inf and nothing else that is bad, as a mask does.
        rows: along the first dimension, where it is bad.
    """

    key: int
    name: str
    numbers: Numbers
    masking: bool
    rows: list[int]


@dataclass(eq=False)
class NonFiniteResult:
    """An operation with an inf or NaN in its result.

    Attributes:
        index: its place among all operations of the replay.
        micro_batch: of a pipeline, else which backward pass is under way, or comes next.
        parents: what made the inf or NaN in its inputs.
        intended: only infinities that masks are made of.
        foreign: made by a collective.
        earlier: what had made another part of the same memory bad.
        output, inputs, rows: what was there, and where along the first dimension it is bad.
        exact: the largest magnitude of the result in float64, inf if that is not finite either; None where it is not known.

    The last four are known only where no operation before had made the inputs bad.
    """

    index: int
    operation: str
    place: Place
    micro_batch: int
    parents: list[NonFiniteResult | NonFiniteInput] = field(default_factory=list)
    output: Numbers | None = None
    inputs: list[Numbers] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    intended: bool = False
    exact: float | None = None
    foreign: bool = False
    earlier: NonFiniteResult | None = None

    @property
    def name(self) -> str:
        """The operation without its namespace."""
        return self.operation.partition(".")[2]


class NonFiniteTrace(TorchDispatchMode):
    """Sees the result of every operation, forward and backward, in the thread that runs them.

    names: of parameters and buffers.
    before_write: called with a tensor in memory that the replay did not make, before it is written to.
    repair: indices of operations, and keys of memory; an inf or NaN there becomes zero.
    micro_batch: says which backward pass is under way, or comes next.

    Attributes:
        results: operations with an inf or NaN in their result, in order.
        sent: collectives that took an inf or NaN from here.
        last_in_model: by micro-batch, the last operation of a forward pass inside the model.
    """

    def __init__(
        self,
        places: PlaceFinder,
        names: MemoryNames,
        before_write: Callable[[torch.Tensor], None],
        *,
        repair: Collection[int] = (),
        micro_batch: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__()
        self.results: list[NonFiniteResult] = []
        self.num_operations = 0
        self.last_in_model: dict[int, int] = {}
        self.sent: list[NonFiniteResult] = []
        self._places = places
        self._names = names
        self._before_write = before_write
        self._repair = repair
        self._micro_batch = micro_batch
        self._made: set[int] = set()  # memory that the replay made
        self._products: dict[int, _Product] = {}  # by memory, what made numbers in float32 that no half holds
        self._bad: dict[int, NonFiniteResult] = {}  # what wrote an inf or NaN to a memory last
        self._inputs: dict[tuple[int, str], NonFiniteInput] = {}

    def origin_of(self, tensor: torch.Tensor) -> NonFiniteResult | NonFiniteInput | None:
        """Return what made the inf or NaN in `tensor`; None where it has none, or it is not known."""
        key = storage_key(tensor)
        return self._bad.get(key) or self._inputs.get((key, self._names.of(tensor)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = [kind for kind in types if issubclass(kind, torch.Tensor) and kind is not torch.Tensor and _has_own(kind)]
        if any(is_fake_kind(kind) for kind in own):
            return func(*args, **(kwargs or {}))  # shapes are inferred; nothing is computed
        if own:
            return NotImplemented  # a DTensor, say; its own operations on plain tensors come here
        # Function modes have seen this operation already; what checks its result is none of the user's.
        with without_function_modes():
            return self._traced(func, args, kwargs or {})

    def _traced(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        operation = f"{func.namespace}.{name}"
        place = self._places.of(operation)
        index, self.num_operations = self.num_operations, self.num_operations + 1
        micro_batch = self._micro_batch() if place.micro_batch is None else place.micro_batch
        if place.inside and not place.backward:
            self.last_in_model[micro_batch] = index
        collective = func.namespace in _COLLECTIVES
        given = [tensor for tensor in tensors((args, kwargs)) if _is_plain(tensor)]
        written = given if collective else [t for t in tensors(written_values(func, args, kwargs)) if _is_plain(t)]
        for tensor in written:
            if storage_key(tensor) not in self._made:
                self._before_write(tensor)
        if collective:
            unread = list(tensors(args[0])) if name in _FILLS_FIRST else []
        else:
            unread = [tensor for tensor in written if name in _WRITES or _is_out(func, tensor, kwargs)]
        parents = self._bad_inputs([tensor for tensor in given if all(tensor is not other for other in unread)])
        half = None
        if name in _PRODUCTS:
            parents, half = self._without_widening(parents)
        event = NonFiniteResult(index, operation, place, micro_batch, parents)
        if collective:
            return self._collective(func, args, kwargs, event, given)
        if name == "copy_" and self._is_brought(*args[:2]):
            return func(*args, **kwargs)
        kept = (args, kwargs)
        if written:
            copies = {id(tensor): tensor.clone() for tensor in written}
            kept = map_tensors(lambda tensor: copies.get(id(tensor), tensor), kept)
        result = func(*args, **kwargs)
        results = [tensor for tensor in tensors(result) if _is_plain(tensor)]
        old = {storage_key(tensor) for tensor in given}
        made = [tensor for tensor in results if storage_key(tensor) not in old]
        # Memory that the replay made need not be restored, and holds no number that was given to it.
        self._made.update(storage_key(tensor) for tensor in made)
        if not func.is_view:
            for tensor in made:
                self._products.pop(storage_key(tensor), None)
                is_product = name in _PRODUCTS or (name == "sum" and place.backward)  # the gradient of a bias
                if is_product and tensor.dtype == torch.float32 and _is_beyond_half(tensor):
                    self._products[storage_key(tensor)] = operation, func, kept
        # Of what is gathered, the parts of other ranks are not there yet.
        if name in _UNINITIALISED or (name == "all_gather_copy_in" and not parents):
            for tensor in results:
                self._bad.pop(storage_key(tensor), None)
            return result
        for tensor in results:
            if index in self._repair and tensor.is_floating_point():
                tensor.nan_to_num_(0.0, 0.0, 0.0)
        for tensor in [*results, *(t for t in written if all(t is not r for r in results))]:
            self._check_result(tensor, func, name, kept, event, half)
        return result

    def _without_widening(
        self, parents: list[NonFiniteResult | NonFiniteInput]
    ) -> tuple[list[NonFiniteResult | NonFiniteInput], torch.dtype | None]:
        """What a product reads, with what was widened for it taken for the half; and the dtype of that, if there was any."""
        half: torch.dtype | None = None
        halves: list[NonFiniteResult | NonFiniteInput] = []
        for parent in parents:
            read = parent
            if (
                isinstance(parent, NonFiniteResult)
                and parent.name == "_to_copy"
                and parent.output
                and len(parent.inputs) == 1
            ):
                before, origin = parent.inputs[0].dtype, parent.parents[0] if len(parent.parents) == 1 else None
                if parent.output.dtype == "float32" and before in _HALVES and isinstance(origin, NonFiniteInput):
                    # The widened copy made nothing bad: the half that it was made of did, and is named instead.
                    half, read = _HALVES[before], origin
                    self.results = [each for each in self.results if each is not parent]
            if read not in halves:
                halves.append(read)
        return halves, half

    def _check_result(
        self,
        tensor: torch.Tensor,
        func: Any,
        name: str,
        kept: Arguments,
        maker: NonFiniteResult,
        half: torch.dtype | None,
    ) -> None:
        key, parents = storage_key(tensor), maker.parents
        # An operation that reads a view finds what made its memory bad; memory that was not written yet holds anything.
        if func.is_view or not tensor.is_floating_point() or not tensor.numel():
            return
        is_whole = tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
        if _is_finite(tensor):
            if is_whole:
                self._bad.pop(key, None)
            return
        event = dataclasses.replace(maker, parents=list(parents))
        if name == "_to_copy" and tensor.dtype in HALF_DTYPES and not parents:
            product = self._products.get(storage_key(kept[0][0]))
            if product is not None and _read_halves(product, tensor.dtype):
                event.operation, func, kept = product
                name, half = event.name, tensor.dtype
        if not is_whole and key in self._bad and self._bad[key] not in parents:
            event.earlier = self._bad[key]  # in other places of the same memory
        self.results.append(event)
        self._bad[key] = event
        if any(isinstance(parent, NonFiniteResult) and not is_intended(parent, name) for parent in parents):
            return  # one of many that an inf or NaN goes through
        given = [each for each in tensors(kept) if _is_plain(each) and each.is_floating_point()]
        if half is not None:  # the operation is a product of halves
            given = [each.to(half) if _fits(each, half) else each for each in given]
            tensor = tensor.to(half)
        event.inputs = list(map(numbers_of, given))
        event.output, event.rows = numbers_of(tensor), bad_rows(tensor)
        if not all(is_intended(parent, name) for parent in parents):
            return
        if parents or (name in _FILLS and _holds_inf(kept)):
            event.intended = event.output.num_nan == 0
        if not event.intended:
            event.exact = _exact(func, name, kept)

    def _bad_inputs(self, given: list[torch.Tensor]) -> list[NonFiniteResult | NonFiniteInput]:
        origins: dict[NonFiniteResult | NonFiniteInput, None] = {}
        for tensor in given:
            key = storage_key(tensor)
            made_by = self._bad.get(key)
            if not tensor.is_floating_point() or not tensor.numel() or (made_by is None and key in self._made):
                continue
            if not _is_finite(tensor) and (origin := made_by or self._input_at(tensor, key)) is not None:
                origins[origin] = None
        return list(origins)

    def _is_brought(self, place: torch.Tensor, values: Any) -> bool:
        """Return whether a copy brings what a collective received in its own memory."""
        if not isinstance(values, torch.Tensor) or not _is_plain(values) or not _is_plain(place):
            return False
        awaited = self._bad.get(storage_key(place))
        unknown = storage_key(values) not in self._bad and not self._names.of(values)
        return awaited is not None and awaited.foreign and unknown and not _is_finite(values)

    def _input_at(self, tensor: torch.Tensor, key: int) -> NonFiniteInput | None:
        if key in self._repair:
            self._before_write(tensor)
            tensor.detach().nan_to_num_(0.0, 0.0, 0.0)
            return None
        name = self._names.of(tensor)
        if (key, name) not in self._inputs:
            numbers = numbers_of(tensor)
            masking = not name and not numbers.num_nan and not bool(tensor.isposinf().any())
            self._inputs[key, name] = NonFiniteInput(key, name, numbers, masking, bad_rows(tensor))
        return self._inputs[key, name]

    def _collective(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        maker: NonFiniteResult,
        given: list[torch.Tensor],
    ) -> Any:
        # What it brings is there later; the operation that reads it finds an inf or NaN.
        result = func(*args, **kwargs)
        results = [tensor for tensor in tensors(result) if _is_plain(tensor)]
        made = [self._bad.get(storage_key(tensor)) for tensor in given]
        if maker.name in _HANDS_ON and all(event is not None for event in made):
            self._bad.update(
                (storage_key(t), event) for t, event in zip(results, made, strict=False) if event is not None
            )
            return result
        for tensor in [*given, *results]:
            if not tensor.is_floating_point():
                continue
            event = dataclasses.replace(maker, parents=list(maker.parents), foreign=True)
            event.output = Numbers(tuple(tensor.shape), dtype_name(tensor.dtype), 0.0, 0.0, 0, 0)
            self._bad[storage_key(tensor)] = event
            if event.parents:
                self.sent.append(event)
        return result


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta


def _has_own(kind: type) -> bool:
    return getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__


def _is_out(func: Any, tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether `tensor` is what the operation is to write its result to, and does not read."""
    outs = [kwargs.get(argument.name) for argument in func._schema.arguments if argument.is_out]
    return any(tensor is out for out in tensors(outs))


def _is_finite(tensor: torch.Tensor) -> bool:
    values = tensor.detach()
    return bool((values.float() if values.element_size() == 1 else values).isfinite().all())


def _is_beyond_half(tensor: torch.Tensor) -> bool:
    return bool(tensor.numel()) and not float(tensor.detach().abs().max()) <= torch.finfo(torch.float16).max


def _read_halves(product: _Product, half: torch.dtype) -> bool:
    """Return whether what was multiplied in float32 were numbers of `half`."""
    operation, _, (args, kwargs) = product
    multiplied = _MULTIPLIED.get(operation.partition(".")[2])
    read = tensors((args, kwargs) if multiplied is None else args[:multiplied])
    return all(_fits(each, half) for each in read if _is_plain(each) and each.is_floating_point())


def _fits(tensor: torch.Tensor, half: torch.dtype) -> bool:
    values = tensor.detach()
    return torch.allclose(values.to(half).to(values.dtype), values, rtol=0, atol=0, equal_nan=True)


def is_intended(parent: NonFiniteResult | NonFiniteInput, name: str) -> bool:
    """Return whether the inf in `parent` is for a mask, as far as the operation `name` goes."""
    return name in _MASKING and (parent.intended if isinstance(parent, NonFiniteResult) else parent.masking)


def _holds_inf(tree: Any) -> bool:
    infinite = []

    def add(value: Any) -> Any:
        infinite.append(isinstance(value, float) and math.isinf(value))
        return NotImplemented

    map_tensors(lambda tensor: infinite.append(tensor.dim() == 0 and bool(tensor.isinf())), tree, instead=add)
    return any(infinite)


def _exact(func: Any, name: str, kept: Arguments) -> float | None:
    """Return the largest magnitude that the operation has in float64 from the same inputs."""

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().double() if tensor.dtype in _LOWER else tensor.detach().clone()

    def dtypes(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value in _LOWER else NotImplemented

    args, kwargs = map_tensors(widen, kept, instead=dtypes)
    devices = {tensor.device for tensor in tensors((args, kwargs)) if tensor.is_cuda}
    try:
        with torch.random.fork_rng(devices):
            result = func(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    largest = 0.0
    for tensor in tensors(result):
        if tensor.is_floating_point() and tensor.numel():
            if not _is_finite(tensor):
                return math.inf
            largest = max(largest, float(tensor.abs().max()))
    return largest
