"""States and masters of shards, as whole parameters have them and back; a view of states by parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from booster.model.dtensors import local_shard

if TYPE_CHECKING:
    from booster.shards.flat_shard import FlatShard

State = dict[str, Any]
Entries = dict[Any, State]


class ShardStates:
    """Converts entries of states between shards and parameters. This base class: whole parameters, nothing to convert.

    Attributes:
        shards: the `Shards` of the parameters.
        by_param, by_shard: the shard of each parameter that has one, and back.
    """

    def __init__(
        self, shards: Any, by_param: Mapping[torch.Tensor, Any], by_shard: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        self.shards, self.by_param, self.by_shard = shards, by_param, by_shard

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
