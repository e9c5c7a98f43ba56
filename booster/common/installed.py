"""What is installed: versions, and which of the packages called `apex` one has, found without importing them."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import re
import sys
from dataclasses import dataclass
from pathlib import Path

_logger = logging.getLogger(__name__)

_TRIED = ((2, 11), (2, 15))  # of torch: the first and the last release that tests were run on
_AMP_FILES = ("frontend.py", "_initialize.py")

# The name of three different things; the message says which one is there and what follows from it.
_MESSAGES = {
    "absent": "not installed (not needed: fp16_apex has its own engine)",
    "with_amp": "NVIDIA/ROCm apex with apex.amp",
    "without_amp": (
        "NVIDIA apex without apex.amp, which was removed on 2025-05-08 (not needed: fp16_apex has its own engine)"
    ),
    "unrelated": "the unrelated web toolkit of that name from PyPI, not NVIDIA's; remove it with `pip uninstall apex`",
    "unknown": "a package called apex that is neither NVIDIA's nor the web toolkit",
}


@dataclass(frozen=True)
class ApexFinding:
    """kind: absent, with_amp, without_amp, unrelated or unknown; message: the same in words."""

    kind: str
    location: str | None = None
    version: str | None = None

    @property
    def message(self) -> str:
        return _MESSAGES[self.kind]


def tell_untried(torch: str) -> None:
    """Say, in one WARNING, that this library was not tried on the torch of version `torch`, such as "2.16.0+cpu"."""
    numbers = re.match(r"(\d+)\.(\d+)", torch)
    release = tuple(map(int, numbers.groups())) if numbers else None
    if release is None or not _TRIED[0] <= release <= _TRIED[1]:
        first, last = (f"{major}.{minor}" for major, minor in _TRIED)
        _logger.warning(
            "this release was tried on torch %s to %s, not on %s: look for a newer one, or run its tests before you trust it",
            first,
            last,
            torch,
        )


def version_of(distribution: str) -> str | None:
    """Return the installed version of `distribution`, or None; imports nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_apex(path: list[str] | None = None) -> ApexFinding:
    """Say which `apex` an import would find, by its files and metadata alone.

    path: folders to look in; None means wherever an import would look, editable installs included.
    """
    # Importing it to see would run the web toolkit's own imports, which fail on current systems.
    spec = _find_spec("apex") if path is None else importlib.machinery.PathFinder.find_spec("apex", path)
    if spec is None:
        return ApexFinding("absent")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    location = str(folders[0]) if folders else spec.origin
    metadata = next(iter(importlib.metadata.distributions(name="apex", path=sys.path if path is None else path)), None)
    version = metadata.version if metadata is not None else None
    required = {
        re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0].lower() for text in (metadata and metadata.requires) or []
    }
    if required & {"pyramid", "velruse"} or (version or "").startswith("0.9"):
        return ApexFinding("unrelated", location, version)
    if any(all((folder / "amp" / name).is_file() for name in _AMP_FILES) for folder in folders):
        return ApexFinding("with_amp", location, version)
    if any((folder / "normalization").is_dir() and (folder / "optimizers").is_dir() for folder in folders):
        return ApexFinding("without_amp", location, version)
    return ApexFinding("unknown", location, version)


def _find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # imported already, by something that gave it no spec
        return importlib.machinery.PathFinder.find_spec(name)
