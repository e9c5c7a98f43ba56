"""The master weights of one optimizer: buckets of its half parameters, and everything that moves between them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import filterfalse
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.common.text import listed
from booster.common.torch_internals.tensor_internals import of_same_version
from booster.masters.bucket import Bucket
from booster.masters.formats import Format, Split24, Stochastic
from booster.masters.formats_compiled import compiled_format
from booster.masters.offload import HostMemory, can_offload
from booster.masters.optimizer_proxy import State
from booster.masters.options import MasterOptions
from booster.masters.rounding import RoundingRNG, rounded
from booster.masters.states import (
    Places,
    StateView,
    as_of_master,
    give_back,
    places_of,
    signature,
    state_of_bucket,
    state_of_params,
)
from booster.model.dtensors import around, is_dtensor, local_shard
from booster.model.optimizer_kinds import check_attributes, kind_of
from booster.model.optimizer_states import load_states
from booster.tensors.flat import Piece, bucket_size, cut, cut_apart, flat, flat_like, is_dense, pack, shaped_like
from booster.tensors.trees import HALF_DTYPES
from booster.update.parameters import name_of_stranger

Weights = Mapping[torch.Tensor, torch.Tensor]


DRAWS = "draws"  # of the random state in a checkpoint: how many steps rounded by chance


def has_half_elements(param: torch.Tensor) -> bool:
    """Return whether `param` would have a master if it were trained: a half one of no elements has none."""
    return param.dtype in HALF_DTYPES and param.numel() > 0


own_gradient: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")
"""Returns `param.grad`, the gradient for its master where nobody keeps another; without a Python call for each."""


class Masters:
    """Master weights for the trainable half parameters of `optimizer`, and how its states are kept.

    At rest the optimizer's groups hold the working parameters, as the user knows them; its state is keyed by the handles
    of the buckets. `optimizer` is only ever stepped, by `MasterStep`, with handles in place of parameters.

    names: of the parameters, for checkpoints. sources: float32 values to start from; parameters that are not in it start
    from their own. compiled: keep remainders as a compiled step wants them. released: cut buckets so that few gradients
    wait for others. Raises ValueError for a form of masters that this optimizer cannot be stepped on.

    Where states are packed, or lie in the host's memory, float32 parameters lie in buckets too, as their own masters.

    gradient_of: what a step takes for the gradient of a half parameter, in any floating dtype; its `.grad` by default.
    loaded_weights: gives, once, float32 values that somebody loaded into half parameters of these; None: nobody watches.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[torch.Tensor, str],
        options: MasterOptions,
        *,
        sources: MutableMapping[torch.Tensor, torch.Tensor] | None = None,
        compiled: bool = False,
        released: bool = False,
    ) -> None:
        options.check(optimizer)
        held = [param for group in optimizer.param_groups for param in group["params"]]
        takes_all = options.states != "fp32" or options.offload
        check_attributes(
            optimizer,
            held if takes_all else [param for param in held if param.dtype in HALF_DTYPES],
            "would be stepped on float32 tensors that stand for them",
        )
        self.optimizer = optimizer
        self.kind = kind_of(optimizer)
        self.buckets: list[Bucket] = []
        self._places: Places = {}  # of the buckets in `_placed`, which were so many
        self._placed, self._num_placed = self.buckets, 0
        self.gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = own_gradient
        self.loaded_weights: Callable[[Masters], Weights] | None = None
        self.names = names
        self.options = options
        self._compiled = compiled
        self.released = released
        self.scratch: Any = None  # of the last step, where that kept it
        self.rng = RoundingRNG()
        self.quantizer = options.make_quantizer(optimizer, self.rng)
        self.hosts: dict[torch.device, HostMemory] = {}
        self._formats: dict[torch.dtype, Format] = {}
        self._layouts: dict[torch.Tensor, torch.Tensor] = {}  # memory order that buckets know; tensors without data
        self.num_gone = 0
        """How many of them were in no group of the optimizer when `register_params` ran last."""
        self.register_params(sources)

    # ------------------------------------------------------------------ parameters

    def register_params(self, sources: MutableMapping[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Make masters for half parameters of the groups that have none yet; state they have already moves along.

        sources: see the class; what is used of it is taken out.

        Masters become the float32 values that were loaded into their weights, see `LoadedWeights`. Where a parameter with a
        master changed its memory order, as by `model.to(memory_format=...)`, masters and state are laid anew. Raises
        RuntimeError for one whose shape, dtype or device changed.
        """
        for param, known in self._layouts.items():  # which loops without a call do for every parameter in every step
            if param.stride() != known.stride() or param.shape != known.shape:
                self._follow_layouts()
                break
        loaded = None if self.loaded_weights is None else self.loaded_weights(self)
        if loaded:
            self._take_loaded(loaded)
        fresh: list[list[torch.Tensor]] = []
        half_alone = self.quantizer is None and not self.options.offload
        self.num_gone = len(self._layouts)
        for group in self.optimizer.param_groups:
            found = []
            for p in group["params"]:
                if p in self._layouts:
                    self.num_gone -= 1
                    continue
                if half_alone and p.dtype not in HALF_DTYPES:
                    continue
                if self.is_stepped(p) and self.may_have(p):
                    found.append(p)
            fresh.append(found)
        if not any(fresh):
            return
        state = self.optimizer.state
        states = {p: as_of_master(state.pop(p), p) for params in fresh for p in params if p in state}
        self.buckets += self._build(fresh, states, {} if sources is None else sources)

    def refuse_gone(self) -> None:
        """Raise RuntimeError for parameters that lie in buckets, and in no group of the optimizer any more."""
        held = {param for group in self.optimizer.param_groups for param in group["params"]}
        names = [self.names.get(p, f"a parameter of shape {tuple(p.shape)}") for p in self._layouts if p not in held]
        raise RuntimeError(
            f"{listed(names, 5)} {'was' if len(names) == 1 else 'were'} taken out of the groups of the optimizer after "
            "boost(), but masters or states of it lie in one piece with those of others; put it back, and stop training it by "
            "requires_grad_(False) and optimizer.zero_grad()"
        )

    def take_weights_from(self, loaded: Callable[[Masters], Weights]) -> None:
        """Have `loaded` of these give, once, float32 values that somebody loaded into half parameters."""
        self.loaded_weights = loaded

    def take_gradients_from(self, gradient_of: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Step on the gradients that `gradient_of` gives for parameters, instead of `.grad`."""
        self.gradient_of = gradient_of

    @property
    def size(self) -> int:
        """Elements of the largest bucket."""
        return max((bucket.size for bucket in self.buckets), default=0)

    def params(self) -> list[torch.Tensor]:
        """Return the parameters with masters, each once."""
        return list(self._layouts)

    def states_of(self, buckets: Iterable[Bucket]) -> dict[torch.Tensor, State]:
        """Return the optimizer's state of every parameter in `buckets`, in its shape; see `state_of_params`."""
        return state_of_params(buckets, self.optimizer.state, self._layouts)

    @property
    def of_half_alone(self) -> bool:
        """Whether none but half parameters may lie in buckets."""
        return self.quantizer is None and not self.options.offload

    @property
    def offloads(self) -> bool:
        """Whether what is kept beside weights, and states, are to lie in the host's memory."""
        return self.options.offload

    def may_have(self, param: torch.Tensor) -> bool:
        """Return whether `param` has a place in a bucket, or would have one if it were trained."""
        if param.dtype in HALF_DTYPES:
            return has_half_elements(param)
        own = param.dtype == torch.float32 and not param.is_sparse and param.dim() > 0 and param.numel() > 0
        return own and (self.quantizer is not None or self._offloads(param.device))

    def is_stepped(self, param: torch.Tensor) -> bool:
        """Return whether a step may change `param`: also one that was frozen since its gradient came."""
        return param.requires_grad or self.gradient_of(param) is not None

    def outside(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of `params` that lie in no bucket."""
        return list(filterfalse(self._layouts.__contains__, params))

    def _take_loaded(self, values: Weights) -> None:
        """Make `values` the masters of the weights that they round to; others were written since."""
        for bucket in self.buckets:
            if bucket.residual is None or values.keys().isdisjoint(bucket.params):
                continue
            masters = bucket.load(bucket.scratch(), bucket.scratch())
            for piece, working, master in zip(bucket.pieces, bucket.working(), bucket.pieces_of(masters), strict=True):
                if piece.param in values:
                    value = flat_like(local_shard(values[piece.param]), local_shard(piece.param))
                    value = value[piece.start : piece.stop].to(master)
                    torch.where(working == rounded(value, working.dtype), value, master, out=master)
            with of_same_version([local_shard(param) for param in bucket.params]):  # a forward pass may have used them
                bucket.save(masters, bucket.scratch())

    def divide_by_gradients(self) -> list[Bucket]:
        """Divide buckets of which some parameters have a gradient and others none: torch leaves the latter alone. Returns those
        with gradients; of an optimizer that steps everything at once those that have any."""
        gradient_of, stepped, made = self.gradient_of, [], {}
        for bucket in self.buckets:
            present = missing = False
            for piece in bucket.pieces:
                if gradient_of(piece.param) is None:
                    missing = True
                else:
                    present = True
            if present and missing and self.kind != "whole":
                made[bucket] = bucket.divide(gradient_of, self.optimizer.state)
                stepped.append(made[bucket][0])
            elif present:
                stepped.append(bucket)
        if made:
            self.buckets = [each for bucket in self.buckets for each in made.get(bucket, (bucket,))]
        return stepped

    # ------------------------------------------------------------------ state of the optimizer

    def sync(self) -> None:
        """Wait until what the last step sent to the host's memory has arrived there."""
        for host in self.hosts.values():
            host.sync()

    def view_state(self, put: Callable[[Any, State | None], None]) -> StateView:
        """Return the optimizer's state by working parameter: as `state`, but each made when it is asked for. What is written to
        it is kept by `put`, which calls `put_state`."""
        if self._placed is not self.buckets or self._num_placed != len(self.buckets):
            self._placed, self._num_placed = self.buckets, len(self.buckets)
            self._places = places_of(self.buckets)
        self.sync()
        return StateView(self._places, self.optimizer.state, self._layouts, put=put, steps=lambda: self.rng.count)

    def put_state(self, param: torch.Tensor, own: State | None) -> None:
        """Make `own` the state of `param`, which lies in a bucket; None: it has none. Buckets are made anew where `param` can
        share none any longer. Raises ValueError for a tensor that is neither a number nor of the shape of `param`."""
        wrong = {
            key: tuple(value.shape)
            for key, value in (own or {}).items()
            if self.kind == "elementwise" and isinstance(value, torch.Tensor) and value.numel() != 1
            if value.shape != self._layouts[param].shape
        }
        if wrong:
            raise ValueError(
                f"the state of a parameter of shape {tuple(param.shape)} was given tensors of shapes {wrong}; those of an "
                "elementwise optimizer have its shape, or are one number"
            )
        state = self.optimizer.state
        states = dict(self.state())
        if own is None:
            states.pop(param, None)
        else:
            states[param] = dict(own)
        states = {p: each for p, each in states.items() if p in self._layouts}
        holds = [bucket for bucket in self.buckets if any(each is param for each in bucket.params)]
        if not self.takes(states):
            # Flat ones are views of what is emptied on the way.
            states = {p: {k: _cloned(v) for k, v in each.items()} for p, each in states.items()}
            values = {p: value.clone() for p, value in self.values().items()}
            for bucket in self.buckets:
                for handle in bucket.handles:
                    state.pop(handle, None)
            self.rebuild(states, values)
            return
        for bucket in holds:
            for handle, piece in zip(bucket.handles, bucket.pieces, strict=bucket.whole):
                if not bucket.whole or piece.param is param:
                    state.pop(handle, None)
            made = state_of_bucket(bucket, states)
            state.update(made if not bucket.whole else {h: s for h, s in made.items() if h not in state})
            if bucket.host is not None:
                bucket.host.keep_states(bucket, state)

    def state(self) -> defaultdict[Any, State]:
        """Return the optimizer's state by working parameter, in shapes of the parameters, on the host where it lies there.

        Do not write to it."""
        self.sync()
        handles = {handle for bucket in self.buckets for handle in bucket.handles}
        other = {key: value for key, value in self.optimizer.state.items() if key not in handles}
        return defaultdict(dict, {**other, **state_of_params(self.buckets, self.optimizer.state, self._layouts)})

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return what `optimizer.state_dict()` would be if it had been stepped on float32 parameters."""
        own, self.optimizer.state = self.optimizer.state, self.state()
        try:
            return self.optimizer.state_dict()
        finally:
            self.optimizer.state = own

    def read_optimizer_state_dict(self, state_dict: dict[str, Any]) -> dict[torch.Tensor, State]:
        """Load torch's state dict into the optimizer, but for the state of half parameters, which is returned.

        Masters and handles stay; only containers of the optimizer change.
        """
        optimizer = self.optimizer
        # Torch casts state to the dtype of the parameter that it belongs to.
        proxies = {
            p: nn.Parameter(
                torch.zeros((), dtype=torch.float32, device="cpu" if self._offloads(p.device) else p.device).expand(
                    p.shape
                )
            )
            for p in self._half_params()
        }
        optimizer.state = defaultdict(dict)
        with self._replaced(proxies):
            load_states(optimizer, state_dict)
        return {p: optimizer.state.pop(s) for p, s in proxies.items() if s in optimizer.state}

    def take_over(self, states: MutableMapping[torch.Tensor, State], masters: Weights) -> None:
        """Make these the states and masters of half parameters; masters that are not given stay as they are.

        Where none are given, buckets stay as they are laid, unless their parameters come with different histories.
        """
        if not masters and self.takes(states):
            self.sync()
            for bucket in self.buckets:
                self.optimizer.state.update(state_of_bucket(bucket, states))
                if bucket.host is not None:
                    bucket.host.keep_states(bucket, self.optimizer.state)
            self.optimizer.state.update({p: own for p, own in states.items() if p not in self._layouts})
            return
        # Of a parameter that was frozen since: kept for the day when it is not, while its weights stay what they are.
        frozen = [(p, p.detach().clone()) for p in masters if p not in self._layouts]
        kept = {} if self._layouts.keys() <= masters.keys() else self.values()
        self.rebuild(states, {**kept, **masters})
        for param, weights in frozen:
            param.detach().copy_(weights)
        self.optimizer.state.update({p: own for p, own in states.items() if p not in self._layouts})

    def takes(self, states: Mapping[torch.Tensor, State]) -> bool:
        """Return whether the parameters of each flat bucket have `states` that can share it."""
        seen: dict[torch.Tensor, Any] = {}
        for bucket in self.buckets:
            for param in () if bucket.whole else bucket.params:
                if param not in seen:
                    seen[param] = signature(param, states.get(param))
                if seen[param] != seen[bucket.pieces[0].param]:
                    return False
        return True

    # ------------------------------------------------------------------ values

    def joined(self, param: torch.Tensor) -> torch.Tensor:
        """Return a float32 copy of the master of `param`, in its shape."""
        self.register_params()
        return self._values_of({param: None})[param].clone()

    def values(self) -> Weights:
        """Return the masters by parameter, float32 in its shape: themselves where one is kept in one piece, else copies."""
        self.register_params()
        return self._values_of(self._layouts)

    def state_dict(self) -> dict[str, Any]:
        """Return the masters by parameter name, where they are more than the weights; and the state of stochastic rounding."""
        self.register_params()
        weights: dict[torch.Tensor, torch.Tensor] = {}
        for bucket in self.buckets:
            if bucket.residual is None:
                continue
            for piece, values in zip(bucket.pieces, bucket.pieces_of(bucket.joined()), strict=True):
                whole = weights.setdefault(piece.param, torch.empty_like(piece.param, dtype=torch.float32))
                flat(local_shard(whole))[piece.start : piece.stop] = values
        state: dict[str, Any] = {"weights": {self.name_of(p): whole.detach() for p, whole in weights.items()}}
        rounding = self.rounding_state()
        return state | ({"rounding": rounding} if rounding else {})

    def rounding_state(self) -> dict[str, Any]:
        """Return the random state of rounding by chance; empty where nothing is rounded so."""
        generators: dict[str, Any] = {
            str(device): generator.get_state()
            for form in self._formats.values()
            if isinstance(form, Stochastic)
            for device, generator in form.generators.items()
        }
        if self.quantizer is not None or any(isinstance(form, Split24) for form in self._formats.values()):
            generators[DRAWS] = torch.tensor(self.rng.count, dtype=torch.int64)
        return generators

    def read_state_dict(self, state: Mapping[str, Any]) -> Weights:
        """Return the weights in `state`, by parameter. Raises ValueError, nothing changed, if they cannot be masters here."""
        # A rank may have none of a weight.
        weights = {name: weight for name, weight in state["weights"].items() if weight.numel()}
        rounding = state.get("rounding", {})
        params = {self.name_of(p): p for p in self._half_params()}
        unknown = {
            name: tuple(weight.shape)
            for name, weight in weights.items()
            if name not in params or params[name].shape != weight.shape
        }
        if unknown:
            raise ValueError(
                f"the optimizer state holds masters {unknown} that are no half parameters of this optimizer; it has "
                f"{ {name: tuple(param.shape) for name, param in params.items()} }"
            )
        self._check_rounding(rounding)
        return {params[name]: weight for name, weight in weights.items()}

    def _check_rounding(self, rounding: Mapping[str, Any]) -> None:
        draws = rounding.get(DRAWS, 0)
        if not (isinstance(draws, int) or (isinstance(draws, torch.Tensor) and draws.numel() == 1)) or int(draws) < 0:
            raise ValueError(
                f"the optimizer state's state['booster']['masters']['rounding'][{DRAWS!r}] must be a number of steps, got "
                f"{draws!r}; delete it to round with new random numbers"
            )
        if not any(isinstance(form, Stochastic) for form in self._formats.values()):
            return
        for device, state in rounding.items():
            if device == DRAWS:
                continue
            try:
                torch.Generator(device).set_state(state)
            except (RuntimeError, TypeError, ValueError) as error:
                raise ValueError(
                    f"the optimizer state's random state of stochastic rounding on {device!r} is none of this machine "
                    f"({error}); delete state['booster']['masters']['rounding'] to round with new random numbers"
                ) from error

    def load_rounding(self, state: Mapping[str, Any]) -> None:
        """Continue the random numbers of stochastic rounding where `state` was written."""
        self.rng.resume(int(state.get("rounding", {}).get(DRAWS, self.rng.count)))
        for form in self._formats.values():
            if isinstance(form, Stochastic):
                for device, generator in state.get("rounding", {}).items():
                    if device == DRAWS:
                        continue
                    form.generator(torch.device(device)).set_state(generator)

    def restore_params(self) -> dict[torch.Tensor, torch.Tensor]:
        """Give the optimizer its states by parameter, as if it had been stepped on float32 ones; return the masters likewise.

        A bucket at a time, so that no more than one is there twice. This object is at its end.
        """
        self.register_params()
        self.sync()
        state: dict[Any, State] = self.optimizer.state
        values: dict[torch.Tensor, torch.Tensor] = {}
        states: dict[torch.Tensor, State] = {}
        while self.buckets:
            bucket = self.buckets.pop(0)
            if bucket.dtype in HALF_DTYPES:
                for piece, master in zip(bucket.pieces, bucket.pieces_of(bucket.joined()), strict=True):
                    if piece.param not in values:
                        values[piece.param] = torch.empty_like(piece.param, dtype=torch.float32).detach()
                    flat(local_shard(values[piece.param]))[piece.start : piece.stop] = master
            if bucket.whole:
                states |= {
                    piece.param: state.pop(handle)
                    for piece, handle in zip(bucket.pieces, bucket.handles, strict=True)
                    if handle in state
                }
            else:
                give_back(bucket, state.pop(bucket.handles[0], {}), states)
        self._layouts.clear()
        state.update(states)
        return values

    # ------------------------------------------------------------------ inside

    def _offloads(self, device: torch.device) -> bool:
        return self.options.offload and can_offload(device)

    def _host(self, device: torch.device) -> HostMemory | None:
        if not self._offloads(device):
            return None
        if device not in self.hosts:
            self.hosts[device] = HostMemory(device)
        return self.hosts[device]

    def _values_of(self, params: Mapping[torch.Tensor, Any]) -> dict[torch.Tensor, torch.Tensor]:
        pieces: dict[torch.Tensor, list[tuple[int, torch.Tensor]]] = {}
        for bucket in self.buckets:
            if any(piece.param in params for piece in bucket.pieces):
                for piece, master in zip(bucket.pieces, bucket.pieces_of(bucket.joined()), strict=True):
                    pieces.setdefault(piece.param, []).append((piece.start, master))
        values = {}
        for param in params:
            own = [master for _, master in sorted(pieces[param], key=lambda found: found[0])]
            layout = local_shard(param) if is_dtensor(param) else self._layouts[param]
            values[param] = around(shaped_like(own[0] if len(own) == 1 else torch.cat(own), layout), param)
        return values

    def _half_params(self) -> list[torch.Tensor]:
        """Return the parameters of the groups that have a place in a bucket, or would have if they were trained."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if self.may_have(p)]

    def _follow_layouts(self) -> None:
        """Lay masters and states anew in the memory order of their parameters."""
        for bucket in self.buckets:
            bucket.find_working()
        self.sync()
        state = self.optimizer.state
        states = state_of_params(self.buckets, state, self._layouts)
        values = self._values_of(self._layouts)
        for bucket in self.buckets:
            for handle in bucket.handles:
                state.pop(handle, None)
        self.rebuild(states, values)

    def rebuild(self, states: MutableMapping[Any, State], values: MutableMapping[torch.Tensor, torch.Tensor]) -> None:
        """Make buckets anew, of the parameters that are in `values`, which are their masters, and of their `states`."""
        held = [[p for p in group["params"] if p in values] for group in self.optimizer.param_groups]
        self.buckets, self._layouts = [], {}
        self.buckets = self._build(held, states, values)

    def _build(
        self,
        groups: list[list[torch.Tensor]],
        states: MutableMapping[Any, State],
        sources: MutableMapping[torch.Tensor, torch.Tensor],
    ) -> list[Bucket]:
        """Make the buckets. `states` and `sources` are emptied on the way: no more than a bucket of them is there twice."""
        total = sum(p.numel() for params in groups for p in params) + sum(b.size for b in self.buckets)
        laid: list[tuple[int, list[Piece], bool, HostMemory | None]] = []
        for index, params in enumerate(groups):
            alike: dict[Any, list[torch.Tensor]] = {}
            for param in params:
                if not is_dtensor(param) and not is_dense(param):  # torch leaves no gaps in parts of DTensors
                    param.data = param.detach().clone(memory_format=torch.contiguous_format)
                whole = self.kind != "elementwise" or param.dim() == 0
                kept = () if whole else signature(param, states.get(param))
                alike.setdefault((param.device, param.dtype, whole, kept), []).append(param)
                self._layouts[param] = torch.empty_strided(
                    param.shape, param.stride(), dtype=torch.float32, device="meta"
                )
            for (device, _, whole, _), several in alike.items():
                host = None if whole else self._host(device)
                packed = self.quantizer is not None or host is not None
                size = bucket_size(total, device, compiled=self._compiled, packed=packed, released=self.released)
                size = total if self.kind == "whole" else size
                lay = pack if whole else cut_apart if self.released else cut
                laid += [(index, pieces, whole, host) for pieces in _laid(lay, several, size)]
        last = {piece.param: place for place, (_, pieces, _, _) in enumerate(laid) for piece in pieces}
        buckets = []
        for place, (index, pieces, whole, host) in enumerate(laid):
            form = self._format(pieces[0].param.dtype)
            bucket = Bucket(index, pieces, form, whole=whole, quantizer=self.quantizer, host=host)
            buckets.append(bucket)
            if host is not None:
                host.keep_residual(bucket)
            self.optimizer.state.update(state_of_bucket(bucket, states))
            here = bucket.host is None and bucket.residual is not None and bucket.residual.dtype == torch.float32
            values: torch.Tensor = bucket.residual if here else bucket.scratch()  # type: ignore[assignment]
            found = [
                flat_like(local_shard(sources.get(piece.param, piece.param)).detach(), local_shard(piece.param))[
                    piece.start : piece.stop
                ]
                for piece in bucket.pieces
            ]
            torch._foreach_copy_(bucket.pieces_of(values), found)
            values.masked_fill_(values.isnan(), math.nan)  # see `rounding.plain_nan_`
            # A master made of its weight rounds to it. With released gradients that is between forward and backward.
            own = not any(piece.param in sources for piece in bucket.pieces)
            with of_same_version([local_shard(p) for p in bucket.params]) if own else nullcontext():
                bucket.save(values, bucket.scratch())
            if bucket.host is not None:
                bucket.host.keep_states(bucket, self.optimizer.state)
            for param in bucket.params:
                if last[param] == place:
                    states.pop(param, None)
                    sources.pop(param, None)
        return buckets

    def _format(self, dtype: torch.dtype) -> Format:
        if dtype not in self._formats:
            made = self.options.make_format(self.optimizer, dtype, self.rng)
            self._formats[dtype] = compiled_format(made) if self._compiled else made
        return self._formats[dtype]

    def name_of(self, param: torch.Tensor) -> str:
        """What `param` is called in states and messages."""
        if param in self.names:
            return self.names[param]
        return next(
            name_of_stranger(index, place)
            for index, group in enumerate(self.optimizer.param_groups)
            for place, own in enumerate(group["params"])
            if own is param
        )

    @contextmanager
    def _replaced(self, replacements: Weights) -> Iterator[None]:
        lists: list[list[torch.Tensor]] = [group["params"] for group in self.optimizer.param_groups]
        before = [list(params) for params in lists]
        for params in lists:
            params[:] = [replacements.get(p, p) for p in params]
        try:
            yield
        finally:
            for params, old in zip(lists, before, strict=True):
                params[:] = old


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _laid(lay: Callable[..., list[list[Piece]]], params: Sequence[torch.Tensor], size: int) -> list[list[Piece]]:
    """`lay` for `params` of which this rank may hold parts: a piece is of what it holds."""
    if not any(map(is_dtensor, params)):
        return lay(params, size)
    of_part = {local_shard(param): param for param in params}
    return [[replace(piece, param=of_part[piece.param]) for piece in pieces] for pieces in lay(of_part, size)]
