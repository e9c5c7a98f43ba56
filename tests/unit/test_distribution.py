"""What is released: the wheel and the source distribution, their metadata, and the texts that must agree with them.

The two are built here by the build backend, without network, from a copy of the tree. `make dist` sets BOOSTER_DIST to test
those that it built.
"""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import booster

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
SOURCES = ["booster", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"]
SOURCES += ["CONTRIBUTING.md", "SECURITY.md", "THIRD_PARTY.md", "constraints.txt", "constraints-min.txt"]
BUILD = "import sys; from setuptools import build_meta as b; out = sys.argv[1]; b.build_sdist(out); b.build_wheel(out)"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the wheel and the sdist."""
    if "BOOSTER_DIST" in os.environ:
        return ROOT / os.environ["BOOSTER_DIST"]
    if int(metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("needs setuptools>=77, the build backend")
    tree = tmp_path_factory.mktemp("tree")
    for name in [*SOURCES, "tests", "examples", "docs", "benchmarks"]:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.xz", "*.json"))
        else:
            shutil.copy(ROOT / name, tree / name)
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=tree, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def sdist(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        yield {name.partition("/")[2]: archive.getmember(name) for name in archive.getnames()}


@pytest.mark.slow
def test_the_wheel_has_every_module_and_nothing_else(wheel):
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "booster").rglob("*.py")}
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert inside == modules | {"booster/py.typed"}


@pytest.mark.slow
def test_the_wheel_carries_the_licence_and_that_of_others(wheel):
    info = f"booster_amp-{booster.__version__}.dist-info"
    for name in ("LICENSE", "THIRD_PARTY.md"):
        assert wheel.read(f"{info}/licenses/{name}") == (ROOT / name).read_bytes()


@pytest.mark.slow
def test_the_metadata_says_version_python_torch_and_the_command(wheel):
    info = f"booster_amp-{booster.__version__}.dist-info"
    said = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert said["Name"] == "booster-amp"
    assert said["Version"] == booster.__version__
    assert said["Requires-Python"] == ">=3.10"
    assert said["License-Expression"] == "MIT"
    required = [line for line in said.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(required) == 1
    assert required[0].startswith("torch")
    assert "booster = booster.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()


@pytest.mark.slow
def test_both_distributions_are_small(wheel, sdist):
    assert sum(entry.compress_size for entry in wheel.infolist()) < 1.5e6
    assert sum(entry.size for entry in sdist.values()) < 4e6


@pytest.mark.slow
def test_the_source_distribution_has_what_builds_the_wheel_and_no_tests_or_data(sdist, wheel):
    assert {name for name in wheel.namelist() if name.startswith("booster/")} <= set(sdist)
    for name in SOURCES[1:]:
        assert name in sdist, name
    folders = {name.partition("/")[0] for name in sdist if "/" in name}
    assert folders == {"booster", "booster_amp.egg-info"}


@pytest.mark.slow
def test_twine_finds_nothing_wrong(built):
    pytest.importorskip("twine", reason="needs twine: pip install twine")
    files = [str(path) for path in built.glob("*")]
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- texts that must agree ----


def test_every_place_names_the_same_version():
    assert re.search(r'^version = "(.*)"', PYPROJECT, re.M)[1] == booster.__version__
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == booster.__version__


def test_the_citation_file_has_what_its_schema_requires():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["license"] == re.search(r'^license = "(.*)"', PYPROJECT, re.M)[1]


def required_packages():
    """Distributions that pyproject.toml names, with their least version where it gives one."""
    lists = re.findall(r"^(?:dependencies|\w+) = \[(.*)\]", PYPROJECT, re.M)
    entries = [entry for text in lists for entry in re.findall(r'"([\w.-]+)(?:\[\w+\])?(?:>=([\d.]+))[^"]*"', text)]
    return {name: least for name, least in entries if name != "setuptools"}


def licences():
    rows = re.findall(r"^\| ([\w.-]+) \| ([^|]+) \|", (ROOT / "THIRD_PARTY.md").read_text(), re.M)
    return {name: licence.strip() for name, licence in rows if name != "package"}


def test_every_package_that_is_required_or_optional_is_in_the_list_of_licences():
    assert set(required_packages()) == set(licences())


def test_the_list_of_licences_says_what_the_packages_say_of_themselves():
    wrong = {}
    for name, licence in licences().items():
        try:
            said = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue
        texts = [said.get("License-Expression"), said.get("License"), *(said.get_all("Classifier") or [])]
        own = " ".join(text for text in texts if text and ("licen" in text.lower() or text in texts[:2]))
        family = re.split(r"[-, ]", licence)[0]
        if family.lower() not in own.lower():
            wrong[name] = (licence, own[:100])
    assert not wrong


def test_the_least_versions_of_constraints_are_those_of_pyproject():
    least = required_packages()
    pinned = dict(re.findall(r"^([\w.-]+)==([\d.]+)", (ROOT / "constraints-min.txt").read_text(), re.M))
    assert {"torch", "safetensors", "xxhash"} <= set(pinned)
    for name, version in pinned.items():
        assert version.startswith(least[name]), f"{name}: {version} is not the least, {least[name]}"


# ---- continuous integration elsewhere ----


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.stem)
def test_every_workflow_and_form_is_yaml_and_calls_targets_that_exist(path):
    parsed = yaml.safe_load(path.read_text())
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    if path.parent.name == "workflows":
        commands = [step["run"] for job in parsed["jobs"].values() for step in job["steps"] if "run" in step]
        called = {target for command in commands for target in re.findall(r"\bmake (\w+)", command)}
        assert commands
        assert called <= targets
        assert all(command.startswith("make ") for command in commands)
        actions = [step["uses"] for job in parsed["jobs"].values() for step in job["steps"] if "uses" in step]
        # A tag can be moved to other code by whoever takes over the action's repository; a commit cannot.
        assert [action for action in actions if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []


def test_a_bug_report_asks_for_what_the_env_command_prints():
    assert "booster env" in (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text()
