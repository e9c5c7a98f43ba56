"""Every operation of a replay, and of those whose result holds an inf or NaN, where it came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from booster.common.text import dtype_name
from booster.common.torch_internals.autograd_internals import without_function_modes
from booster.common.torch_internals.tensor_internals import TorchDispatchMode, is_fake_kind, storage_key
from booster.numerics.diagnosis.places import MemoryNames, Numbers, Place, Places, bad_rows, numbers_of
from booster.tensors.trees import HALF_DTYPES, map_tensors, tensors

# What makes infinities on purpose, for masks; and what takes them for such.
_FILLS = frozenset(
    {"full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor", "lift_fresh"}
    | {"where", "constant_pad_nd", "add", "add_", "sub", "sub_", "index_put", "index_put_", "zero_", "copy_"}
)
_MASKING = _FILLS | {
    "mul",
    "mul_",
    "div",
    "exp",
    "tanh",
    "sigmoid",
    "clamp",
    "clamp_min",
    "minimum",
    "min",
    "amin",
    "gather",
    "nll_loss_forward",
    "_log_softmax_backward_data",
    "_softmax_backward_data",
    "index",
    "slice",
    "expand",
    "repeat",
    "tril",
    "triu",
    "bitwise_not",
    "neg",
    "_softmax",
    "_safe_softmax",
    "_log_softmax",
    "logsumexp",
    "maximum",
    "max",
    "amax",
    "topk",
    "sort",
    "_to_copy",
    "clone",
    "cat",
    "baddbmm",
    "_unsafe_view",
    "stack",
    "roll",
    "flip",
    "index_select",
    "relu",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_attention_math",
}
_UNINITIALISED = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_", "set_"}
)
# They do not read what they write to.
_WRITES = frozenset(
    {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "normal_", "uniform_", "bernoulli_", "random_"}
)
# Collectives whose first argument is for what they bring.
_FILLS_FIRST = frozenset(
    {
        "_allgather_base_",
        "allgather_",
        "_reduce_scatter_base_",
        "reduce_scatter_",
        "alltoall_base_",
        "alltoall_",
        "recv_",
    }
    | {"gather_", "scatter_", "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"}
)
SUMS = frozenset(
    {
        "allreduce_",
        "allreduce_coalesced_",
        "_reduce_scatter_base_",
        "reduce_scatter_",
        "reduce_scatter_tensor_coalesced_",
    }
    | {"reduce_", "all_reduce", "all_reduce_", "all_reduce_coalesced", "reduce_scatter_tensor"}
)
_HANDS_ON = frozenset({"wait_tensor", "_wrap_tensor_autograd"})  # what a collective brought
# What is multiplied in float32 for want of units, and rounded to half next; see `mixed_precision.half_products`.
_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "convolution_backward"}
    | {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}
    | {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"}
)
# Of those that read more than they multiply, as results of the forward pass: how many of their first arguments they multiply.
_MULTIPLIED = {
    "mkldnn_rnn_layer_backward": 5,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 4,
}
_HALVES = {dtype_name(dtype): dtype for dtype in HALF_DTYPES}
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_dtensor", "symm_mem"})


# Its operation, the function, and what that was called with.
_Product = tuple[str, Any, tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(eq=False)
class Leaf:
    """A tensor with an inf or NaN that the replay found and did not make.

    name: of a parameter or buffer, else "". masking: it holds -inf and nothing else that is bad, as a mask does. rows: along
    the first dimension, where it is bad.
    """

    key: int
    name: str
    numbers: Numbers
    masking: bool
    rows: list[int]


@dataclass(eq=False)
class Event:
    """An operation whose result holds an inf or NaN.

    index: its place among all operations of the replay. micro_batch: of a pipeline, else which backward pass is under way, or
    comes next. parents: what made the inf or NaN in its inputs. intended: only
    infinities that masks are made of. exact: the largest magnitude of the result in float64, inf if that is not finite
    either, None if nobody knows. inputs, output, rows: what was there, and where along the first dimension it is bad. These and
    `exact` are known only where no operation before had made the inputs bad. foreign: made by a collective. besides: what had
    made another part of the same memory bad.
    """

    index: int
    operation: str
    place: Place
    micro_batch: int
    parents: list[Event | Leaf] = field(default_factory=list)
    output: Numbers | None = None
    inputs: list[Numbers] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    intended: bool = False
    exact: float | None = None
    foreign: bool = False
    besides: Event | None = None

    @property
    def name(self) -> str:
        """The operation without its namespace."""
        return self.operation.partition(".")[2]


class Watch(TorchDispatchMode):
    """Looks at the result of every operation, forward and backward, in the thread that runs them.

    names: of parameters and buffers. before_write: called with a tensor whose memory the replay
    did not make, before it is written to. repair: numbers of operations, and keys of memory, whose inf and NaN become zero.
    micro_batch: says which backward pass is under way, or comes next.
    """

    def __init__(
        self,
        places: Places,
        names: MemoryNames,
        before_write: Callable[[torch.Tensor], None],
        *,
        repair: Collection[int] = (),
        micro_batch: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.num_operations = 0
        self.last_in_model: dict[int, int] = {}  # by micro-batch, the last operation of a forward pass inside the model
        self.sent: list[Event] = []  # collectives that took an inf or NaN from here
        self._places = places
        self._names = names
        self._before_write = before_write
        self._repair = repair
        self._micro_batch = micro_batch
        self._made: set[int] = set()  # memory that the replay made
        self._products: dict[int, _Product] = {}  # by memory, what made numbers in float32 that no half holds
        self._bad: dict[int, Event] = {}  # who wrote an inf or NaN to a memory last
        self._leaves: dict[tuple[int, str], Leaf] = {}

    def origin_of(self, tensor: torch.Tensor) -> Event | Leaf | None:
        """Return what made the inf or NaN in `tensor`; None where it has none or nobody knows."""
        key = storage_key(tensor)
        return self._bad.get(key) or self._leaves.get((key, self._names.of(tensor)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = [kind for kind in types if issubclass(kind, torch.Tensor) and kind is not torch.Tensor and _has_own(kind)]
        if any(is_fake_kind(kind) for kind in own):
            return func(*args, **(kwargs or {}))  # a rehearsal, which computes nothing
        if own:
            return NotImplemented  # a DTensor, say; its own operations on plain tensors come here
        with (
            without_function_modes()
        ):  # they have had their say about this operation, and have none about what looks at it
            return self._watched(func, args, kwargs or {})

    # ------------------------------------------------------------------ inside

    def _watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        operation = f"{func.namespace}.{name}"
        place = self._places.of(operation)
        index, self.num_operations = self.num_operations, self.num_operations + 1
        micro_batch = self._micro_batch() if place.micro_batch is None else place.micro_batch
        if place.inside and not place.backward:
            self.last_in_model[micro_batch] = index
        collective = func.namespace in _COLLECTIVES
        given = [tensor for tensor in tensors((args, kwargs)) if _is_plain(tensor)]
        written = given if collective else [t for t in _written(func, args, kwargs) if _is_plain(t)]
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
        event = Event(index, operation, place, micro_batch, parents)
        if collective:
            return self._collective(func, args, kwargs, event, given)
        if name == "copy_" and self._is_delivery(*args[:2]):
            return func(*args, **kwargs)
        kept = (args, kwargs)
        if written:
            copies = {id(tensor): tensor.clone() for tensor in written}
            kept = map_tensors(lambda tensor: copies.get(id(tensor), tensor), kept)
        result = func(*args, **kwargs)
        results = [tensor for tensor in tensors(result) if _is_plain(tensor)]
        old = {storage_key(tensor) for tensor in given}
        made = [tensor for tensor in results if storage_key(tensor) not in old]
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
            self._look(tensor, func, name, kept, event, half)
        return result

    def _without_widening(self, parents: list[Event | Leaf]) -> tuple[list[Event | Leaf], torch.dtype | None]:
        """What a product reads, with what was widened for it taken for the half; and the dtype of that, if there was any."""
        half: torch.dtype | None = None
        found: list[Event | Leaf] = []
        for parent in parents:
            read = parent
            if isinstance(parent, Event) and parent.name == "_to_copy" and parent.output and len(parent.inputs) == 1:
                before, origin = parent.inputs[0].dtype, parent.parents[0] if len(parent.parents) == 1 else None
                if parent.output.dtype == "float32" and before in _HALVES and isinstance(origin, Leaf):
                    half, read = _HALVES[before], origin
                    self.events = [each for each in self.events if each is not parent]
            if all(read is not other for other in found):
                found.append(read)
        return found, half

    def _look(
        self,
        tensor: torch.Tensor,
        func: Any,
        name: str,
        kept: tuple[tuple[Any, ...], dict[str, Any]],
        maker: Event,
        half: torch.dtype | None,
    ) -> None:
        key, parents = storage_key(tensor), maker.parents
        # Whoever reads a view finds what made its memory bad; memory that nobody wrote to yet holds anything.
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
            event.besides = self._bad[key]  # in other places of the same memory
        self.events.append(event)
        self._bad[key] = event
        if any(isinstance(parent, Event) and not is_intended(parent, name) for parent in parents):
            return  # one of many that an inf or NaN goes through
        event.inputs = [numbers_of(each) for each in tensors(kept) if _is_plain(each) and each.is_floating_point()]
        if half is not None:  # the operation is a product of halves
            given = [each for each in tensors(kept) if _is_plain(each) and each.is_floating_point()]
            event.inputs = [numbers_of(each.to(half) if _is_in(each, half) else each) for each in given]
            tensor = tensor.to(half)
        event.output, event.rows = numbers_of(tensor), bad_rows(tensor)
        if not all(is_intended(parent, name) for parent in parents):
            return
        if parents or (name in _FILLS and _holds_inf(kept)):
            event.intended = event.output.num_nan == 0
        if not event.intended:
            event.exact = _exact(func, name, kept)

    def _bad_inputs(self, given: list[torch.Tensor]) -> list[Event | Leaf]:
        found: list[Event | Leaf] = []
        for tensor in given:
            key = storage_key(tensor)
            known = self._bad.get(key)
            if not tensor.is_floating_point() or not tensor.numel() or (known is None and key in self._made):
                continue
            if _is_finite(tensor):
                continue
            origin = known or self._leaf(tensor, key)
            if origin is not None and all(origin is not other for other in found):
                found.append(origin)
        return found

    def _is_delivery(self, place: torch.Tensor, values: Any) -> bool:
        """Whether a collective that ended brings, by a copy, what it has in memory of its own."""
        if not isinstance(values, torch.Tensor) or not _is_plain(values) or not _is_plain(place):
            return False
        awaited = self._bad.get(storage_key(place))
        unknown = storage_key(values) not in self._bad and not self._names.of(values)
        return awaited is not None and awaited.foreign and unknown and not _is_finite(values)

    def _leaf(self, tensor: torch.Tensor, key: int) -> Leaf | None:
        if key in self._repair:
            self._before_write(tensor)
            tensor.detach().nan_to_num_(0.0, 0.0, 0.0)
            return None
        name = self._names.of(tensor)
        if (key, name) not in self._leaves:
            numbers = numbers_of(tensor)
            masking = not name and not numbers.num_nan and not bool(tensor.isposinf().any())
            self._leaves[key, name] = Leaf(key, name, numbers, masking, bad_rows(tensor))
        return self._leaves[key, name]

    def _collective(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        maker: Event,
        given: list[torch.Tensor],
    ) -> Any:
        # What it brings is there later; whoever reads it looks.
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


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[position] if position < len(args) else None)
            yield from tensors(value)


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
    """Whether what was multiplied in float32 were numbers of `half`."""
    operation, _, (args, kwargs) = product
    multiplied = _MULTIPLIED.get(operation.partition(".")[2])
    read = tensors((args, kwargs) if multiplied is None else args[:multiplied])
    return all(_is_in(each, half) for each in read if _is_plain(each) and each.is_floating_point())


def _is_in(tensor: torch.Tensor, half: torch.dtype) -> bool:
    values = tensor.detach()
    return torch.allclose(values.to(half).to(values.dtype), values, rtol=0, atol=0, equal_nan=True)


def is_intended(parent: Event | Leaf, name: str) -> bool:
    """Return whether the inf in `parent` is for a mask, as far as the operation `name` goes."""
    return name in _MASKING and (parent.intended if isinstance(parent, Event) else parent.masking)


def _holds_inf(tree: Any) -> bool:
    found = []

    def look(value: Any) -> Any:
        found.append(isinstance(value, float) and value in (float("inf"), float("-inf")))
        return NotImplemented

    map_tensors(lambda tensor: found.append(tensor.dim() == 0 and bool(tensor.isinf())), tree, instead=look)
    return any(found)


def _exact(func: Any, name: str, kept: tuple[tuple[Any, ...], dict[str, Any]]) -> float | None:
    """The largest magnitude that the operation has in float64 from the same inputs."""
    wide = {torch.float16, torch.bfloat16, torch.float32}

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().double() if tensor.dtype in wide else tensor.detach().clone()

    def dtypes(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value in wide else NotImplemented

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
                return float("inf")
            largest = max(largest, float(tensor.abs().max()))
    return largest
