"""Training jobs by name: a model of timm or transformers, or what a file of the user's defines, or a function returns."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.common import arguments
from booster.memory.estimate import resized

_BATCH = {"timm": 32, "transformers": 8}
PARTS = ("model_fn", "batch", "criterion", "optimizer_fn")
_ASKED = (
    f"it needs {', '.join(PARTS)}: optimizer_fn takes the model that model_fn makes; or a function that returns these as a "
    "dict, or (model, optimizer, batch, criterion)"
)
_LENGTH = 512


@dataclass(frozen=True)
class Job:
    """What `estimate` is given.

    model, optimizer: not boosted.
    batch: of one rank, (inputs..., target), or a mapping that the model takes by keyword and the criterion whole.
    criterion: a function of output and target.
    """

    model: nn.Module
    optimizer: Optimizer
    batch: Any
    criterion: Callable[..., Any]


def named_job(what: str, batch_size: int | None = None) -> Job:
    """Return the job that `what` names, its model without memory where a package makes it.

    what: "timm:NAME" is a classifier of images of its size, with AdamW, batches of 32. "transformers:NAME" is a model type,
        as "gpt2", of its default size, or what `AutoConfig.from_pretrained` takes; it predicts tokens, or classes of images,
        with AdamW, batches of 8, at most 512 tokens. Else what `named_parts` takes, in any memory.
    batch_size: of one rank, in place of those; None leaves them.

    Raises ValueError for a name that means none of these, ImportError where the package is missing, and what FUNCTION raises.
    """
    where, _, name = what.rpartition(":")
    makers = {"timm": _of_timm, "transformers": _of_transformers}
    if where in makers and name:
        try:
            importlib.import_module(where)
        except ImportError as error:
            raise ImportError(f"models of {where} need it: pip install {where}") from error
        return makers[where](name, batch_size or _BATCH[where])
    parts = named_parts(what)
    model, batch = parts["model_fn"](), parts["batch"]
    return Job(
        model,
        parts["optimizer_fn"](model),
        batch if batch_size is None else resized(batch, batch_size),
        parts["criterion"],
    )


def named_parts(what: str) -> dict[str, Any]:
    """Return model_fn, batch, criterion and optimizer_fn of the job that `what` names.

    what: "FILE.py", which defines these four; or "FILE.py:FUNCTION" or "MODULE:FUNCTION", called without arguments for a dict
        of them, or for (model, optimizer, batch, criterion), and then again for each model. A file runs under its own name
        instead of "__main__", so that it does not train.

    Raises ValueError or TypeError for what is none of these, and what the file or the function raises.
    """
    where, _, name = (what, "", "") if what.endswith(".py") else what.rpartition(":")
    if not where or not (name or where.endswith(".py")):
        raise ValueError(
            f"{what!r} names no job; give FILE.py, FILE.py:FUNCTION or MODULE:FUNCTION, or, to estimate it alone, timm:NAME or "
            "transformers:NAME"
        )
    module = _of_file(Path(where)) if where.endswith(".py") else _imported(where)
    if not name:
        return _checked(what, vars(module))
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{where} has no function {name!r}")
    made = function()
    if isinstance(made, Mapping):
        return _checked(what, made)
    if not isinstance(made, (tuple, list)) or len(made) != 4:
        raise ValueError(f"{what} returned {arguments.described(made)}; {_ASKED}")
    # The model of this first call is dropped before another is made: two of them might not fit.
    _, _, batch, criterion = made
    made = None
    latest: list[Any] = []

    def model_fn() -> nn.Module:  # anew each time, so that random weights are those of the seed that was set before
        latest[:] = function()[:2]
        return latest[0]

    return {"model_fn": model_fn, "batch": batch, "criterion": criterion, "optimizer_fn": lambda model: latest[1]}


def _checked(what: str, names: Mapping[str, Any]) -> dict[str, Any]:
    missing = [name for name in PARTS if name not in names]
    if missing:
        raise ValueError(f"{what} does not define {', '.join(missing)}; {_ASKED}")
    return {name: names[name] for name in PARTS}


def _of_timm(name: str, size: int) -> Job:
    import timm

    # timm's own error for a wrong name is a traceback through its factory.
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}; timm.list_models() lists them")
    with torch.device("meta"):
        model: Any = timm.create_model(name)
        images = torch.empty(size, *model.default_cfg["input_size"], dtype=torch.get_default_dtype())
        batch = images, torch.empty(size, dtype=torch.long)
    return Job(model, torch.optim.AdamW(model.parameters()), batch, nn.functional.cross_entropy)


def _of_transformers(name: str, size: int) -> Job:
    transformers: Any = importlib.import_module("transformers")
    configs = transformers.CONFIG_MAPPING
    # A type of model that transformers knows needs no download.
    config = configs[name]() if name in configs else transformers.AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        model, data = _model_and_data(transformers, config, size)
    return Job(model, torch.optim.AdamW(model.parameters()), data, lambda output, batch: output.loss)


def _model_and_data(transformers: Any, config: Any, size: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    kind = type(config)
    for maker in (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM):
        if kind in maker._model_mapping:
            length = min(_LENGTH, getattr(config, "max_position_embeddings", None) or _LENGTH)
            tokens = {name: torch.empty(size, length, dtype=torch.long) for name in ("input_ids", "labels")}
            return maker.from_config(config), tokens
    maker = transformers.AutoModelForImageClassification
    if kind in maker._model_mapping:
        side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        pixels = torch.empty(size, config.num_channels, side, side, dtype=torch.get_default_dtype())
        return maker.from_config(config), {"pixel_values": pixels, "labels": torch.empty(size, dtype=torch.long)}
    raise ValueError(
        f"a {config.model_type} of transformers predicts neither tokens nor classes of images; give a function that returns "
        "(model, optimizer, batch, criterion) as MODULE:FUNCTION"
    )


def _of_file(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # a script imports its neighbours, as when python runs it
    try:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    finally:
        sys.path.remove(folder)
    return module


def _imported(name: str) -> Any:
    folder = str(Path.cwd())
    # `python -m` puts the working directory there, an installed command does not.
    added = folder not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"there is no module {name!r} ({error}); for a file give its path, FILE.py:FUNCTION"
        ) from error
    finally:
        if added:
            sys.path.remove(folder)
