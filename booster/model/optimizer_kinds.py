"""Which optimizers may be stepped on parts of their parameters, by exact type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch.optim import Optimizer

from booster.ground import arguments

Kind = Literal["elementwise", "per tensor", "whole"]

_ELEMENTWISE: set[type[Optimizer]] = {
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
}
_PER_TENSOR: set[type[Optimizer]] = {
    getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)
}


Sign = Literal["signed", "unsigned", "fp32"]
_STATES: dict[type[Optimizer], dict[str, Sign]] = {}
_SIGNS = ("signed", "unsigned", "fp32")


def register_elementwise(cls: type[Optimizer], *, states: Mapping[str, Sign] | None = None) -> type[Optimizer]:
    """Declare that `cls` treats every element of every parameter by itself; usable as a class decorator.

    The promise: splitting a parameter, or joining several of one group, leaves the update of each element as it was, and
    all state is either of the parameter's shape or the same for every element. Optimizers that take norms, sort,
    factorise or look at another parameter must not be registered. The class counts exactly, not its subclasses.

    states: of states that are kept in few bits (`states="8bit"`), by name: "signed"; "unsigned", which is never negative; or
    "fp32", which stays float32, as an average of weights should. Those not named are found by trial steps.
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
    _ELEMENTWISE.add(cls)
    _STATES[cls] = dict(states or {})
    return cls


def declared_states(cls: type[Optimizer]) -> Mapping[str, Sign]:
    """Return what `register_elementwise` was told of the states of `cls`."""
    return _STATES.get(cls, {})


def unknown(optimizer: Optimizer, would: str, otherwise: str) -> str:
    """Return the refusal of an optimizer of the kind "whole" where only single elements, or tensors, can be stepped.

    would: what would happen to it, a predicate. otherwise: what to do if it does look at more than one element.
    """
    name = type(optimizer).__name__
    return (
        f"{name} {would}, and is not known to treat every element by itself; if it does, call "
        f"booster.register_elementwise({name}) before boost(), otherwise {otherwise}"
    )


def kind_of(optimizer: Optimizer) -> Kind:
    """ "elementwise": may be stepped on flat buckets; "per tensor": on some whole tensors at a time; "whole": neither."""
    if type(optimizer) in _ELEMENTWISE:
        return "elementwise"
    return "per tensor" if type(optimizer) in _PER_TENSOR else "whole"
