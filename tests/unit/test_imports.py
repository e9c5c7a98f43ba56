"""`import booster` is light, and the layers import in one direction."""

import ast
import importlib
import json
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from sources import nodes_of

import booster

ROOT = Path(booster.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


@pytest.fixture(scope="module", autouse=True)
def parsed_once():
    yield
    nodes_of.cache_clear()


def run(code, *flags):
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=True
    )
    return done.stdout, done.stderr


@cache
def loaded_by(statement):
    out, _ = run(f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))")
    return set(json.loads(out.splitlines()[-1]))


@pytest.fixture(scope="module")
def new_modules():
    """What `import booster` loads that `import torch` and torch's own subpackages do not."""
    return loaded_by("import booster") - loaded_by("import torch")


def test_importing_booster_loads_nothing_beyond_torch(new_modules):
    with_torch = {name.partition(".")[0] for name in loaded_by("import torch")}
    tops = {name.partition(".")[0] for name in new_modules} - with_torch
    third_party = tops - set(sys.stdlib_module_names) - {"booster"}
    assert third_party == set()


def test_importing_booster_leaves_the_heavy_parts_of_torch_alone(new_modules):
    heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.onnx")
    assert [name for name in new_modules if name.startswith(heavy)] == []


def imports(path):
    """(module, name) of every absolute import in the file, wherever in it; name None for `import module`."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from ((node.module, alias.name) for alias in node.names)


def violations(files):
    """Imports against the rule: precision never imports plugin, plugin imports of precision the policy module alone."""
    for path in files:
        parts = path.relative_to(ROOT).parts
        for module, name in imports(path):
            full = f"{module}.{name}" if name else module
            if parts[0] == "mixed_precision" and full.startswith("booster.plugin"):
                yield f"{path.name}: {full}"
            beyond_policy = full.startswith("booster.mixed_precision") and module != "booster.mixed_precision.policy"
            if parts[0] == "plugin" and beyond_policy:
                yield f"{path.name}: {full}"


def test_precision_and_plugin_know_each_other_by_the_policy_alone():
    assert list(violations(FILES)) == []
    assert any("plugin" in path.parts for path in FILES)
    assert any("mixed_precision" in path.parts for path in FILES)


def test_the_import_rule_is_noticed_when_broken(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    sources = {
        "mixed_precision/a.py": "def f():\n    from booster.plugin.base import Plugin",
        "mixed_precision/b.py": "from booster import plugin",
        "plugin/c.py": "from booster.mixed_precision import FP32",
        "plugin/d.py": "from booster.mixed_precision.policy import DtypePolicy",
        "plugin/e.py": "import booster.mixed_precision.half",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    found = {text.partition(":")[0] for text in violations(sorted(tmp_path.rglob("*.py")))}
    assert found == {"a.py", "b.py", "c.py", "e.py"}


def test_no_pickle_travels_between_ranks():
    """torch's collectives of objects unpickle what arrives, on ports that others can reach."""
    of_objects = re.compile(r"(all_)?gather_object|(broadcast|scatter|send|recv)_object_list")
    found = [
        f"{path}:{node.lineno}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and of_objects.fullmatch(node.attr)
    ]
    assert found == []


def test_only_launch_and_cli_read_the_environment_and_what_limits_the_cpu_is_read_beside_its_units():
    readers = {
        str(path.relative_to(ROOT))
        for path in FILES
        if any(
            (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))
            or (isinstance(node, ast.Name) and node.id in ("environ", "getenv"))
            for node in nodes_of(path)
        )
    }
    others = {name for name in readers if name != "launch.py" and not name.startswith("cli/")}
    assert others == {"mixed_precision/hardware.py"}
    source = (Path(ROOT) / "mixed_precision" / "hardware.py").read_text()
    read = {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith("_CPU_ISA")
    }
    assert read == {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"}
    assert source.count("os.environ") == len(read)


def module_of(path):
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in FILES}), ids=lambda folder: str(folder.relative_to(ROOT.parent))
)
def test_every_module_imports_and_every_public_name_exists(folder):
    names = [module_of(path) for path in FILES if path.parent == folder and path.name != "__main__.py"]
    if folder.name == "kernels" and find_spec("triton") is None:
        names = ["booster.kernels", "booster.kernels.eligibility"]  # `make kernels` imports the others
    for name in names:
        module = importlib.import_module(name)
        assert module.__doc__, f"{name} does not say what it is"
        public = getattr(module, "__all__", [])
        assert [entry for entry in public if not hasattr(module, entry)] == [], name
        assert len(public) == len(set(public)), name


