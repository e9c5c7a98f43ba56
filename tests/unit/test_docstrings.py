"""Docstrings of what docs/reference shows: where one explains more than three parameters, each begins a line of its own."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTED = sorted(
    {
        name
        for page in (ROOT / "docs" / "reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)
    }
)


def target(name):
    """What a name of docs/reference stands for."""
    module, rest = name, []
    while True:
        try:
            found = import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for attribute in rest:
        found = getattr(found, attribute)
    return found


def parameters(function):
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def explained(text, names):
    """Parameters that `text` explains, as `name: what it is`, and of these the ones that stand amid a line."""
    if not names:
        return [], []
    name = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    item = re.compile(rf"(?:\A|(?<=\n\n)|(?<=[.;)][ \n]))(?P<who>(?:{name})(?:, (?:{name}))*): (?=\S)")
    found = list(item.finditer(text))
    amid = [each["who"] for each in found if each.start() and text[each.start() - 1] != "\n"]
    return [who for each in found for who in each["who"].split(", ")], amid


def documented():
    """(name, docstring, names that it may explain) of every documented class and function, and of their public methods."""
    for name in DOCUMENTED:
        thing = target(name)
        if not inspect.isclass(thing):
            yield name, inspect.getdoc(thing) or "", parameters(thing)
            continue
        fields = {key for base in thing.__mro__ for key in getattr(base, "__annotations__", {})}
        yield name, inspect.cleandoc(vars(thing).get("__doc__") or ""), parameters(thing) | fields
        for key, member in vars(thing).items():
            function = inspect.unwrap(getattr(member, "__func__", member))
            if not key.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{key}", inspect.cleandoc(function.__doc__ or ""), parameters(function)


def crowded():
    for name, text, names in documented():
        all_of_them, amid = explained(text, names)
        if len(all_of_them) > 3 and amid:
            yield f"{name}: {', '.join(amid)}"


def test_where_more_than_three_parameters_are_explained_each_begins_a_line():
    assert len(DOCUMENTED) > 50
    assert [*crowded()] == []


@pytest.mark.parametrize(
    ("text", "found", "amid"),
    [
        ("Does it.\n\na: one. b: two. c: three; d: four.", list("abcd"), list("bcd")),
        ("Does it.\n\na: one.\nb, c: two\n    and more.\nd: four.", list("abcd"), []),
        ("Does it. e: no parameter.", [], []),
    ],
)
def test_what_stands_amid_a_line_is_found(text, found, amid):
    assert explained(text, set("abcd")) == (found, amid)
