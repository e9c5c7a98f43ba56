"""Saving: everything of a run into one folder that appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from booster.checkpoint.agree import agree_on_success, exchange
from booster.checkpoint.collect import collect
from booster.checkpoint.folder import checkpoints, prune, publish, staging_folder, write_synced
from booster.checkpoint.manifest import MANIFEST, File, Manifest
from booster.checkpoint.parts import Parts
from booster.checkpoint.storage import ManifestWriter
from booster.installed import version_of

STATE = "state.json"


def save(
    root: str | os.PathLike[str],
    parts: Parts,
    *,
    step: int | None,
    keep_last: int | None,
    run: Mapping[str, Any],
    group: dist.ProcessGroup | None,
) -> Path:
    """Write one checkpoint below `root`; returns its folder. A collective over `group`.

    If it raises, on any rank, it raises on all, and `root` holds what it held before.
    """
    rank = 0 if group is None else dist.get_rank(group)
    root = Path(root)
    tensors, tree = collect(parts, run, group)
    problem: BaseException | None = None
    told: list[Any] = [None, None]
    if rank == 0:
        try:
            step = next((found + 1 for found, _ in checkpoints(root)), 0) if step is None else step
            told = [str(staging_folder(root, step)), step]
        except OSError as error:
            problem = error
    agree_on_success(problem, group, "saving a checkpoint")
    (staging, step), *_ = exchange(told, group)
    folder = Path(staging)
    writer = ManifestWriter(
        folder,
        make_manifest=lambda files, stored: Manifest(step, len(tree["random"]), _versions(), files, stored),
        other_files=_write_state(folder / STATE, tree) if rank == 0 else {},
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save(
            tensors,
            storage_writer=writer,
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
            process_group=group,
            no_dist=group is None,
        )
    if rank == 0:
        try:
            write_synced(folder / MANIFEST, writer.manifest.dumps())  # type: ignore[union-attr]
            publish(folder, root, step)
            if keep_last is not None:
                prune(root, keep_last)
        except OSError as error:
            problem = error
    agree_on_success(problem, group, "saving a checkpoint")
    return root / folder.name[1:].partition(".")[0]


def _write_state(path: Path, tree: dict[str, Any]) -> dict[str, File]:
    data = json.dumps(tree, allow_nan=False, separators=(",", ":")).encode()
    write_synced(path, data)
    return {path.name: File(len(data), hashlib.sha256(data).hexdigest())}


def _versions() -> dict[str, str]:
    return {"booster": version_of("booster-amp") or "unknown", "torch": str(torch.__version__)}
