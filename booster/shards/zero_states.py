"""What each rank holds of parameters in flat buckets, and the state of whole parameters gathered from that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from booster.ranks.agreement import communication_device, gather
from booster.shards.base import Entries, FlatShard, ShardedStateView, ShardStates, State
from booster.shards.zero_buckets import FlatParameters
from booster.tensors.flat import flat, shaped_like

Key = str | int
MESSAGE = 2**27  # bytes sent at once, of all ranks together: extra memory


class BucketSlot(NamedTuple):
    """A parameter in a flat bucket."""

    bucket: FlatParameters
    position: int

    @property
    def param(self) -> torch.Tensor:
        return self.bucket.params[self.position]

    def has_same_layout(self, other: BucketSlot) -> bool:
        """Return whether each rank has the same elements of the parameter by `other`, in tensors of one shape."""
        return self.bucket.by_elements == other.bucket.by_elements and all(
            self.bucket.overlap(self.position, rank) == other.bucket.overlap(other.position, rank)
            for rank in range(len(self.bucket.bounds) - 1)
        )

    @property
    def span(self) -> tuple[int, int]:
        """Return (start, stop) of the elements of the parameter, in memory order, that this rank has."""
        return self.bucket.overlap(self.position, self.bucket.rank)

    def has_shape_of_shard(self, value: torch.Tensor) -> bool:
        start, stop = self.span
        return self.bucket.by_elements and value.dim() == 1 and value.numel() == stop - start

    def empty_shard(self, dtype: torch.dtype, device: torch.device) -> FlatShard:
        """Return memory without values for what this rank holds of a tensor like the parameter."""
        start, stop = self.span
        values = torch.empty(stop - start, dtype=dtype, device=device)
        return FlatShard(values, start, self.param.shape, self.param.stride())

    def flat_shard(self, value: Any) -> Any:
        """Return `value`, an entry of this rank's state, as a `FlatShard` where it is a shard, else as it is."""
        if not isinstance(value, torch.Tensor) or not self.param.dim() or not self.has_shape_of_shard(value):
            return value
        return FlatShard(value, self.span[0], self.param.shape, self.param.stride())


class SteppedShard(NamedTuple):
    """A parameter of a group with a shard here that is not empty. shaped: the shard has the parameter's shape."""

    param: torch.Tensor
    shard: torch.Tensor
    slot: BucketSlot
    shaped: bool


class GroupShards:
    """What is known of the parameters of a group, as long as they are the same."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        shard_of: Callable[[torch.Tensor], torch.Tensor],
        slot_of: Callable[[torch.Tensor], BucketSlot | None],
    ) -> None:
        self.params = list(params)
        self.shards = list(map(shard_of, params))
        pairs = list(zip(self.params, self.shards, strict=True))
        self.frozen = [param for param, shard in pairs if shard is param]
        self.divided = [(param, shard) for param, shard in pairs if shard is not param]
        nonempty = [(param, shard, slot_of(param)) for param, shard in self.divided if shard.numel()]
        self.stepped = [
            SteppedShard(p, shard, held, shard.dim() != 1) for p, shard, held in nonempty if held is not None
        ]

    def holds(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether the parameters are these still, in this order."""
        return len(self.params) == len(params) and all(map(is_, self.params, params))


