"""The order in which a module's forward uses its children, read from its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


def names_in_forward(module: nn.Module) -> list[str]:
    """Return the attributes that the forward of `module` reads, of whatever object, in the order in which they are used.

    What is called is used after its arguments are. Methods of the module's class are entered where they are named, each once.
    """
    # A forward of the instance is that of the user, or of a library such as accelerate, and is read too.
    forward = module.__dict__.get("forward", type(module).forward)
    # Nothing is known, and the list is empty, for a forward without source.
    return list(_names_in(forward, type(module), {"forward"}))


def side_of(child: str, row: str, names: list[str]) -> int:
    """Return -1 if `names` have `child` before `row` only, 1 if after its first place only, 0 if the source does not say."""
    if child not in names or row not in names:
        return 0
    places = [place for place, name in enumerate(names) if name == child]
    start = names.index(row)
    return -1 if places[-1] < start else 1 if places[0] > start else 0


def parsed(function: Callable[..., Any]) -> list[ast.stmt]:
    """Return the body of a Python function, parsed; empty where its source is not to be had."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return []
    return getattr(definition, "body", [])


def _names_in(function: Callable[..., Any], cls: type, entered: set[str]) -> Iterator[str]:
    for statement in parsed(function):
        yield from _names(statement, cls, entered)


def _names(node: ast.AST, cls: type, entered: set[str]) -> Iterator[str]:
    for child in _in_order(node):
        yield from _names(child, cls, entered)
    if isinstance(node, ast.Attribute):
        yield node.attr
        own = getattr(cls, node.attr, None)
        if inspect.isfunction(own) and node.attr not in entered and node.attr not in vars(nn.Module):
            entered.add(node.attr)
            yield from _names_in(own, cls, entered)


def _in_order(node: ast.AST) -> list[ast.AST]:
    """The children of `node` as they are evaluated."""
    if isinstance(node, ast.Call):
        return [*node.args, *node.keywords, node.func]
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, _COMPREHENSIONS):
        return [*node.generators, *(child for child in children if child not in node.generators)]
    if isinstance(node, ast.Assign):
        return [node.value, *node.targets]
    return children
