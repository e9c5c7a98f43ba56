"""House rules that a look at the code can check: no override that does nothing, no mixin, no private name of torch."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from sources import nodes_of

import booster

ROOT = Path(booster.__file__).parent


@pytest.fixture(scope="module", autouse=True)
def parsed_once():
    yield
    nodes_of.cache_clear()


def idle_overrides(nodes):
    """Methods that only call the method of their base with what they were given, and have no defaults of their own."""
    for node in nodes:
        if not isinstance(node, ast.FunctionDef) or node.args.vararg or node.args.kwarg:
            continue
        if node.args.defaults or any(node.args.kw_defaults):
            continue
        body = [each for each in node.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
        if len(body) != 1 or not isinstance(body[0], (ast.Return, ast.Expr)) or body[0].value is None:
            continue
        given = [each.arg for each in node.args.args[1:]] + [f"{each.arg}={each.arg}" for each in node.args.kwonlyargs]
        calls = f"super().{node.name}({', '.join(given)})", f"super().{node.name}"
        if ast.unparse(body[0].value) in calls:
            yield f"{node.lineno}: {node.name}"


def root_of(node):
    """`a` of `a.b.c`, and None of what is no name to begin with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def private_names_of_torch(nodes):
    """What is asked of torch, or imported from it, under a name that begins with `_`; `_foreach_*` is documented."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*node.module.split("."), *(each.name for each in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for each in node.names if each.name.split(".")[0] == "torch" for part in each.name.split(".")]
        elif isinstance(node, ast.Attribute) and root_of(node) == "torch":
            names = ast.unparse(node).split(".")
        else:
            continue
        yield from (
            f"{node.lineno}: {name}" for name in names if re.match(r"_(?!_|foreach_)", name) and name != "_foreach"
        )


def found(rule, files):
    return [f"{file.relative_to(ROOT.parent)}:{each}" for file in files for each in rule(nodes_of(file))]


FILES = sorted(ROOT.rglob("*.py"))


def test_no_override_does_nothing():
    assert found(idle_overrides, FILES) == []


def test_private_names_of_torch_are_in_one_room():
    home = ROOT / "common" / "torch_internals"
    assert found(private_names_of_torch, sorted(home.glob("*.py")))
    assert found(private_names_of_torch, [file for file in FILES if file.parent != home]) == []


def named_twice(files):
    """Names of classes, those that begin with `_` aside, of which several files have one."""
    places = {}
    for file in files:
        for node in nodes_of(file):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{file.relative_to(ROOT.parent)}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_classes_have_one_name():
    assert named_twice(FILES) == {}


def test_nothing_calls_itself_a_mixin():
    said = [f"{file.relative_to(ROOT.parent)}" for file in FILES if re.search(r"\bmixin\b", file.read_text(), re.I)]
    assert said == []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (idle_overrides, "class A(B):\n    def f(self, x, *, y):\n        return super().f(x, y=y)"),
        (idle_overrides, "class A(B):\n    @property\n    def f(self):\n        return super().f"),
        (private_names_of_torch, "import torch\ntorch._C._get_graph()"),
        (private_names_of_torch, "from torch.distributed.fsdp._fully_shard import FSDPState"),
        (private_names_of_torch, "from torch.optim.optimizer import _params_doc"),
        (private_names_of_torch, "import torch._dynamo"),
    ],
)
def test_a_rule_is_noticed_when_broken(rule, source):
    assert [*rule(ast.walk(ast.parse(source)))]


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (idle_overrides, "class A(B):\n    def f(self, x):\n        return super().f(x + 1)"),
        (private_names_of_torch, "import torch\ntorch._foreach_mul_([], 1)\nself._torch = 1"),
    ],
)
def test_a_rule_that_is_kept_says_nothing(rule, source):
    assert [*rule(ast.walk(ast.parse(source)))] == []


def listed_in_head(head):
    """The files and rooms that a head lists: the first words of the indented lines after "In reading order" or the like."""
    after = re.split(r"\n(?:.*(?:[Ff]iles|[Rr]eading order|in the order of).*:)\n\n", head, maxsplit=1)[-1]
    for line in re.split(r"\n\n(?=\S)", after)[0].splitlines():
        if found := re.match(
            r"(?:    |- )`?([a-z0-9_]+(?:/|\.py)?`?(?:, `?[a-z0-9_]+(?:/|\.py)?`?)*)(?:  |:|$| \()", line
        ):
            yield from (word.strip("` ").removesuffix(".py").removesuffix("/") for word in found[1].split(","))


@pytest.mark.parametrize(
    "head",
    sorted(path for path in ROOT.rglob("__init__.py") if path.parent != ROOT),
    ids=lambda path: str(path.parent.relative_to(ROOT)),
)
def test_a_head_lists_files_that_there_are_and_names_each(head):
    text = ast.get_docstring(ast.parse(head.read_text()))
    there = {path.stem for path in head.parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    if "order" in text:
        assert sorted({*listed_in_head(text)} - there) == []
    assert sorted(there - {"__init__", *re.findall(r"\w+", text)}) == []


FOREIGN = {"b", "dcp", "dist", "nn", "torch"}
# `name.attribute` of a variable, and not of a module.
OF_OBJECTS = {"memory.keep", "states.full", "states.local", "states.sharded", "target.largest"}


def named_in_prose():
    """(file, name) of what docstrings and comments have between backticks as `file.py`, `module.name` or `module.Name`."""
    for path in ROOT.rglob("*.py"):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT or token.string.startswith('"""'):
                for name in re.findall(r"`([a-z_]+(?:[./][A-Za-z_]+)+)`", token.string):
                    if name.endswith(".py") or (name.count(".") == 1 and "/" not in name):
                        yield path.relative_to(ROOT), name


def test_modules_and_names_in_prose_exist():
    words, paths = {}, set()
    for path in ROOT.rglob("*.py"):
        module = path.parent if path.stem == "__init__" else path
        words.setdefault(module.stem, set()).update(re.findall(r"\w+", path.read_text()))
        words.setdefault(module.parent.name, set()).add(module.stem)
        paths |= {"/".join(path.parts[-number:]) for number in range(1, 5)}
    defined = {
        name for path in ROOT.rglob("*.py") for name in re.findall(r"^(?:class|def) (\w+)", path.read_text(), re.M)
    }

    def exists(name):
        if name.endswith(".py"):
            return name in paths or (ROOT.parent / name).exists()
        module, attribute = name.split(".")
        return attribute in words[module] if module in words else attribute not in defined

    prose = {each for each in named_in_prose() if each[1] not in OF_OBJECTS and each[1].split(".")[0] not in FOREIGN}
    assert len(prose) > 100
    assert sorted(f"{path}: {name}" for path, name in prose if not exists(name)) == []
