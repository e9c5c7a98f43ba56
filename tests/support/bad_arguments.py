"""Bad arguments for every public call, made from the signatures: what there is to call, what is tried, what came of it.

A parameter is tried with every value of `pool()` that is not legal for it. Legal is what its annotation says (bool, Literal,
None) and what `legal_arguments.py` says of its name (ranges, objects). An attempt is clear if it raises ValueError, TypeError
or RuntimeError with a message that names the parameter.
"""

import builtins
import contextlib
import importlib
import inspect
import math
import re
import signal
import types
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

CLEAR = (ValueError, TypeError, RuntimeError)
_SECONDS = 300  # after which an attempt counts as hanging


def pool() -> dict[str, Any]:
    """What is tried, by how it is written: values of every type that a slip of the pen, a config file or an argparse gives."""
    module = nn.Linear(2, 2)
    return {
        **{repr(v): v for v in (None, True, False, 0, 1, 2, -1, 7, 2**70, 0.5, 1.5, -0.5, 3 + 0j)},
        **{repr(v): v for v in (math.nan, math.inf, -math.inf, 1e300, 1e-300)},
        **{repr(v): v for v in ("", "1", "no", "True", "auto", b"x")},
        **{repr(v): v for v in ([], [1], ["x"], [None], (), (1, 2), {}, {"a": 1}, {3})},
        "object()": object(),
        "a function": lambda *args, **kwargs: None,
        "print": print,
        "int": int,
        "tensor(1.)": torch.tensor(1.0),
        "tensor([1., 1.])": torch.ones(2),
        "torch.int8": torch.int8,
        "torch.float16": torch.float16,
        "device('meta')": torch.device("meta"),
        "nn.Linear": nn.Linear,
        "a module": module,
        "an optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
    }


Predicate = Callable[[Any], bool]


@dataclass
class Call:
    """One public call. bind: makes what is called, anew. examples: sets of legal arguments, each made anew."""

    name: str
    bind: Callable[[], Callable[..., Any]]
    signature: inspect.Signature
    hints: dict[str, Any]
    examples: list[Callable[[], dict[str, Any]]]


@dataclass
class Outcomes:
    """What came of all attempts. misses: those that were accepted, or refused without naming the parameter."""

    counts: Counter[str] = field(default_factory=Counter)
    misses: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return self.counts.total()

    @property
    def rate(self) -> float:
        return self.counts["clear"] / max(1, self.tried)

    def note(self, kind: str, where: str, detail: str = "") -> None:
        self.counts[kind] += 1
        if kind != "clear":
            self.misses.append(f"{kind:8} {where} {detail}".rstrip())

    def report(self) -> str:
        share = f"{self.tried} bad arguments: {self.rate:.2%} clear errors, {dict(self.counts)}"
        return "\n".join([share, *sorted(self.misses)])


def public_callables(modules: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and object of what the modules export and can be called, each once."""
    seen: set[int] = set()
    for module_name in modules:
        module = importlib.import_module(module_name)
        names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        for name in names:
            value = getattr(module, name)
            own = str(getattr(value, "__module__", "")).startswith("booster")
            if callable(value) and not inspect.ismodule(value) and own and id(value) not in seen:
                seen.add(id(value))
                yield name, value


def public_methods(cls: type) -> Iterator[str]:
    """Yield names of the methods of `cls` that are defined in the package."""
    names: dict[str, None] = {}
    for base in cls.__mro__:
        if base.__module__.startswith("booster"):
            names |= dict.fromkeys(name for name in vars(base) if not name.startswith("_"))
    yield from (name for name in names if callable(getattr(cls, name)))


def signature_of(value: Any) -> tuple[inspect.Signature, dict[str, Any]]:
    """Return the signature of a function, method or class (that of its `__init__`), and its annotations as types."""
    function = value
    if isinstance(value, type):
        function = next((vars(c)["__init__"] for c in value.__mro__ if "__init__" in vars(c)), value)
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    plain = inspect.unwrap(function)
    try:
        hints = typing.get_type_hints(plain, localns=_Names(getattr(plain, "__globals__", {})))
    except TypeError:
        hints = {}
    return signature.replace(parameters=parameters), hints


class _Names(dict[str, Any]):
    """What annotations may name. Names that a module imports for the type checker alone count as Any, and the rest is read."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)


def accepts(hint: Any, value: Any, range_of: Predicate | None) -> bool | None:
    """Whether `value` is legal for an annotation; None where that does not follow from it and `range_of` says nothing."""
    origin = typing.get_origin(hint)
    if hint in (None, type(None)):
        return value is None
    if origin in (typing.Union, types.UnionType):
        answers = [accepts(part, value, range_of) for part in typing.get_args(hint)]
        return True if True in answers else (None if None in answers else False)
    if origin is typing.Literal:
        return any(type(value) is type(legal) and value == legal for legal in typing.get_args(hint))
    if hint is bool:
        return isinstance(value, bool)
    if value is None and hint is not Any:
        return False
    return None if range_of is None else bool(range_of(value))


def attempt(
    call: Call,
    example: Callable[[], dict[str, Any]],
    name: str,
    value: Any,
    other_errors: tuple[type[Exception], ...] = (),
) -> tuple[str, str]:
    """Call with one bad argument; return "clear", "unclear" or "accepted", and the error. other_errors: clear as well."""
    arguments = {**example(), name: value}
    positional = [
        arguments.pop(p.name)
        for p in call.signature.parameters.values()
        if p.kind is p.POSITIONAL_ONLY and p.name in arguments
    ]
    try:
        with _time_limit():
            result = call.bind()(*positional, **arguments)
            if isinstance(result, contextlib._GeneratorContextManager):
                with result:
                    pass
            elif inspect.isgenerator(result):
                list(result)
    except CLEAR as error:
        named = re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(error)) is not None
        return ("clear" if named else "unclear"), f"{type(error).__name__}: {str(error)[:150]}"
    except Exception as error:
        if isinstance(error, other_errors):
            return "clear", f"{type(error).__name__}: {str(error)[:150]}"
        return "unclear", f"{type(error).__name__}: {str(error)[:150]}"
    return "accepted", ""


def try_call(
    call: Call,
    ranges: dict[str, Predicate],
    exempt: dict[str, str],
    other_errors: dict[str, tuple[type[Exception], ...]],
    outcomes: Outcomes,
    renew: Callable[[bool], None],
) -> None:
    """Try every parameter of `call` with every value that is not legal for it."""
    with _alarms(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _try_call(call, ranges, exempt, other_errors, outcomes, renew)


def _try_call(
    call: Call,
    ranges: dict[str, Predicate],
    exempt: dict[str, str],
    other_errors: dict[str, tuple[type[Exception], ...]],
    outcomes: Outcomes,
    renew: Callable[[bool], None],
) -> None:
    values = pool()
    for parameter in call.signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        where = f"{call.name}({parameter.name})"
        if where in exempt or f"{call.name}()" in exempt or f"({parameter.name})" in exempt:
            continue
        range_of = ranges.get(where) or ranges.get(parameter.name)
        hint = call.hints.get(parameter.name, Any)
        for example in call.examples:
            for label, value in values.items():
                legal = accepts(hint, value, range_of)
                if legal is None:
                    outcomes.unknown.append(where)
                    break
                if legal:
                    continue
                kind, detail = attempt(call, example, parameter.name, value, other_errors.get(where, ()))
                outcomes.note(kind, f"{where} = {label}:", detail)
                renew(kind == "accepted")


@contextlib.contextmanager
def _alarms() -> Iterator[None]:
    """Make the alarm of `_time_limit` an error: once for many attempts."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"did not return within {_SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
