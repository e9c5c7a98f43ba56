"""Whether `fp16_apex` runs on its own engine or on the real apex.amp, which few installations still have."""

from __future__ import annotations

import importlib
import inspect
import logging
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from booster.installed import ApexFinding, find_apex

_logger = logging.getLogger(__name__)

LAST_COMMIT = "e13873debc4699d39c6861074b9a3b2a02327f92"

_WHY_NOT = {
    "absent": "apex is not installed",
    "without_amp": (
        "the apex at {location} has no apex.amp: NVIDIA removed it on 2025-05-08, and its last commit with it is "
        f"{LAST_COMMIT[:8]}"
    ),
    "unrelated": (
        "the package called apex at {location} is a web toolkit from PyPI and not NVIDIA's, which is not on PyPI; "
        "`pip uninstall apex` removes it"
    ),
    "unknown": "the package called apex at {location} is not NVIDIA's",
}


class Backend(NamedTuple):
    """amp: the module apex.amp, or None for the own engine. reason: why."""

    amp: Any
    reason: str


def choose_backend(asked: str, device: torch.device, *, patches: bool, alone: bool, keywords: set[str]) -> Backend:
    """The engine for models on `device`, and one log line that says so.

    asked: "native", "apex" or "auto", which takes apex where it can work: on CUDA, in a process `alone`, an apex.amp
    that has `keywords` and, if it `patches` functions, casts a weight twice. Nothing that is not NVIDIA's is imported.
    Raises ImportError for "apex" where there is none that works.
    """
    if asked == "native":
        chosen = Backend(None, "as backend='native' asks")
        finding = ApexFinding("absent")
    else:
        finding = find_apex()
        chosen = _find(finding, device, asked, patches=patches, alone=alone, keywords=keywords)
    if asked == "apex" and chosen.amp is None:
        raise ImportError(
            f"backend='apex' needs an apex with apex.amp, but {chosen.reason}. Build commit {LAST_COMMIT} of "
            "github.com/NVIDIA/apex (the `apex` of PyPI is another project), or use backend='native', which needs no apex"
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        level = logging.WARNING if finding.kind == "unrelated" else logging.INFO
        engine = "its own engine" if chosen.amp is None else "the real apex.amp"
        _logger.log(level, "fp16_apex runs on %s: %s", engine, chosen.reason)
    return chosen


def _find(
    finding: ApexFinding, device: torch.device, asked: str, *, patches: bool, alone: bool, keywords: set[str]
) -> Backend:
    if finding.kind != "with_amp":
        return Backend(None, _WHY_NOT[finding.kind].format(location=finding.location))
    if asked == "auto" and not alone:
        return Backend(None, "the apex.amp that is installed knows nothing of how ranks share this model")
    if asked == "auto" and device.type != "cuda":
        return Backend(None, "the apex.amp that is installed runs on CUDA only, and the model does not")
    try:
        amp = importlib.import_module("apex.amp")
        missing = keywords - set(inspect.signature(amp.initialize).parameters)
        if missing:
            return Backend(None, f"the apex.amp at {finding.location} has no {sorted(missing)}")
    except Exception as error:  # undefined symbols, missing kernels, whatever an old build does
        return Backend(None, f"the apex.amp at {finding.location} does not import: {type(error).__name__}: {error}")
    if patches:
        try:
            _cast_twice(device)
        except Exception as error:
            return Backend(
                None,
                f"the apex.amp at {finding.location} fails with this torch when a weight is used twice: "
                f"{type(error).__name__}: {error}",
            )
    return Backend(amp, f"found at {finding.location}")


def _cast_twice(device: torch.device) -> None:
    utils = importlib.import_module("apex.amp.utils")
    param, cache = nn.Parameter(torch.ones(1, dtype=torch.float32, device=device)), {}  # type: ignore[var-annotated]
    for _ in range(2):
        utils.cached_cast(utils.maybe_half, param, cache)
