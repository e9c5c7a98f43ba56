"""The checkpoints of one Booster: written now or while training goes on, loaded, and asked for by signals."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster import arguments
from booster.checkpoint.background import Background
from booster.checkpoint.parts import Loaded, Parts, check_no_gradients_wait, parts
from booster.checkpoint.stopping import StopRequests
from booster.interface.model import ModelWrapper

Given = tuple[Any, Any, Any, Any, Any, Any]
"""Model, optimizer, criterion, dataloader, lr_scheduler and extra, as the methods of Booster take them."""


class RunCheckpoints:
    """Saves and loads the objects that the methods of `Booster` are given; their docstrings say what each does.

    group: the ranks of the plugin. run: what is written down of the job, for people. carried: see `Plugin.carried`. What it
    needs of `torch.distributed.checkpoint` is imported when it is called: that takes time that most scripts need not spend.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        run: Mapping[str, str],
        carried: Callable[[nn.Module], dict[torch.Tensor, torch.Tensor] | None],
    ) -> None:
        self._group, self._run, self._carried = group, run, carried
        self._background = Background()
        self._stop_requests = StopRequests()

    def save(
        self, folder: str | os.PathLike[str], given: Given, *, step: Any, keep_last: Any, async_save: bool
    ) -> Path:
        from booster.checkpoint.saving import reserve, snapshot, write

        root = arguments.path("folder", folder)
        step = None if step is None else arguments.count("step", step, least=0, also="None")
        keep_last = None if keep_last is None else arguments.count("keep_last", keep_last, also="None for all")
        arguments.flag("async_save", async_save)
        self.wait()
        found = self._parts(given)
        check_no_gradients_wait(found)
        group = self._group
        taken = snapshot(found, self._run, group)
        final, step = reserve(root, step, group)
        if not async_save:
            return write(final, taken, step=step, keep_last=keep_last, group=group)
        taken, writers = taken.copied(), None if group is None else self._background.group()
        self._background.start(lambda: write(final, taken, step=step, keep_last=keep_last, group=writers))
        return final

    def save_part(self, path: str | os.PathLike[str], *, optimizer: Any = None, lr_scheduler: Any = None) -> None:
        """Write the states of these alone as the checkpoint folder `path`."""
        from booster.checkpoint.saving import snapshot, write

        root = arguments.path("path", path)
        taken = snapshot(parts(None, optimizer, None, None, lr_scheduler, None), {}, self._group)
        write(root, taken, step=0, keep_last=None, group=self._group)

    def wait(self) -> None:
        self._background.wait()

    def load(self, folder: str | os.PathLike[str], given: Given, *, strict: bool) -> Loaded:
        from booster.checkpoint.loading import load

        root = arguments.path("folder", folder)
        arguments.flag("strict", strict)
        self.wait()
        found = self._parts(given)
        return load(root, found, strict=strict, group=self._group)

    def _parts(self, given: Given) -> Parts:
        found = parts(*given)
        carried = {name: self._carried(model.module) for name, model in found.models.items()}
        return replace(found, carried={name: own for name, own in carried.items() if own is not None})

    def resume_or_start(self, folder: str | os.PathLike[str], given: Given) -> Loaded:
        from booster.checkpoint.loading import anything_in

        root = arguments.path("folder", folder)
        parts(*given)  # wrong objects are errors now, not later
        self._stop_requests.listen()
        self.wait()
        if not anything_in(root, self._group):
            return Loaded(0, given[-1], None)
        return self.load(folder, given, strict=True)

    def stop_requested(self) -> bool:
        return self._stop_requests.requested(self._group)

    def save_model(
        self,
        model: ModelWrapper,
        path: str | os.PathLike[str],
        *,
        shard: bool,
        prefix: str | None,
        size_per_shard: int,
        use_safetensors: bool,
    ) -> None:
        from booster.checkpoint.saving import save_weights

        save_weights(
            model,
            arguments.path("path", path),
            group=self._group,
            shard=arguments.flag("shard", shard),
            prefix=None if prefix is None else arguments.text("prefix", prefix, also="None"),
            size_per_shard=arguments.count("size_per_shard", size_per_shard, what="of MB"),
            use_safetensors=arguments.flag("use_safetensors", use_safetensors),
        )

    def load_model(self, model: ModelWrapper, path: str | os.PathLike[str], *, strict: bool) -> None:
        from booster.checkpoint.loading import load_model

        file = arguments.path("path", path)
        load_model(model, file, strict=arguments.flag("strict", strict), group=self._group)
