"""The files of `examples/extending`, as modules, in whatever process asks."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "extending"


def load(name: str) -> ModuleType:
    """The example of that name; executed once in a process, because it registers what it holds."""
    full = f"examples_extending_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, FOLDER / f"{name}.py")
        module = sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[full]
