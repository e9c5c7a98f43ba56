"""`Shards`: what this rank steps of an optimizer's parameters. This base class is the null object: all of them, whole.

Every operation of the room is declared here; `__init__` of the room has the roles of tensors. States and masters of shards, as
whole parameters have them and back, are `ShardStates`; a `FlatShard` is a stretch of elements, as
`torch.distributed.checkpoint` takes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.model.params import is_dtensor, local_shard

if TYPE_CHECKING:
    from booster.model.params import Selection

State = dict[str, Any]
Entries = dict[Any, State]


@dataclass(frozen=True, eq=False)
class GradUse:
    """A use of gradients within backward passes, each as soon as it is complete on all ranks.

    Attributes:
        params: those of which gradients are used.
        filled: called with each of them.
        held: gradients of earlier passes, not in `.grad`, which are added to those of the pass.
        again: the graph is gone through once more, so that no gradient may stay.
    """

    params: Sequence[torch.Tensor]
    filled: Callable[[torch.Tensor], None]
    held: Mapping[torch.Tensor, torch.Tensor]
    again: bool


class ShardStates:
    """Converts entries of states between shards and parameters. This base class: whole parameters, nothing to convert.

    Attributes:
        shards: the `Shards` of the parameters.
        by_param, by_shard: as there.
    """

    def __init__(self, shards: Any) -> None:
        self.shards = shards
        self.by_param: Mapping[torch.Tensor, Any] = shards.by_param
        self.by_shard: Mapping[torch.Tensor, torch.Tensor] = shards.by_shard

    def view_state(self, state: Mapping[Any, State]) -> Mapping[Any, State]:
        """Return the optimizer's state by parameter, for reading, from that by shard. Not a collective."""
        return state

    def state_of_ranks(self, state: Mapping[Any, State]) -> Mapping[Any, State]:
        """Return `state`, which `view_state` gave, where every rank has the same entries; else the names of entries that any
        rank has, without values."""
        # A collective there.
        return state

    def full(self, entries: Entries, params: Mapping[Any, torch.Tensor]) -> Entries:
        """Return `entries` of shards as those of whole parameters, which are `params` by the same keys. May be a collective."""
        return entries

    def sharded(self, entries: Entries, params: Mapping[Any, torch.Tensor]) -> Entries:
        """As `full`, with a `FlatShard` where that would gather; not a collective."""
        return self.full(entries, params)

    def local(self, entries: Entries, params: Mapping[Any, torch.Tensor]) -> Entries:
        """Return the inverse of `full` and of `sharded`."""
        return entries

    def full_masters(self, masters: dict[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Return float32 tensors by parameter, each laid out as its parameter is, from those of shards. May be a collective."""
        return masters

    def move_states_from(self, before: Any, replaced: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Make the states that the optimizer has by the shards of `before` states of these; both shard the same parameters.

        replaced: by parameter of `before` the one in its place now, where that is another. May be a collective.
        """

    def empty_shard(self, param: torch.Tensor, dtype: torch.dtype, device: Any = None) -> FlatShard | None:
        """Return memory for this rank's shard of a tensor of the shape of `param`; None where a whole tensor is wanted."""
        return None

    def of_params(self, convert: Callable[..., Entries], states: dict[int, State]) -> dict[int, State]:
        """Return what `convert`, one of the three above, makes of states by index, as a torch state dict has them."""
        params = dict(enumerate(self.by_shard.get(param, param) for param in self.shards.held_params()))
        # What an optimizer keeps under other names stays as it is.
        own = {key: value for key, value in states.items() if key not in params}
        return convert({key: state for key, state in states.items() if key in params}, params) | own

    def of_weights(
        self, convert: Callable[..., Entries], weights: Mapping[str, Any], names: Mapping[Any, str]
    ) -> dict[str, Any]:
        """Return what `convert` makes of tensors by parameter name; `names` are those of parameters and shards."""
        params = {name: param for param, name in names.items() if param not in self.by_shard}
        # Each is one entry, called "".
        alone = convert({name: {"": weight} for name, weight in weights.items()}, params)
        return {name: own[""] for name, own in alone.items()}


class ShardedStateView(Mapping[Any, State]):
    """State by parameter, each entry made at a read, from `state` by shard. Writes and deletions are those of shards.

    shards, params: the shard of each parameter that has one, and back. shown: makes an entry, of (parameter, shard, its
    state), which is not kept.
    """

    def __init__(
        self,
        state: Any,
        shards: Mapping[torch.Tensor, torch.Tensor],
        params: Mapping[torch.Tensor, torch.Tensor],
        shown: Callable[[torch.Tensor, torch.Tensor, State], State],
    ) -> None:
        self._state, self._shards, self._params, self._shown = state, shards, params, shown

    def __contains__(self, param: object) -> bool:
        return self._key(param) is not None

    def __getitem__(self, param: Any) -> State:
        key = self._key(param)
        if key is None:
            raise KeyError(param)
        return self._shown(param, key, self._state[key])

    def entry(self, param: torch.Tensor, name: str) -> Any:
        """Return the entry `name` of the state of `param` alone, None where there is none: each one takes long to make."""
        key = self._key(param)
        own = {} if key is None else self._state[key]
        return self._shown(param, key, {name: own[name]})[name] if name in own else None

    def __setitem__(self, param: Any, own: State) -> None:
        """Make `own`, laid out as what is read, the state of `param` on this rank; nothing where the rank has none of it."""
        shard = self._shards.get(param, param)
        mine = {}
        for key, given in own.items():
            value = local_shard(given) if isinstance(given, torch.Tensor) else given
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != shard.shape:
                if value.numel() == shard.numel():
                    value = value.reshape(shard.shape)
                elif value.shape == param.shape:
                    raise ValueError(
                        f"optimizer.state[param] was given {key!r} of the whole parameter, {tuple(value.shape)}, and this rank "
                        f"holds {shard.numel()} of its numbers; give what optimizer.state[param] gives, changed, or load whole "
                        "states by optimizer.load_state_dict"
                    )
            mine[key] = value
        if shard.numel() or not param.numel():
            self._state[shard] = mine

    def __delitem__(self, param: Any) -> None:
        """Drop the state of `param`, on this rank."""
        key, shard = self._key(param), self._shards.get(param, param)
        if key is not None:
            del self._state[key]
        elif shard is param or shard.numel():
            raise KeyError(param)

    def clear(self) -> None:
        """Drop the state of every parameter, on this rank."""
        self._state.clear()

    def __iter__(self) -> Iterator[Any]:
        return iter(dict.fromkeys(self._params.get(key, key) for key in self._state))

    def __len__(self) -> int:
        return len({self._params.get(key, key) for key in self._state})

    def _key(self, param: Any) -> Any:
        """Return by what the state of `param` is known; None if it has none."""
        shard = self._shards.get(param, param)
        key = shard if shard in self._state else param
        return key if key in self._state and param not in self._params else None


class Shards:
    """The shards of an optimizer's parameters that this rank steps. This base class: whole parameters, the same on every rank.

    Updates and master weights see shards only, which are plain tensors. Between steps the optimizer's groups hold the
    user's parameters; inside `local()` they hold the shards.

    Attributes:
        sharded: whether shards are not the parameters themselves.
        by_param, by_shard: the shard of each parameter that has one, and back.
        names: of each parameter and shard, for messages.
        is_distributed: whether other ranks have any share in these parameters; if not, nothing here does anything.
        sync_trackers: by placed module, what knows which gradients `DistributedDataParallel` has averaged.
        unsynchronised: modules that are inside `no_sync`.
        replica_check: a `ReplicaCheck` of replicated.py, where ranks hold parameters alike.
        selection: which parameters of the whole optimizer this stage of a pipeline has; None: all.
    """

    sharded = False
    names: Mapping[Any, str] = {}
    sync_trackers: Mapping[nn.Module, Any] = MappingProxyType({})
    unsynchronised: Collection[nn.Module] = ()
    replica_check: Any = None
    selection: Selection | None = None

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.is_distributed = type(self) is not Shards
        self.by_param: dict[torch.Tensor, Any] = {}
        self.by_shard: dict[torch.Tensor, torch.Tensor] = {}

    def local(self) -> AbstractContextManager[Any]:
        """Return a context in which the optimizer's groups hold this rank's shards, in the same order, each with its gradient.

        A shard is the same object every time, a leaf, and a view of its parameter. Its `.grad` is a view of the parameter's
        gradient; if code inside replaces or removes it, the parameter's follows on exit. Re-entering does nothing.
        """
        return nullcontext()

    def local_shards(self, params: Sequence[torch.Tensor]) -> AbstractContextManager[Sequence[torch.Tensor]]:
        """Return a context that gives the shards of `params`, each with its gradient, and reads no other parameter.

        Changes of these gradients inside need not reach those of `params`.
        """
        # The groups stay as they are.
        return nullcontext(params)

    def register_grad_hooks(self, use: GradUse) -> list[Any]:
        """Begin `use`; returns what has a `remove`."""

        # A release keeps sums of earlier passes out of `.grad`, which it frees as soon as it is complete.
        def complete(param: torch.Tensor) -> None:
            before = use.held.get(param)
            if before is not None and param.grad is not None:
                param.grad = before + param.grad.detach()  # as autograd adds up
            use.filled(param)

        # Overrides raise RuntimeError if ranks do not share the gradients that would come.
        return [param.register_post_accumulate_grad_hook(complete) for param in use.params]

    def has_gradient(self, param: torch.Tensor) -> bool:
        """Return whether there is a gradient of `param`, wherever it is kept. Not inside `local()`."""
        return param.grad is not None

    def drop_gradient(self, param: torch.Tensor) -> None:
        """Free the gradient of `param`, wherever it is kept. Not inside `local()`."""
        param.grad = None

    def preserving_accumulated_grads(self) -> AbstractContextManager[Any]:
        """Return a context after which gradients of earlier passes, which wait elsewhere than in `.grad` to be added to those
        of the next, are what they were. A backward pass inside uses copies."""
        return nullcontext()

    def shard_of(self, param: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the place of `param` inside `local()`."""
        return param

    def param_of(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the parameter of `shard` where a write to its gradient changes that of `shard` and not its version.

        Return `shard` otherwise.
        """
        return shard

    def num_replicas(self, shards: Sequence[torch.Tensor]) -> list[int]:
        """Return how many of the ranks that step together hold each of `shards`; 1 where each has all of every parameter."""
        return [1] * len(shards)

    def grad_holders(self) -> list[torch.Tensor]:
        """Return every tensor with a `.grad` that a backward pass may add to, also those that have none. Inside `local()`."""
        return self.held_params()

    def grad_targets(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors to write to the `.grad` of, so that the gradients of `shards` change. Inside `local()`.

        shards: all that have a gradient.
        """
        # Overridden where ranks share unsharded gradients and each steps a shard: a scale must reach what others step.
        return shards

    def local_slice(self, value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """Return the elements of `value`, a tensor or DTensor of the shape of `param`, that belong to this rank's shard."""
        return value

    def distribute(self, value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """Return `value`, a tensor or DTensor of the shape of `param`, laid out as `param` is. May be a collective."""
        return value

    def needs_collective(self, value: torch.Tensor, param: torch.Tensor) -> bool:
        """Whether `distribute` and `states.local` of `value` are collectives; ValueError if `value` cannot be laid out here."""
        if is_dtensor(value):
            raise ValueError(
                "the optimizer state holds DTensors, each a rank's shard of a tensor, and this plugin keeps whole tensors; "
                "make them whole with full_tensor(), on all ranks, before saving"
            )
        return False

    def reshard(self) -> None:
        """Drop what was gathered of parameters, which somebody wrote to."""

    def sync_params(self, *, one_by_one: bool = False) -> None:
        """Give all ranks the elements that each has stepped. A collective, if anything. one_by_one: wait for each bucket."""

    def wait_for_weights(self) -> None:
        """Wait for the all-gathers that `sync_params` started."""

    def sharded_params(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return `params`, with the sharded parameter for each unsharded one that a pass has put into the model."""
        return params

    def clear_gradients(self, set_to_none: bool) -> None:
        """Drop gradients that are kept elsewhere than in the `.grad` of parameters."""

    def without_gradients(self) -> AbstractContextManager[Any]:
        """Return a context inside which gradients kept elsewhere than in `.grad` are gone; afterwards they are back."""
        return nullcontext()

    def name_of(self, param: torch.Tensor) -> str:
        """Return what messages call `param`."""
        return self.names.get(param, f"a parameter of shape {tuple(param.shape)}")

    def check_gradients(self) -> None:
        """Raise RuntimeError if ranks would step on gradients that they do not share. The same on every rank."""

    def replicated_params(self) -> list[tuple[dist.ProcessGroup, list[torch.Tensor]]]:
        """Return what trains and is the same on all ranks of a group, by group; the same groups on every rank."""
        return []

    def mark_divided(self, divisor: float | torch.Tensor) -> None:
        """The optimizer's kernel divided the gradients of the shards by `divisor`, a number or 0-dim tensor, in place."""

    def rescale_unsharded_grads(self) -> None:
        """Divide the other ranks' elements of unsharded gradients as this rank's were; before more is added."""

    def abandon_backward(self) -> None:
        """Bring parameters back to what they are between passes, after a backward pass that raised."""

    # ------------------------------------------------------------------ checkpoints

    @property
    def states(self) -> ShardStates:
        """What converts states and masters between shards and whole parameters."""
        return ShardStates(self)

    def accept_zero_grads(self) -> None:
        """Make gradients zeros, wherever they are kept, for parameters with a `.grad` of zeros. Not inside `local()`."""

    def held_params(self) -> list[torch.Tensor]:
        """Return what the groups hold now: parameters, or shards inside `local()`."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]


UNSYNCHRONISED = (
    "the gradients of this optimizer are not averaged over the ranks, because passes ran inside no_sync(), and none outside of "
    "it after them; before step(), run the last forward and backward pass outside of no_sync(), or use b.accumulate()"
)
ALONE = (
    "the gradient of {name} is not averaged over the ranks: DistributedDataParallel averages what the first backward pass "
    "after a forward pass of the boosted model brings, and another brought this one: through a method of the model, or a "
    "member of a ModuleList, that was called instead; the second of two backward passes after two forward passes; or again "
    "through a graph that retain_graph=True kept. Compute losses in forward, add them up, or use LowLevelZeroPlugin(stage=2), "
    "which averages every pass"
)
SPARSE = (
    "{name} has a sparse gradient, which cannot be divided among ranks; build its module with "
    "sparse=False, or use TorchDDPPlugin"
)
FROZEN = (
    "{name} has a gradient, but was frozen when the model was boosted, so ranks do not share it and would drift apart; call "
    "requires_grad_() before boost(), or use TorchFSDPPlugin, which also trains what is unfrozen later"
)
RELAID = (
    "{name} changed its memory order after boost(), so that ranks average gradients of other elements with it than its own; "
    "call model.to(memory_format=...) before boost()"
)


class FlatShard:
    """This rank's slice of a tensor: elements from `start` on, in memory order; other ranks have the others.

    `torch.distributed.checkpoint` saves boxes of a whole tensor. A slice of a tensor of n dimensions is at most 2n - 1 boxes,
    each a view of `values`.

    Attributes:
        values: this rank's elements, 1-dim.
        start: place of the first one in the whole tensor, in memory order.
        shape, stride: of the whole tensor, which is dense.
    """

    def __init__(self, values: torch.Tensor, start: int, shape: Sequence[int], stride: Sequence[int]) -> None:
        self.values = values.detach()
        self.start = start
        self.shape = torch.Size(shape)
        self.stride = tuple(stride)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def size(self) -> torch.Size:
        """Return the shape of the whole."""
        return self.shape

    def dim(self) -> int:
        """Return the number of dimensions of the whole."""
        return len(self.shape)

    def with_values(self, values: torch.Tensor) -> FlatShard:
        """Return the same stretch with other values."""
        return FlatShard(values, self.start, self.shape, self.stride)

    def boxes(self) -> Iterator[tuple[torch.Size, torch.Size, torch.Tensor]]:
        """Yield (offsets, sizes, view of `values`) of boxes of the whole that make up the stretch, in memory order."""
        # Dimensions of length 1 may have any stride.
        order = sorted(range(self.dim()), key=lambda dim: (self.shape[dim] != 1, -self.stride[dim]))
        back = sorted(range(self.dim()), key=order.__getitem__)
        done = 0
        for offsets, sizes in _boxes([self.shape[dim] for dim in order], self.start, self.start + self.values.numel()):
            numel = math.prod(sizes)
            view = self.values[done : done + numel].view(sizes).permute(back)
            done += numel
            yield torch.Size(offsets[dim] for dim in back), torch.Size(sizes[dim] for dim in back), view

    def box_at(self, offsets: Sequence[int] | None) -> torch.Tensor:
        """Return the view of the box that begins at `offsets` of the whole."""
        return next(view for begin, _, view in self.boxes() if begin == offsets)

    # ------------------------------------------------------------------ what torch.distributed.checkpoint asks for

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, self.shape),
            )
            for offsets, sizes, _ in self.boxes()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets, sizes) for offsets, sizes, _ in self.boxes()]


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, sizes) of boxes that make up elements `start` to `stop` of a contiguous tensor, in order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if start % inner:
        row = start // inner
        for offsets, sizes in _boxes(shape[1:], start % inner, min(stop - row * inner, inner)):
            yield (row, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if stop % inner and last >= first:
        for offsets, sizes in _boxes(shape[1:], 0, stop % inner):
            yield (last, *offsets), (1, *sizes)