def test_the_public_names_are_these():
    for module, names in {
        "booster": "Booster DistCoordinator launch launch_from_torch launch_from_slurm launch_from_openmpi get_default_parser",
        "booster.plugin": "Plugin PlacedModule SingleDevice TorchDDPPlugin",
        "booster.mixed_precision": "MixedPrecision FP16TorchMixedPrecision BF16MixedPrecision FP32 register DtypePolicy "
        "cast_parameters",
    }.items():
        assert set(names.split()) <= set(importlib.import_module(module).__all__)


# ---- no circles ----


@cache
def arrows(root):
    """All (importer, imported), for every import of one module of the package at `root` by another, for type checkers or not.

    `from package import name` is an arrow to the module `name` where that is one, else to the package.
    """
    found, modules = set(), {}
    for path in sorted(root.rglob("*.py")):
        modules[".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")] = path
    for importer, path in modules.items():
        for module, name in imports(path):
            imported = f"{module}.{name}" if f"{module}.{name}" in modules else module
            if imported in modules and imported != importer:
                found.add((importer, imported))
    return frozenset(found)


def rooms(root, between):
    """The same arrows between what is at the top of the package: folders, and files of no folder."""
    for importer, imported in between:
        names = [".".join(module.split(".")[:2]) for module in (importer, imported)]
        if names[0] != names[1] and root.name not in names:
            yield tuple(names)


def circles(between):
    """Sets of nodes that reach each other; for each the arrows inside it."""
    followers = {}
    for importer, imported in between:
        followers.setdefault(importer, set()).add(imported)

    def reached(start):
        seen, waiting = set(), [start]
        while waiting:
            for node in followers.get(waiting.pop(), set()) - seen:
                seen.add(node)
                waiting.append(node)
        return seen

    reach = {node: reached(node) for node in followers}
    together = {
        frozenset(other for other in reach[node] if node in reach.get(other, ()))
        for node in followers
        if node in reach[node]
    }
    return [sorted((a, b) for a, b in set(between) if a in nodes and b in nodes) for nodes in together]


def test_no_files_and_no_folders_import_each_other_in_a_circle():
    found = arrows(ROOT)
    assert circles(found) == [], "files; turn one of these imports round, or move what both need below both"
    assert circles(set(rooms(ROOT, found))) == [], "folders; the arrows inside each circle"


def test_no_files_of_the_benchmarks_import_each_other_in_a_circle():
    found = arrows(ROOT.parent / "benchmarks")
    assert ("benchmarks.memory", "benchmarks.timing") in found
    assert circles(found) == []


def test_a_circle_is_noticed_when_there_is_one(tmp_path):
    root = tmp_path / "package"
    sources = {
        "__init__.py": "",
        "a.py": "from package.b import x",
        "b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package import c",
        "c.py": "def f():\n    import package.a",
        "one/up.py": "from package.two.down import x",
        "one/other.py": "",
        "two/down.py": "",
        "two/up.py": "from package.one.other import x",
    }
    for name, source in sources.items():
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_text(source)
    found = arrows(root)
    assert [{a for a, _ in circle} for circle in circles(found)] == [{"package.a", "package.b", "package.c"}]
    between = [{a for a, _ in circle} for circle in circles(set(rooms(root, found)))]
    assert {"package.one", "package.two"} in between


# ---- the rooms that docs/design.md lists ----


