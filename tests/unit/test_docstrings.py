"""Docstrings of what people type: they name every parameter, and where they explain more than three each begins a line.

What people type is what docs/reference shows, and what the packages of the library export.
"""

import inspect
import re
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import pytest

from booster import StepResult

ROOT = Path(__file__).parents[2]
EXPORTING = (
    "booster",
    "booster.checkpoint",
    "booster.data",
    "booster.integrations.trainer",
    "booster.logging",
    "booster.memory",
    "booster.mixed_precision",
    "booster.mixed_precision.apex_amp",
    "booster.nn.lr_scheduler",
    "booster.numerics",
    "booster.plugin",
    "booster.plugin.tensor_parallel",
)
REFERENCE = {
    name
    for page in (ROOT / "docs" / "reference").glob("*.md")
    for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)
}
REFUSED = "NoReturn"  # what a function takes only to say that it is wrong
EXPORTED = {f"{package}.{name}" for package in EXPORTING for name in import_module(package).__all__}


def target(name):
    """The object of a name of docs/reference."""
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


def parameters(called):
    """What is typed to call a function or to make an object of a class, by name."""
    if inspect.isclass(called):
        made = called.__init__ if inspect.isfunction(called.__init__) else called.__new__  # that of a named tuple
        return {name: each for name, each in parameters(made).items() if name not in ("args", "kwargs", "kwds")}
    own = inspect.signature(called).parameters if inspect.isfunction(called) else {}
    hidden = ("self", "cls", "_cls")
    return {name: each for name, each in own.items() if name not in hidden and each.annotation != REFUSED}


def items(text, names):
    """The places of `text` that explain some of `names`, as `name: what it is`."""
    name = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    item = re.compile(rf"(?:\A|(?<=\n\n)|(?<=[.;)][ \n]))(?P<who>(?:{name})(?:, (?:{name}))*): (?=\S)")
    return list(item.finditer(text)) if names else []


def explained(text, names):
    """Parameters that `text` explains, and of these the ones that stand amid a line."""
    found = items(text, names)
    amid = [each["who"] for each in found if each.start() and text[each.start() - 1] != "\n"]
    return [who for each in found for who in each["who"].split(", ")], amid


def flat(text):
    """A docstring with its block of attributes as a paragraph, so that they are read as parameters are."""
    return re.sub(r"^Attributes:\n((?:    .*\n?)+)", lambda found: f"\n{dedent(found[1])}", text, flags=re.MULTILINE)


def documented():
    """(name, docstring, names that it may explain, what it is called with) of every class and function, and of public methods.

    The docstring of a class is its own, as editors show none of its bases; that of a method may be inherited, as they show it.
    Methods are those of what the reference shows.
    """
    for name in sorted(REFERENCE | EXPORTED):
        thing = target(name)
        if not inspect.isclass(thing):
            yield name, inspect.getdoc(thing) or "", {*parameters(thing)}, parameters(thing)
            continue
        fields = {key for base in thing.__mro__ for key in getattr(base, "__annotations__", {})}
        yield (
            name,
            flat(inspect.cleandoc(vars(thing).get("__doc__") or "")),
            {*parameters(thing)} | fields,
            parameters(thing),
        )
        for key, member in vars(thing).items() if name in REFERENCE else ():
            function = inspect.unwrap(getattr(member, "__func__", member))
            is_default = getattr(function, "__name__", "") == "<lambda>"  # of a field
            if not key.startswith("_") and inspect.isfunction(function) and not is_default:
                text = inspect.getdoc(getattr(thing, key)) or ""
                yield f"{name}.{key}", text, {*parameters(function)}, parameters(function)


def crowded():
    for name, text, names, _ in documented():
        all_of_them, amid = explained(text, names)
        if len(all_of_them) > 3 and amid:
            yield f"{name}: {', '.join(amid)}"


def test_where_more_than_three_parameters_are_explained_each_begins_a_line():
    assert len(REFERENCE) > 50
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


def named(text, names):
    """Of `names` those that `text` explains, or has between backticks."""
    explains, _ = explained(text, names)
    return {*explains, *(each for each in names if f"`{each}`" in text)}


def unnamed():
    for name, text, _, typed in documented():
        missing = [each for each in typed if each not in named(text, {*typed})]
        if missing:
            yield f"{name}: {', '.join(missing)}"


def test_every_parameter_is_named():
    assert [*unnamed()] == []


def unsaid():
    """Options that are None by default, where neither their lines nor those before and after all say what None means."""
    for name, text, names, typed in documented():
        parts = [*items(text, names)]
        starts = [each.start() for each in parts] + [len(text)]
        said = {
            who
            for each, end in zip(parts, starts[1:], strict=True)
            if "None" in text[each.end() : end].partition("\n\n")[0]
            for who in each["who"].split(", ")
        }
        last = starts[-2] if parts else 0
        around = text[: starts[0]] + text[last:].partition("\n\n")[2]
        missing = [key for key, each in typed.items() if each.default is None and key not in said]
        if missing and "None" not in around:
            yield f"{name}: {', '.join(missing)}"


def test_the_result_of_a_step_names_its_fields_in_one_place():
    fields = {name for name, member in vars(StepResult).items() if isinstance(member, property)}
    assert fields - named(flat(inspect.getdoc(StepResult)), fields) == set()


def test_what_none_means_is_said_where_it_is_the_default():
    assert [*unsaid()] == []
