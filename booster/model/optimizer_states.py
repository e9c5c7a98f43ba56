"""States of optimizers: loaded without rounding, compared before they are loaded, and restored after trial steps."""

from __future__ import annotations

import copy
import functools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Number
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.model.optimizer_kinds import KNOWN, UNKNOWN, has_torch_form


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
    row = next((KNOWN[cls] for cls in type(optimizer).__mro__ if cls in KNOWN), UNKNOWN)
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
    held = snapshot_value([*entries.values(), *numbers.values(), *named.values()])

    def back() -> None:
        for key in group.keys() - entries.keys() - {"params"}:  # entries that the trial added
            del group[key]
        for key in _own_names(optimizer) - named.keys():
            del optimizer.state[key]
        group.update(entries)
        optimizer.state.update(named)
        vars(optimizer).update(numbers)
        if held is not None:
            held()

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


def snapshot_value(value: Any) -> Callable[[], None] | None:
    """Return a function that restores `value`, and all that it holds, in place; None where nothing in it can be written."""
    backs: list[Callable[[], Any]] = []
    # Tensors, lists, dicts, sets, deques, random generators, and attributes of other objects are restored.
    # Not so parameters, modules, optimizers and functions, because they do not belong to the value.
    _collect(value, backs, set())

    def restore() -> None:
        for back in backs:
            back()

    return restore if backs else None


_NOT_OWN = (nn.Parameter, nn.Module, Optimizer, ModuleType, type, torch.dtype, torch.device)


def _collect(value: Any, backs: list[Callable[[], Any]], seen: set[int]) -> None:
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
