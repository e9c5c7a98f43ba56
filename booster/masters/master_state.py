"""What a checkpoint keeps of an optimizer with master weights: masters by name, states in the shapes of parameters, `rng`.

Float32 weights that `load_state_dict` of a model brought for half-precision parameters wait here until their masters take them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import nn

from booster.masters.bucket import Bucket
from booster.masters.formats import Split24, Stochastic
from booster.masters.masters import Masters, Weights, has_half_elements, replaced_params
from booster.masters.rounding import rounded
from booster.masters.states import (
    Places,
    StateView,
    copy_masters,
    give_back,
    places_of,
    state_of_bucket,
    state_of_params,
)
from booster.model.modules import parameter_names
from booster.model.optimizers import lies_flat, load_states
from booster.model.params import is_dtensor, params_of
from booster.shards import Shards
from booster.shards.base import State
from booster.tensors.trees import HALF_DTYPES
from booster.update.context import Fill, OptimizerState, UpdateContext
from booster.update.state_dict import IN_MODEL

FULL_DTYPES = (torch.float32, torch.float64)


class LoadedWeights:
    """What `load_state_dict` of one model brought in float32 for half parameters, until their masters take it over.

    A hook of the model's load, which rounds them to half precision as a step does. Torch's cast rounds ties otherwise, and
    ranks of ZeRO, each with a shard of the masters, would come to disagree. Float32 weights that half precision holds exactly,
    all of them, are half-precision weights in a float32 file, and say nothing new of masters.

    Attributes:
        values: by parameter name, until a master takes them.
        given: names of the parameters that the last load gave float32 values.
    """

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.given: set[str] = set()
        self._wanted: set[str] = set()

    @classmethod
    def of(cls, model: nn.Module, names: Iterable[str]) -> LoadedWeights:
        """Return that of `model`, which from now on also keeps what is loaded into the parameters `names`."""
        found = cls.in_hooks_of(model)
        if found is None:
            found = cls()
            model.register_load_state_dict_pre_hook(found)
        found._wanted |= set(names)
        return found

    @classmethod
    def names_with_masters(cls, model: nn.Module) -> set[str]:
        """Return all names of the parameters of `model` that have masters, which take over what is loaded."""
        found = cls.in_hooks_of(model)
        return set() if found is None else {name for names in found._names(model).values() for name in names}

    @classmethod
    def in_hooks_of(cls, model: nn.Module) -> LoadedWeights | None:
        """Return that of `model`; None where nothing watches its loads."""
        hooks = (getattr(hook, "hook", None) for hook in model._load_state_dict_pre_hooks.values())
        return next((hook for hook in hooks if isinstance(hook, cls)), None)

    def _names(self, model: nn.Module) -> dict[str, list[str]]:
        """Return all names in `model` of each parameter of interest, by the name that masters know."""
        return {name: names for names in parameter_names(model).values() for name in names if name in self._wanted}

    def pop(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the values for `names`, and forget them."""
        return {name: self.values.pop(name) for name in names if name in self.values}

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        params = dict(module.named_parameters(remove_duplicate=False))
        brought: dict[str, torch.Tensor] = {}
        for name, names in self._names(module).items():
            param, given = (
                params[name],
                [key for key in names if isinstance(state_dict.get(prefix + key), torch.Tensor)],
            )
            if not given:
                continue
            self.values.pop(name, None)
            self.given.discard(name)
            for key in given:  # in the order in which torch copies them: the last one counts
                value = state_dict[prefix + key]
                if value.dtype in FULL_DTYPES and value.shape == param.shape:
                    brought[name] = value.detach()
                    if not is_dtensor(value):
                        # This is the load's own dict, not the user's.
                        state_dict[prefix + key] = rounded(brought[name], param.dtype)
        self.given |= brought.keys()
        # All or none: a float32 file of half-precision weights has some exact ones by coincidence.
        if not all(holds(value, params[name].dtype) for name, value in brought.items()):
            self.values |= brought