def state_names(
    state: Mapping[Any, State], params: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> dict[Any, State]:
    """Return for each of `params` the names of states that any rank has of it, with None for values; a collective."""
    names: defaultdict[Any, State] = defaultdict(dict)
    for names_of_rank in gather([list(state.get(param, ())) for param in params], group):
        for param, own in zip(params, names_of_rank, strict=True):
            if own:
                names[param] |= dict.fromkeys(own)
    return names


def gather_states(
    states: Mapping[Key, State], slots: Mapping[Key, BucketSlot], group: dist.ProcessGroup
) -> dict[Key, State]:
    """Return, on every rank, the state of each key that any rank has state for, of whole parameters.

    states: of this rank's parts. slots: the parameter of each key, the same on all ranks. Tensors of the part's shape come back
    in the parameter's, others are those of the rank that has them. Collectives: two small ones for what there is, then all
    bytes one after another in messages of at most `MESSAGE` bytes.
    """
    # In columns and without a container for each entry: with many, most of the time is the garbage collector's.
    columns: list[list[Any]] = [[], [], [], [], []]
    for key, own in states.items():
        for name, value in own.items():
            for column, entry in zip(columns, (key, name, *_describe(value, slots[key])), strict=True):
                column.append(entry)
    # They arrive in host memory, because together they are what does not fit on a device.
    gathered: dict[Key, State] = {}
    sent: list[torch.Tensor] = []
    kept: list[list[torch.Tensor]] = [[] for _ in range(dist.get_world_size(group))]
    try:
        columns_of_ranks = gather(columns, group)
    except TypeError as error:  # before anything is sent
        raise TypeError(f"the optimizer's state holds something that is neither tensor nor number: {error}") from error
    for holder, entries in enumerate(columns_of_ranks):
        for key, name, kind, dtype, content in zip(*entries, strict=True):
            if key not in gathered:
                gathered[key] = {}
            part = _enter(gathered[key], name, kind, dtype, content, slots[key], holder)
            if part is not None:
                kept[holder].append(part)
                if holder == dist.get_rank(group):
                    sent.append(states[key][name])
    device = next((slot.param.device for slot in slots.values()), torch.device("cpu"))
    _exchange_bytes(sent, kept, communication_device(device, group), group)
    position = {key: index for index, key in enumerate(slots)}
    return {key: gathered[key] for key in sorted(gathered, key=position.__getitem__)}


def _describe(value: Any, slot: BucketSlot) -> tuple[str, str, Any]:
    if not isinstance(value, torch.Tensor):
        return "number", type(value).__name__, value
    dtype = str(value.dtype).removeprefix("torch.")
    if slot.has_shape_of_shard(value):
        return "shard", dtype, None
    return ("scalar", dtype, value.item()) if value.dim() == 0 else ("tensor", dtype, list(value.shape))


def _enter(
    own: State, name: str, kind: str, dtype_name: str, content: Any, slot: BucketSlot, holder: int
) -> torch.Tensor | None:
    """Put an entry of rank `holder` into `own`, the state of a whole parameter; returns the place of what the rank sends of it.

    None: it sends nothing, as the entry is a number or one that a rank before has whole.
    """
    # Every rank has it; the first one's counts.
    if kind != "shard" and name in own:
        return None
    if kind == "number":
        own[name] = content
        return None
    dtype = getattr(torch, dtype_name)
    if kind == "scalar":
        own[name] = torch.tensor(content, dtype=dtype)
        return None
    if kind == "tensor":
        own[name] = torch.empty(content, dtype=dtype)
        return own[name].view(-1)
    if name in own:
        whole = flat(own[name])
    else:
        whole = torch.empty(slot.param.numel(), dtype=dtype)
        own[name] = shaped_like(whole, slot.param)
    start, stop = slot.bucket.overlap(slot.position, holder)
    return whole[start:stop] if stop - start < whole.numel() else whole


def _exchange_bytes(
    sent: list[torch.Tensor], kept: list[list[torch.Tensor]], device: torch.device, group: dist.ProcessGroup
) -> None:
    """Fill `kept`, for each rank memory for all that it sends, in the same order; collectives.

    sent: of this rank.
    """
    own = _Bytes([value.detach().contiguous() for value in sent])
    places = [_Bytes(parts) for parts in kept]
    longest = max(part.size for part in places)
    # A bound on memory: every rank receives as much from each rank at once.
    share = max(MESSAGE // len(kept), 1)
    for start in range(0, longest, share):
        size = min(share, longest - start)
        # All is bytes: backends do not know every dtype, and tensors of several then share a message.
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        own.write_to(message, start)
        everyone = [torch.empty_like(message) for _ in places]
        dist.all_gather(everyone, message, group=group)
        for arrived, parts in zip(everyone, places, strict=True):
            parts.read_from(arrived.cpu(), start)


class _Bytes:
    """Contiguous tensors as bytes, one after another."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._parts = [(value if value.dim() == 1 else value.view(-1)).view(torch.uint8) for value in tensors]
        self._sizes = list(map(torch.Tensor.numel, self._parts))
        self.size = sum(self._sizes)

    def write_to(self, message: torch.Tensor, start: int) -> None:
        """Fill `message` with the bytes from `start` on, as far as it goes."""
        parts, pieces = self._meeting(message, start)
        if parts:
            torch._foreach_copy_(pieces, parts)

    def read_from(self, message: torch.Tensor, start: int) -> None:
        """Read the bytes from `start` on out of `message`."""
        parts, pieces = self._meeting(message, start)
        if parts:
            torch._foreach_copy_(parts, pieces)

    def _meeting(self, message: torch.Tensor, start: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors, or pieces of them, that `message` holds, and their places in it."""
        stop, offset = start + message.numel(), 0
        parts, sizes = [], []
        for part, size in zip(self._parts, self._sizes, strict=True):
            end = offset + size
            if end > start and offset < stop and size:
                if offset < start or end > stop:
                    part = part[max(start - offset, 0) : min(stop - offset, size)]
                    size = part.numel()
                parts.append(part)
                sizes.append(size)
            offset = end
        return parts, list(message[: sum(sizes)].split_with_sizes(sizes)) if parts else []


class ZeroStates(ShardStates):
    """Of slices of flat buckets, one for each rank of `group`. reduced: whether gradients are slices too."""

    def __init__(self, shards: Any, *, group: dist.ProcessGroup, reduced: bool) -> None:
        super().__init__(shards)
        self._group, self._reduced = group, reduced

    def view_state(self, state: Mapping[Any, State]) -> Mapping[Any, State]:
        """Return state by parameter, but of this rank's shard: 1-dim where that is not all of the parameter."""

        def shown(param: torch.Tensor, shard: torch.Tensor, own: State) -> State:
            if shard.numel() != param.numel() or not shard.dim():
                return dict(own)
            return {key: shaped_like(value, param) if _alike(value, shard) else value for key, value in own.items()}

        return ShardedStateView(state, self.by_param, self.by_shard, shown)

    def state_of_ranks(self, state: Mapping[Any, State]) -> Mapping[Any, State]:
        params = self.shards.held_params()
        names = state_names(state, params, self._group)
        if not names and self._reduced and any(map(self.shards.has_gradient, params)):
            raise RuntimeError(
                "torch.distributed.checkpoint.state_dict makes states by a step of zeros, and would drop the gradients that "
                "this rank has slices of; call optimizer.step() or optimizer.zero_grad() first"
            )
        return names

    def full(self, entries: Entries, params: Mapping[Any, torch.Tensor]) -> Entries:
        slots = {key: slot for key, param in params.items() if (slot := self.shards.slot_of(param)) is not None}
        whole = {key: own for key, own in entries.items() if key not in slots}
        whole |= gather_states({key: own for key, own in entries.items() if key in slots}, slots, self._group)
        return {key: whole[key] for key in dict.fromkeys((*params, *whole)) if key in whole}

    def sharded(self, entries: Entries, params: Mapping[Any, torch.Tensor]) -> Entries:
        slots = {key: None if (param := params.get(key)) is None else self.shards.slot_of(param) for key in entries}
        return {
            key: {name: slot.flat_shard(value) for name, value in own.items()} if slot else dict(own)
            for (key, own), slot in zip(entries.items(), slots.values(), strict=True)
        }

    def local(self, entries: Entries, params: Mapping[Any, torch.Tensor]) -> Entries:
        cut = {}
        for key, own in entries.items():
            param = params.get(key)
            # A weight that does not fit stays, for whoever reads it to refuse on all ranks alike.
            misfit = param is not None and "" in own and own[""].shape != param.shape
            if param is None or misfit or self.shards.slot_of(param) is None:
                cut[key] = own
            elif self.shards.shard_of(param).numel():
                cut[key] = {name: self.shard_entry(value, param) for name, value in own.items()}
        return cut

    def empty_shard(self, param: torch.Tensor, dtype: torch.dtype, device: Any = None) -> FlatShard | None:
        slot = self.shards.slot_of(param)
        if slot is None or not param.dim():
            return None
        return slot.empty_shard(dtype, device or param.device)

    def full_masters(self, masters: dict[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        wide = {param: value for shard, value in masters.items() if (param := self.by_shard.get(shard, shard)) is shard}
        for param in self.shards.held_params():
            slot = self.shards.slot_of(param)
            if slot is None:
                continue
            # One after another, so that no more than one is there twice.
            own = masters.pop(self.shards.shard_of(param), None)
            entries: Entries = {0: {"": own}} if own is not None and own.numel() else {}
            whole = gather_states(entries, {0: slot}, self._group)
            if whole:
                wide[param] = whole[0][""].to(param.device)
        return wide

    def move_states_from(self, before: Any, replaced: Mapping[torch.Tensor, torch.Tensor]) -> None:
        state = self.shards.optimizer.state
        for param in self.shards.held_params():
            new = self.shards.slot_of(param)
            old = before.slot_of(param) if isinstance(before.states, ZeroStates) else None
            if old is None or new is None:
                continue
            own, shard = state.pop(before.shard_of(param), None), self.shards.shard_of(param)
            if not old.has_same_layout(new):
                # One after another, so that no more than one is there twice.
                whole = gather_states({0: own} if own else {}, {0: old}, self._group).get(0, {})
                cut = {key: self.shard_entry(entry, param) for key, entry in whole.items()}
                own = {
                    key: value.to(param.device) if isinstance(value, torch.Tensor) and value.dim() else value
                    for key, value in cut.items()
                }
            if own and shard.numel():
                state[shard] = own

    def shard_entry(self, value: Any, param: torch.Tensor) -> Any:
        if isinstance(value, FlatShard):
            return value.values if self.shards.shard_of(param).dim() == 1 else shaped_like(value.values, param)
        if not _alike(value, param) or value.dim() == 0:
            return value
        return self.shards.local_slice(value, param).clone()  # not a view, which would keep the whole in memory


def _alike(value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape
