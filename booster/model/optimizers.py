"""What is known of optimizers, by exact type: one row each for those of torch, and what users register; and their states.

To teach the library another optimizer of torch: a row of `OPTIMIZERS`. States are loaded without rounding, compared before they
are loaded, and restored after trial steps.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Number
from types import CodeType, ModuleType
from typing import Any, Literal

import torch
from torch import nn, optim
from torch.optim import Optimizer

from booster.common import arguments

Granularity = Literal["elementwise", "per tensor", "whole"]
Sign = Literal["signed", "unsigned", "fp32"]
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class OptimizerInfo:
    """A row: what is known of one optimizer.

    Attributes:
        granularity: see `granularity_of`.
        states: its states of the parameter's shape. In few bits a state is "signed", "unsigned", or stays "fp32".
        options: states that exist only under an option of a group: the state, by the option.
        counts: its states that are one number, a count or something computed from counts.
        shapes: shapes of its other states, from the shape of the parameter.
        made_at_once: its constructor makes the states, and in torch 2.11 nothing else does.
        reads_all: a step reads all states if any exists; SGD makes the momentum that it does not find.
        kernel: torch's fused kernel.
        takes_sparse: it takes sparse gradients, which no kernel does.
        takes_dtensors: it steps DTensors rightly although it needs unsharded tensors.
    """

    granularity: Granularity = "elementwise"
    states: Mapping[str, Sign] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    counts: tuple[str, ...] = ("step",)
    shapes: Callable[[Shape], Mapping[str, Shape]] = lambda whole: {}
    made_at_once: bool = False
    reads_all: bool = True
    kernel: str | None = None
    takes_sparse: bool = False
    takes_dtensors: bool = False

    def read(self, group: Mapping[str, object]) -> set[str]:
        """Names of what a step reads of the state of a parameter in `group`."""
        absent = {state for option, state in self.options.items() if not group.get(option)}
        return {*self.counts, *self.states} - absent


def _adam(kernel: str) -> OptimizerInfo:
    moments: dict[str, Sign] = {"exp_avg": "signed", "exp_avg_sq": "unsigned", "max_exp_avg_sq": "unsigned"}
    return OptimizerInfo(states=moments, options={"amsgrad": "max_exp_avg_sq"}, kernel=kernel)


def _factored(whole: Shape) -> dict[str, Shape]:
    return {"row_var": (*whole[:-1], 1), "col_var": (*whole[:-2], 1, *whole[-1:]), "variance": whole}


OPTIMIZERS: Mapping[type[Optimizer], OptimizerInfo] = {
    optim.Adam: _adam("aten::_fused_adam_"),
    optim.AdamW: _adam("aten::_fused_adamw_"),
    optim.SGD: OptimizerInfo(
        states={"momentum_buffer": "signed"},
        options={"momentum": "momentum_buffer"},
        counts=(),
        reads_all=False,
        kernel="aten::_fused_sgd_",
        takes_sparse=True,
    ),
    optim.Adagrad: OptimizerInfo(
        states={"sum": "unsigned"}, kernel="aten::_fused_adagrad_", takes_sparse=True, made_at_once=True
    ),
    optim.RMSprop: OptimizerInfo(
        states={"square_avg": "unsigned", "momentum_buffer": "signed", "grad_avg": "fp32"},
        options={"momentum": "momentum_buffer", "centered": "grad_avg"},
    ),
    optim.Adadelta: OptimizerInfo(states={"square_avg": "unsigned", "acc_delta": "unsigned"}),
    optim.Adamax: OptimizerInfo(states={"exp_avg": "signed", "exp_inf": "unsigned"}),
    optim.NAdam: OptimizerInfo(states={"exp_avg": "signed", "exp_avg_sq": "unsigned"}, counts=("step", "mu_product")),
    optim.RAdam: OptimizerInfo(states={"exp_avg": "signed", "exp_avg_sq": "unsigned"}),
    # An average of weights, which somebody will use as weights.
    optim.ASGD: OptimizerInfo(states={"ax": "fp32"}, counts=("step", "eta", "mu")),
    optim.Rprop: OptimizerInfo(states={"prev": "signed", "step_size": "unsigned"}),
    optim.Adafactor: OptimizerInfo(granularity="per tensor", shapes=_factored, reads_all=False),
    optim.Muon: OptimizerInfo(
        granularity="per tensor", states={"momentum_buffer": "signed"}, counts=(), reads_all=False, takes_dtensors=True
    ),
}
UNKNOWN_OPTIMIZER = OptimizerInfo(granularity="whole", counts=(), reads_all=False)

RuleOf = Literal["lion"] | Callable[[type[Optimizer]], object]
"""How kernels step a class: the name of a rule, or a function that makes one; see `booster/kernels/rules`."""

_registered: dict[type[Optimizer], tuple[Mapping[str, Sign], RuleOf | None]] = {}
_SIGNS = ("signed", "unsigned", "fp32")


def info_of(optimizer: Optimizer) -> OptimizerInfo:
    """The row of `optimizer`; `UNKNOWN_OPTIMIZER` for what is not torch's."""
    return OPTIMIZERS.get(type(optimizer), UNKNOWN_OPTIMIZER)


def makes_missing_states(cls: type[Optimizer]) -> bool:
    """Whether a step of `cls` gives a state to a parameter that has none, as it does but for Adagrad in torch 2.11."""
    return not OPTIMIZERS.get(cls, UNKNOWN_OPTIMIZER).made_at_once or _adagrad_makes_missing_states()


@functools.cache
def _adagrad_makes_missing_states() -> bool:
    # Found by a try: no attribute of torch says it.
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    weight.grad = torch.zeros_like(weight)
    optimizer = optim.Adagrad([weight])
    optimizer.state.clear()
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


def register_elementwise(
    cls: type[Optimizer], *, states: Mapping[str, Sign] | None = None, rule: RuleOf | None = None
) -> type[Optimizer]:
    """Declare that `cls` treats every element of every parameter by itself; usable as a class decorator.

    The promise: splitting a parameter, or joining several of one group, leaves the update of each element as it was, and
    all state is either of the parameter's shape or the same for every element. Optimizers that take norms, sort,
    factorise or look at another parameter must not be registered. The class counts exactly, not its subclasses. What is said
    of its step holds for its other methods where ranks hold shards, as each sees this rank's part.

    A step may be made in parts. What it counts in its group, as a number, in a tensor or container in place, or in a number of
    the optimizer itself, is put back before the next part, so that it counts once.

    states: of states that are kept in few bits (`states="8bit"`), by name: "signed"; "unsigned", which is never negative; or
    "fp32", which stays float32, as an average of weights should. Those not named, with None all, are found by trial steps, in
    which what stays near the weights is taken for an average of them.

    rule: how Triton kernels step it on a GPU. "lion", for a class with lr, betas and a decoupled weight_decay in its groups, as
    lion-pytorch's; or a function that is given `cls` and returns its `booster.kernels.rule.Rule`, called where kernels are
    asked for, so that only there Triton is imported. With None kernels know no rule for it, and its own `step` is called.
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise TypeError(
            f"register_elementwise needs a subclass of torch.optim.Optimizer as cls, got {arguments.described(cls)}"
        )
    if states is not None and not isinstance(states, Mapping):
        raise TypeError(
            f"states must be a mapping of names of states to one of {list(_SIGNS)}, or None, got {arguments.described(states)}"
        )
    for name, sign in (states or {}).items():
        if not isinstance(name, str):
            raise TypeError(
                f"states names a state by {arguments.described(name)}; names are strings, such as 'exp_avg'"
            )
        arguments.choice(f"states[{name!r}]", sign, _SIGNS)
    if not (rule is None or rule == "lion" or (callable(rule) and not isinstance(rule, type))):
        raise TypeError(
            f"rule must be 'lion', a function that is given {cls.__name__} and returns a booster.kernels.rule.Rule, or None, "
            f"got {arguments.described(rule)}"
        )
    _registered[cls] = dict(states or {}), rule
    return cls


def declared_states(cls: type[Optimizer]) -> Mapping[str, Sign]:
    """Return the states of `cls` that `register_elementwise` was given."""
    return _registered[cls][0] if cls in _registered else {}


def declared_rule(cls: type[Optimizer]) -> RuleOf | None:
    """Return the rule for `cls` that `register_elementwise` was given."""
    return _registered[cls][1] if cls in _registered else None


def not_elementwise(optimizer: Optimizer, would: str, otherwise: str) -> str:
    """Return the refusal of an optimizer of the kind "whole" where only single elements, or tensors, can be stepped.

    otherwise: what to do if it does look at more than one element.
    """
    name = type(optimizer).__name__
    return (
        f"{name} {would}, and is not known to treat every element by itself; if it does, call "
        f"booster.register_elementwise({name}) before boost(), otherwise {otherwise}"
    )


def check_attributes(optimizer: Optimizer, params: Iterable[torch.Tensor], would: str) -> None:
    """Raise ValueError if `params` have attributes that the class of `optimizer` names: a tensor in their place has none; or if
    its states are shared with another optimizer, so that they cannot be replaced.

    would: what would happen to the optimizer, a predicate. torch's own optimizers name none."""
    _check_states(optimizer, would)
    attributes = {name for param in params if type(param) is nn.Parameter for name in vars(param)}
    if not attributes:
        return
    # Attributes are found by name in the code of the class: running it could have side effects.
    own = [cls for cls in type(optimizer).__mro__ if not f"{cls.__module__}.".startswith(("torch.", "builtins."))]
    named: set[str] = set()
    for cls in own:
        for value in vars(cls).values():
            # A property, and a method that torch's profiling wraps, are looked into as well.
            function = inspect.unwrap(getattr(value, "fget", value) or value)
            if code := getattr(function, "__code__", None):
                named |= _names_in(code)
    if kept := sorted(attributes & named):
        raise ValueError(
            f"{type(optimizer).__name__} works with {kept}, attributes of its parameters, and {would}, which have no such "
            "attributes; use mixed_precision='fp32', 'bf16' or 'fp16' on one device or with TorchDDPPlugin, or keep such "
            "values in the optimizer's state or groups"
        )


def has_torch_form(state_dict: Mapping[str, Any]) -> bool:
    """Return whether a state dict has what torch's have: groups, and states of their parameters."""
    return state_dict.keys() >= {"state", "param_groups"} and isinstance(state_dict["state"], Mapping)


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that `optimizer` is put around, by its attributes that have them."""
    return {name: each for name, each in vars(optimizer).items() if isinstance(each, Optimizer)}


def _check_states(optimizer: Optimizer, would: str) -> None:
    own, inner = type(optimizer), inner_optimizers(optimizer)
    state = inspect.getattr_static(own, "state", None)
    is_read_only = isinstance(state, property) and state.fset is None
    # One dict for both is fine: the inner optimizer finds the states of the new parameters there, too.
    apart = [name for name, each in inner.items() if is_read_only or each.state is not optimizer.state]
    if apart:
        base = type(inner[apart[0]]).__name__
        what = f"is put around another optimizer, {base}, with states apart"
        cure = f"Give boost() the {base} itself, or have both share one dict (self.state = self.{apart[0]}.state)"
    elif own.state_dict is not Optimizer.state_dict and not has_torch_form(optimizer.state_dict()):
        what, cure = "writes a state_dict() in its own form", "Use an optimizer that writes torch's"
    else:
        return
    raise ValueError(
        f"for its parameters, {own.__name__} {would}; but it {what}, and no checkpoint could know to which parameters its "
        f"states belong. {cure}; or use mixed_precision='fp32', 'bf16' or 'fp16' on one device or with TorchDDPPlugin, where "
        "what it writes is kept as it is"
    )


def _names_in(code: CodeType) -> set[str]:
    """Return names of attributes in `code`, and strings, which `getattr` may be given."""
    names = set(code.co_names)
    for value in code.co_consts:
        names |= _names_in(value) if isinstance(value, CodeType) else {value} if isinstance(value, str) else set()
    return names


def granularity_of(optimizer: Optimizer) -> Granularity:
    """ "elementwise": may be stepped on flat buckets; "per tensor": on some whole tensors at a time; "whole": neither."""
    return "elementwise" if type(optimizer) in _registered else info_of(optimizer).granularity


def lies_flat(optimizer: Optimizer) -> bool:
    """Whether masters and states may be in flat buckets; where it is not elementwise, it is stepped on views of them."""
    return granularity_of(optimizer) == "elementwise" or (
        info_of(optimizer).granularity == "per tensor" and bool(info_of(optimizer).states)
    )


def state_differences(where: str, now: Any, given: Any, legal: Any = ...) -> Iterator[str]:
    """Yield where `given` is of another kind than `now`. Numbers are one kind, and 0-dim tensors are numbers.

    legal: another legal value, such as the default of an option; None makes None legal.
    """
    # So a state that would load, and fail in the first step, is refused before.
    # What is None now, or of no plain kind, may become anything.
    if now is None or (given is None and legal is None):
        return
    if isinstance(now, (list, tuple)):
        if not isinstance(given, (list, tuple)):
            yield f"{where} is {_shown(given)}, and {_shown(now)} here"
            return
        for index, (one, other) in enumerate(zip(now, given, strict=False)):
            own = legal[index] if isinstance(legal, (list, tuple)) and index < len(legal) else ...
            yield from state_differences(f"{where}[{index}]", one, other, own)
        return
    if isinstance(now, Counter):
        fits = isinstance(given, Mapping) and all(type(n) is int for pair in given.items() for n in pair)
    elif isinstance(now, Mapping):
        fits = isinstance(given, Mapping)
        if isinstance(given, Mapping):
            yield from entry_differences(where, now, given)
    elif isinstance(now, str):
        fits = isinstance(given, str)
    elif isinstance(now, bool):  # before numbers, which bool is one of
        fits = isinstance(given, bool)
    elif _is_numeric(now):
        fits = _is_numeric(given)
    else:
        return
    if not fits:
        yield f"{where} is {_shown(given)}, and {_shown(now)} here"


def entry_differences(where: str, now: Mapping[Any, Any], given: Mapping[Any, Any]) -> Iterator[str]:
    """Yield which entries of `given` are of another kind than those of `now`, and which names differ."""
    missing, unknown = (
        {str(k) for k in a.keys() - b.keys() if str(k)[:1] != "_"} for a, b in ((now, given), (given, now))
    )
    # Torch adds an attribute to a scheduler from version to version.
    if len(missing) + len(unknown) > 1:
        yield f"{where} has {sorted(unknown)[:6]} and lacks {sorted(missing)[:6]}, as that of another class"
    for name in now.keys() & given.keys():
        yield from state_differences(f"{where}[{name!r}]", now[name], given[name])


def _is_numeric(value: Any) -> bool:
    return isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"of type {type(value).__name__}"


def probe_of(optimizer: Optimizer, group: Mapping[str, object], weights: torch.Tensor) -> Optimizer:
    """Return an optimizer like `optimizer`, of the options of `group`, that steps `weights` alone and has no states yet."""
    # Not by its constructor, which may want arguments that are not known here.
    probe = object.__new__(type(optimizer))
    vars(probe).update({name: copy.copy(value) for name, value in vars(optimizer).items()})
    probe.state = defaultdict(dict)
    probe.param_groups = [{**group, "params": [weights]}]
    row = next((OPTIMIZERS[cls] for cls in type(optimizer).__mro__ if cls in OPTIMIZERS), UNKNOWN_OPTIMIZER)
    if row.made_at_once:
        counts = {name: torch.zeros((), dtype=torch.float32) for name in row.counts}
        probe.state[weights] = {**counts, **{name: torch.zeros_like(weights) for name in row.states}}
    return probe


def snapshot_entries(optimizer: Optimizer, group: Any) -> Callable[[], None]:
    """Return a function that restores, in place, the entries of `group`, the numbers that are attributes of `optimizer`, and
    what its state holds under names that it chose."""
    # The parameters of the group stay as they are then.
    entries = {key: value for key, value in group.items() if key != "params"}
    numbers = {key: value for key, value in vars(optimizer).items() if _has_one_value(value)}
    named = {key: optimizer.state[key] for key in _own_names(optimizer)}
    held: list[Callable[[], Any]] = []
    _collect([*entries.values(), *numbers.values(), *named.values()], held, set())

    def back() -> None:
        for key in group.keys() - entries.keys() - {"params"}:  # entries that the trial added
            del group[key]
        for key in _own_names(optimizer) - named.keys():
            del optimizer.state[key]
        group.update(entries)
        optimizer.state.update(named)
        vars(optimizer).update(numbers)
        for each in held:
            each()

    return back


def _own_names(optimizer: Optimizer) -> set[Any]:
    return {key for key in optimizer.state if not isinstance(key, torch.Tensor)}


def _has_one_value(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


@contextmanager
def restored_afterwards(optimizer: Optimizer, group: Mapping[str, object]) -> Iterator[None]:
    """Return a context after which `group` and the numbers of `optimizer` are restored; for trial steps of a copy of it."""
    back = snapshot_entries(optimizer, group)
    try:
        yield
    finally:
        back()


# They do not belong to a value that holds them, nor do functions.
_NOT_OWN = (nn.Parameter, nn.Module, Optimizer, ModuleType, type, torch.dtype, torch.device)


def _collect(value: Any, backs: list[Callable[[], Any]], seen: set[int]) -> None:
    """Add to `backs` what restores, in place, the tensors, containers, random generators and attributes that `value` holds."""
    if isinstance(value, _NOT_OWN) or id(value) in seen:
        return
    seen.add(id(value))
    held: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        backs.append(functools.partial(value.detach().copy_, value.detach().clone()))
    elif isinstance(value, torch.Generator):
        backs.append(functools.partial(value.set_state, value.get_state()))
    elif isinstance(value, (dict, set)):
        backs += [value.clear, functools.partial(value.update, copy.copy(value))]
        held = value.values() if isinstance(value, dict) else ()
    elif isinstance(value, (list, deque)):
        backs += [value.clear, functools.partial(value.extend, copy.copy(value))]
        held = value
    elif isinstance(value, tuple):
        held = value
    elif hasattr(value, "__dict__") and not hasattr(value, "__get__"):  # no function
        held = (vars(value),)
    for each in held:
        _collect(each, backs, seen)


def load_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Run `optimizer.load_state_dict`, then give back what torch casts to the dtype of a parameter and is no moment: strings,
    single numbers, whole numbers."""
    # An override may rely on plain lists, so only torch's own method gets the fast ones.
    by_torch = type(optimizer).load_state_dict is Optimizer.load_state_dict
    if by_torch:
        # Linear in the number of parameters, which torch alone is not.
        groups = [{**group, "params": _Keys(group["params"])} for group in state_dict["param_groups"]]
        state_dict = {**state_dict, "param_groups": groups}
    optimizer.load_state_dict(state_dict)
    if not has_torch_form(state_dict):
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    saved = [(param, state_dict["state"].get(key, {})) for param, key in zip(params, keys, strict=True)]
    # Of a parameter without dimensions every state is a single number: what they are is known from the others.
    numbers = {name for param, own in saved if param.dim() for name, value in own.items() if _is_scalar(value)}
    for param, own in saved:
        loaded = optimizer.state.get(param, {})
        for name in own.keys() & loaded.keys() - {"step"}:  # torch loads that one as its step needs it
            if by_torch or _is_scalar(own[name]):
                loaded[name] = _as_saved(own[name], loaded[name], scalars=name in numbers or bool(param.dim()))


def _as_saved(given: Any, loaded: Any, *, scalars: bool) -> Any:
    """Return `loaded`, with what torch's cast makes other values of as it was given. scalars: single numbers too."""
    if isinstance(given, str):
        return given
    if isinstance(given, torch.Tensor) and isinstance(loaded, torch.Tensor):
        kept = not given.is_floating_point() or (scalars and given.dim() == 0)
        return given.to(loaded.device) if kept and given.dtype != loaded.dtype else loaded
    if isinstance(given, Mapping) and isinstance(loaded, dict):
        return {key: _as_saved(given[key], value, scalars=scalars) for key, value in loaded.items()}
    if type(given) in (list, tuple) and type(loaded) is type(given):
        return type(given)(_as_saved(*pair, scalars=scalars) for pair in zip(given, loaded, strict=True))
    return loaded


class _Keys(list[Any]):
    """The keys of a group's parameters, in which torch searches once for each tensor."""

    _known: frozenset[Any] | None = None

    def __contains__(self, key: object) -> bool:
        if self._known is None:  # when first asked: a hook may have changed them before
            self._known = frozenset(self)
        return key in self._known


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0