def holds(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether every element of `value`, or of this rank's shard of it, is a number of `dtype`."""
    local: Any = value.to_local() if is_dtensor(value) else value  # type: ignore[attr-defined]
    return torch.equal(local, local.to(dtype).to(local.dtype))


def adopt_loaded(
    loaded: LoadedWeights, half_names: list[str], names: Mapping[Any, str], shards: Shards, masters: Masters
) -> Weights:
    """Take what was loaded for `half_names`, by parameter of `masters`, which hold this."""
    if not loaded.values:
        return {}
    params = {names[param]: param for param in masters.layouts if param in names}
    values = shards.states.of_weights(shards.states.local, loaded.pop(half_names), names)
    return {params[name]: value for name, value in values.items() if name in params}


DRAWS = "draws"  # key in a checkpoint: how many steps were rounded stochastically


class MasterState(OptimizerState):
    """The masters of half-precision parameters, and the optimizer's state, which buckets hold.

    A checkpoint has neither buckets nor handles: states and masters are saved by parameter, in its shape, so that a run with
    other buckets, ranks or forms of masters loads them.
    """

    has_masters = True

    def __init__(self, context: UpdateContext, masters: Masters) -> None:
        super().__init__(context)
        self.masters = masters
        self._loaded = LoadedWeights()
        self._half_names: list[str] = []
        self._places: Places = {}  # of the buckets in `_placed`
        self._placed: list[Bucket] = []

    @property
    def state(self) -> Any:
        masters = self.masters
        if self._placed is not masters.buckets:
            self._placed, self._places = masters.buckets, places_of(masters.buckets)
        masters.sync()
        view = StateView(
            self._places, self.optimizer.state, masters.layouts, put=self._put_state, steps=lambda: masters.rng.count
        )
        return self.shards.states.view_state(view)

    def _put_state(self, param: torch.Tensor, own: State | None) -> None:
        """Make `own` the state of `param`, which is in a bucket; None: it has none. Buckets are made anew where `param` can
        share none any longer. Raises ValueError for a tensor that is neither a number nor of the shape of `param`."""
        with self.shards.local():  # in which groups hold the shards that have masters
            wrong = {
                key: tuple(value.shape)
                for key, value in (own or {}).items()
                if lies_flat(self.masters.optimizer) and isinstance(value, torch.Tensor) and value.numel() != 1
                if value.shape != self.masters.layouts[param].shape
            }
            if wrong:
                raise ValueError(
                    f"the state of a parameter of shape {tuple(param.shape)} was given tensors of shapes {wrong}; those of "
                    "this optimizer have its shape, or are one number"
                )
            state = self.optimizer.state
            # A bucket has one history for all: where this one differs the buckets are made anew.
            states = dict(self._state_by_param())
            if own is None:
                states.pop(param, None)
            else:
                states[param] = dict(own)
            states = {p: each for p, each in states.items() if p in self.masters.layouts}
            holds = [bucket for bucket in self.masters.buckets if any(each is param for each in bucket.params)]
            if not self.masters.fits_buckets(states):
                # Flat ones are views of what is emptied on the way.
                states = {
                    p: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in each.items()}
                    for p, each in states.items()
                }
                values = {p: value.clone() for p, value in self.masters.values().items()}
                self.masters.rebuild(states, values)
                return
            for bucket in holds:
                for handle, piece in zip(bucket.handles, bucket.pieces, strict=bucket.whole):
                    if not bucket.whole or piece.param is param:
                        state.pop(handle, None)
                made = state_of_bucket(bucket, states)
                state.update(made if not bucket.whole else {h: s for h, s in made.items() if h not in state})
                if bucket.host is not None:
                    bucket.host.keep_states(bucket, state)

    def _state_by_param(self) -> defaultdict[Any, State]:
        """Return the optimizer's state by working parameter, in shapes of the parameters, on the host where it is kept there.

        Do not write to it."""
        # States may be on their way to the host.
        self.masters.sync()
        handles = {handle for bucket in self.masters.buckets for handle in bucket.handles}
        states = {key: value for key, value in self.optimizer.state.items() if key not in handles}
        states |= state_of_params(self.masters.buckets, self.optimizer.state, self.masters.layouts)
        # In one order on all ranks, which have other buckets: who gathers parts of states does so one after another.
        params = (param for param in params_of(self.optimizer) if param in states)
        return defaultdict(dict, {param: states[param] for param in params} | states)

    def has_master(self, param: torch.Tensor) -> bool:
        return param.requires_grad and has_half_elements(param)

    def loads_without_copy(self, param: torch.Tensor) -> bool:
        return not self.masters.may_have(param) and super().loads_without_copy(param)

    def can_be_filled(self, param: torch.Tensor) -> bool:
        own = self.masters.may_have(param) and param.requires_grad and param.dim() > 0
        return own and self.masters.granularity == "elementwise" and super().loads_without_copy(param)

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        optimizer = self.optimizer
        own, optimizer.state = optimizer.state, self._state_by_param()
        try:
            state_dict = optimizer.state_dict()  # as if it had been stepped on float32 parameters
        finally:
            optimizer.state = own
        return state_dict, {"masters": self._masters_dict()}

    def _masters_dict(self) -> dict[str, Any]:
        """Return the masters by parameter name, where they are more than the weights; and the state of stochastic rounding."""
        self.masters.register_params()
        weights: dict[torch.Tensor, torch.Tensor] = {}
        for bucket in self.masters.buckets:
            if bucket.residual is not None:
                copy_masters(bucket, bucket.masters(), weights)
        state: dict[str, Any] = {"weights": {self.masters.name_of(p): whole for p, whole in weights.items()}}
        rounding = self.rounding_state()
        return state | ({"rounding": rounding} if rounding else {})

    def rounding_state(self) -> dict[str, Any]:
        """Return the random state of stochastic rounding; empty where nothing is rounded so."""
        generators: dict[str, Any] = {
            str(device): generator.get_state()
            for form in self.masters.formats.values()
            if isinstance(form, Stochastic)
            for device, generator in form.generators.items()
        }
        if self.masters.quantizer is not None or any(
            isinstance(form, Split24) for form in self.masters.formats.values()
        ):
            generators[DRAWS] = torch.tensor(self.masters.rng.count, dtype=torch.int64)
        return generators

    def weights_in_model(self) -> list[str]:
        return [name for name, param in self._named().items() if param.requires_grad and param.dtype in FULL_DTYPES]

    def master_tensors(self) -> list[torch.Tensor]:
        return [bucket.residual for bucket in self.masters.buckets if bucket.residual is not None]

    def scratch_tensors(self) -> list[torch.Tensor]:
        return [] if self.masters.scratch is None else self.masters.scratch.tensors()

    def wait_for_copies(self) -> None:
        self.masters.sync()

    def restore_params(self) -> dict[torch.Tensor, torch.Tensor]:
        """Give the optimizer its states by parameter, as if it had stepped float32 ones; return the masters likewise."""
        self.masters.register_params()
        self.masters.sync()
        state: dict[Any, State] = self.optimizer.state
        values: dict[torch.Tensor, torch.Tensor] = {}
        states: dict[torch.Tensor, State] = {}
        # A bucket at a time, so that no more than one is there twice.
        # This object is at its end: buckets are taken out as they are given back.
        buckets, self.masters.buckets = self.masters.buckets, []
        self._places, self._placed = {}, self.masters.buckets
        while buckets:
            bucket = buckets.pop(0)
            if bucket.dtype in HALF_DTYPES:
                copy_masters(bucket, bucket.masters(), values)
            if bucket.whole:
                states |= {
                    piece.param: state.pop(handle)
                    for piece, handle in zip(bucket.pieces, bucket.handles, strict=True)
                    if handle in state
                }
            else:
                give_back(bucket, state.pop(bucket.handles[0], {}), states)
        self.masters.layouts.clear()
        state.update(states)
        return values

    # ------------------------------------------------------------------ loading

    def attach(self, model: nn.Module) -> None:
        self._half_names = [name for name, param in self._named().items() if param.dtype in HALF_DTYPES]
        self._loaded = LoadedWeights.of(model, self._half_names)
        self.masters.loaded_weights = partial(adopt_loaded, self._loaded, self._half_names, self.names, self.shards)

    def adopt_loaded(self) -> None:
        if self._loaded.values:
            self.masters.register_params()

    def read_masters(self, masters: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[torch.Tensor, torch.Tensor]]:
        params, weights = self._named(), masters["weights"]
        with_master = {name for name, param in params.items() if self.has_master(param)}
        lost = sorted((with_master & set(masters.get(IN_MODEL, ()))) - weights.keys() - self._loaded.given)
        if lost:
            raise ValueError(
                "the optimizer state was written where float32 weights are those of the model, as under TorchFSDPPlugin, and "
                f"this model keeps half ones: {len(lost)} parameters, such as {lost[:4]}, were not given float32 weights. Call "
                "model.load_state_dict with the float32 weights of that run first, then optimizer.load_state_dict; or delete "
                "state['booster']['masters'] to go on from the rounded weights"
            )
        own = {name for name, param in params.items() if name in weights and param.dtype in FULL_DTYPES}
        for name in own:
            if weights[name].shape != params[name].shape:
                raise ValueError(
                    f"the optimizer state's master of {name} has shape {tuple(weights[name].shape)}, and the parameter "
                    f"{tuple(params[name].shape)}. Nothing was loaded"
                )
        residual = {name: weight for name, weight in weights.items() if name not in own}
        return {**masters, "weights": residual}, {params[name]: weights[name] for name in own}

    def _named(self) -> dict[str, torch.Tensor]:
        held = params_of(self.optimizer)
        return {self.names[param]: param for param in held if param in self.names}

    def read_state_dict(
        self, state_dict: dict[str, Any], own: Mapping[str, Any], fill: Fill | None = None
    ) -> Callable[[], None]:
        saved = own.get("masters")
        self.masters.register_params()
        weights = {} if saved is None else self._read_weights(saved)
        if fill is not None:
            fill.before = self.optimizer.state
        states = self._read_states(state_dict, fill)
        rounding = None if saved is None else saved.get("rounding", {})

        def adopt() -> None:
            self.masters.register_params()  # weights that were loaded since
            self._adopt(states, weights, fill)
            if rounding is not None:
                self.load_rounding(rounding)

        return adopt

    def _read_states(self, state_dict: dict[str, Any], fill: Fill | None) -> dict[torch.Tensor, State]:
        """Load torch's state dict into the optimizer, but for the state of half parameters, which is returned.

        Only containers of the optimizer change.
        """
        optimizer = self.optimizer
        # Torch casts state to the dtype of the parameter that it belongs to.
        proxies = {
            p: nn.Parameter(
                torch.zeros(
                    (),
                    dtype=torch.float32,
                    device="cpu" if self.masters.offloads(p.device) else p.device,
                    # Without memory: torch looks at dtype, device and shape alone.
                ).expand(p.shape)
            )
            for p in self._params_with_masters()
        }
        optimizer.state = defaultdict(dict)
        late: dict[Any, State] = {}
        if fill is not None:  # what has no numbers yet torch could not cast
            given = state_dict["state"]
            late = {
                key: {name: value for name, value in own.items() if getattr(value, "is_meta", False)}
                for key, own in given.items()
            }
            early = {key: {name: own[name] for name in own.keys() - late[key].keys()} for key, own in given.items()}
            state_dict = {**state_dict, "state": early}
        # Masters and handles stay.
        with replaced_params(optimizer, proxies):
            load_states(optimizer, state_dict)
        held = params_of(optimizer)
        return {
            param: optimizer.state.pop(proxies[param]) | late.get(index, {})
            for index, param in enumerate(held)
            if param in proxies and proxies[param] in optimizer.state
        }

    def _params_with_masters(self) -> list[torch.Tensor]:
        """Return the parameters of the groups that have a place in a bucket, or would have if they were trained."""
        return [p for p in params_of(self.optimizer) if self.masters.may_have(p)]

    def _adopt(self, states: MutableMapping[torch.Tensor, State], masters: Weights, fill: Fill | None) -> None:
        """Make these the states and masters of half parameters; masters that are not given stay as they are."""
        # Where none are given, buckets stay as they are laid, unless their parameters come with different histories.
        if not masters and self.masters.fits_buckets(states):
            self.masters.sync()
            for bucket in self.masters.buckets:
                self.optimizer.state.update(state_of_bucket(bucket, states, fill))
                if bucket.host is not None:
                    bucket.host.keep_states(bucket, self.optimizer.state)
            self.optimizer.state.update({p: own for p, own in states.items() if p not in self.masters.layouts})
            return
        # Of a parameter that was frozen since: kept for the day when it is not, while its weights stay what they are.
        frozen = [(p, p.detach().clone()) for p in masters if p not in self.masters.layouts]
        kept = {} if self.masters.layouts.keys() <= masters.keys() else self.masters.values()
        self._places, self._placed = {}, []  # which would keep the buckets of before
        self.masters.rebuild(states, {**kept, **masters}, fill)
        for param, weights in frozen:
            param.detach().copy_(weights)
        self.optimizer.state.update({p: own for p, own in states.items() if p not in self.masters.layouts})

    def _read_weights(self, state: Mapping[str, Any]) -> Weights:
        """Return the weights in `state`, by parameter. Raises ValueError, nothing changed, if they cannot be masters here."""
        # A rank may have none of a weight.
        weights = {name: weight for name, weight in state["weights"].items() if weight.numel()}
        rounding = state.get("rounding", {})
        params = {self.masters.name_of(p): p for p in self._params_with_masters()}
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
        if not any(isinstance(form, Stochastic) for form in self.masters.formats.values()):
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
        self.masters.rng.resume(int(state.get(DRAWS, self.masters.rng.count)))
        for form in self.masters.formats.values():
            if isinstance(form, Stochastic):
                for device, generator in state.items():
                    if device != DRAWS:
                        form.generator(torch.device(device)).set_state(generator)