def stories():
    """Of each room and file at the top of the package, the row of section 2 of docs/design.md, counted from above."""
    section = (ROOT.parent / "docs" / "design.md").read_text().split("## 2. The rooms")[1].split("## 3.")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("|")][2:]
    top = {path.stem if path.is_file() else path.name for path in ROOT.iterdir()}
    story = {}
    for number, (left, right) in enumerate(rows):
        for name in re.findall(r"`([\w.]+?)(?:\.py|/)`", right if "ground floor" in left else left):
            assert name in top, f"docs/design.md has a room {name!r} that is not there"
            assert name not in story, f"docs/design.md lists {name!r} twice"
            story[name] = number
    return story


def test_the_rooms_of_the_design_are_those_of_the_package():
    there = {
        p.stem if p.is_file() else p.name for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert set(stories()) == there - {"__init__", "__main__"}


def test_no_import_runs_from_a_room_of_the_design_to_a_higher_one():
    story = stories()
    common = min(story["common"], story["data"])
    height = {f"booster.{name}": min(number, common) for name, number in story.items()}
    upward = {(a, b) for a, b in rooms(ROOT, arrows(ROOT)) if a in height and height[b] < height[a]}
    assert upward == set()


def test_nothing_iterates_over_a_weak_set():
    """Its order differs among ranks, and so would names, and collectives that are called along it."""
    found = []
    for file in FILES:
        nodes = nodes_of(file)
        weak = {
            ast.unparse(node.target)
            for node in nodes
            if isinstance(node, ast.AnnAssign) and "WeakSet[" in ast.unparse(node.annotation)
        }
        loops = [node.iter for node in nodes if isinstance(node, (ast.For, ast.comprehension))]
        loops += [
            node.args[0]
            for node in nodes
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("list", "tuple", "next", "iter") and node.args
        ]
        found += [f"{file.name}: {ast.unparse(loop)}" for loop in loops if ast.unparse(loop) in weak]
    assert found == []


def test_tests_that_run_beside_a_gpu_say_on_which_device():
    unsaid = []
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if not re.search(r"Booster\(\s*(\)|\*|\w+=)", file.read_text()):  # none without a first argument
            continue
        calls = [node for node in nodes_of(file) if isinstance(node, ast.Call)]
        unsaid += [
            f"{file.name}: {ast.unparse(call)}"
            for call in calls
            if getattr(call.func, "id", getattr(call.func, "attr", None)) == "Booster"
            and not call.args
            and not {"device", None} & {keyword.arg for keyword in call.keywords}
        ]
    # Of machines without a GPU, where alone it runs.
    assert unsaid == ["test_booster.py: Booster()"]


SENDS_ITS_OWN = {
    "facade/collectives.py": "what it made contiguous, of a dtype that backends know",
    "mixed_precision/naive.py": "a flat float32 copy",
    "plugin/ddp/averaged_gradients.py": "flat buckets and bytes",
    "plugin/ddp/gradient_reducer.py": "bytes",
    "plugin/expert_parallel.py": "counts, and contiguous rows of activations",
    "plugin/fsdp/unused_parameters.py": "bytes",
    "plugin/pipeline/pipeline.py": "a float32 number",
    "plugin/sequence_parallel/all_to_all.py": "parts for each rank, laid out anew",
    "update/distributed_muon.py": "flat bfloat16 copies",
    "plugin/zero.py": "flat buckets",
    "ranks/agreement.py": "bytes and a flag",
    "shards/dtensor.py": "a float64 sum",
    "shards/fp8_gather.py": "flat bytes, and float32 magnitudes",
    "shards/zero_buckets.py": "flat buckets",
    "shards/zero_states.py": "bytes",
}
_COLLECTIVE = {
    "broadcast",
    "all_reduce",
    "all_gather",
    "reduce",
    "gather",
    "scatter",
    "all_to_all_single",
    "reduce_scatter",
}


def test_whoever_hands_memory_to_a_backend_made_it():
    """A backend sends memory as it is, and knows some dtypes: tensors of users go through `ranks.communicate`."""
    found = {
        str(path.relative_to(ROOT))
        for path in FILES
        for node in nodes_of(path)
        if (isinstance(node, ast.Name) and node.id == "all_gather_flat")
        or (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "dist"
            and (node.attr in _COLLECTIVE or node.attr.endswith(("_into_tensor", "_tensor")))
        )
    }
    assert found == set(SENDS_ITS_OWN)
