"""The checkpoints of one Booster: arguments checked, saves that go on in a thread, and requests to stop, as schedulers of
clusters send them some time before they kill.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.checkpoint.manifest import LARGEST_NUMBER, CheckpointError
from booster.checkpoint.objects import Loaded, Objects, check_no_gradients_wait, named
from booster.common import arguments
from booster.interface.model import ModelWrapper
from booster.model.modules import bare
from booster.ranks.agreement import any_rank

_logger = logging.getLogger(__name__)


class BackgroundWriter:
    """One thread that writes, with a process group of its own, so that its collectives never meet those of training."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._group: dist.ProcessGroup | None = None

    def group(self) -> dist.ProcessGroup:
        """Return the writing thread's process group; a collective the first time."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
            # At exit torch ends all groups, in its own order.
            weakref.finalize(self, _end, self._group).atexit = False
        return self._group

    def start(self, write: Callable[[], object]) -> None:
        """Run `write` in the thread. It is not a daemon: the interpreter waits for it before it ends."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="booster-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for what is being written; raises the CheckpointError of a write that failed since the last call."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:
            # Raised by the next call; logged at once, since there may be none.
            _logger.error("%s", error)
            self._error = error if isinstance(error, CheckpointError) else CheckpointError(f"saving failed: {error!r}")
            self._error.__cause__ = None if self._error is error else error


def _end(group: dist.ProcessGroup) -> None:
    """Free the threads and connections of `group`. A thread that still writes holds the `BackgroundWriter`, so none does."""
    if dist.is_initialized():
        with suppress(ValueError):  # where all groups were destroyed since, and made anew
            dist.destroy_process_group(group)


SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class _SignalHandler:
    """Notes a signal in `requests`, while that is there, and calls the handler from before, less those that note nothing more:
    of a thousand boosters made one after another each would else call the last."""

    def __init__(self, requests: StopRequests, before: Any) -> None:
        self._requests = weakref.ref(requests)
        while isinstance(before, _SignalHandler) and before._requests() is None:
            before = before._before
        self._before: Any = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        requests = self._requests()
        if requests is not None:
            requests.received = True
        if callable(self._before):
            self._before(number, frame)


class StopRequests:
    """Notes SIGTERM and SIGUSR1 instead of dying of them. Ranks agree: a request to one is a request to all."""

    def __init__(self) -> None:
        self.received = False
        self._listens = False

    def listen(self) -> None:
        """Install the handlers, once; a handler of the user's is still called. Raises RuntimeError outside the main thread."""
        if self._listens:
            return
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("signals can be listened to from the main thread alone; call resume_or_start there")
        for number in SIGNALS:
            signal.signal(number, _SignalHandler(self, signal.getsignal(number)))
        self._listens = True

    def requested(self, group: dist.ProcessGroup | None) -> bool:
        """Return whether any rank was asked to stop; one scalar MAX all-reduce, and a host read."""
        return any_rank(self.received, group)


Given = tuple[Any, Any, Any, Any, Any, Any]
"""Model, optimizer, criterion, dataloader, lr_scheduler and extra, as the methods of Booster take them."""


class RunCheckpoints:
    """Saves and loads the objects that the methods of `Booster` are given; their docstrings say what each does.

    group: the ranks of the plugin. run: what is written down of the job, for people. carried: see `Plugin.carried`. What needs
    `torch.distributed.checkpoint` is imported when it is called: that takes time that most scripts need not spend.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        run: Mapping[str, Any],
        carried: Callable[[nn.Module], dict[torch.Tensor, torch.Tensor] | None],
    ) -> None:
        self._group, self._run, self._carried = group, run, carried
        self._background = BackgroundWriter()
        self._stop_requests = StopRequests()

    def note(self, **known: Any) -> None:
        """Write down from now on what is `known` of the run, JSON-like."""
        self._run = {**self._run, **known}

    def save(
        self, folder: str | os.PathLike[str], given: Given, *, step: Any, keep_last: Any, async_save: bool, frozen: bool
    ) -> Path:
        from booster.checkpoint.parts.part import WITHOUT_FROZEN
        from booster.checkpoint.saving import collect_state, reserve, write

        root = arguments.path("folder", folder)
        step = None if step is None else arguments.count("step", step, least=0, most=LARGEST_NUMBER, also="None")
        keep_last = None if keep_last is None else arguments.count("keep_last", keep_last, also="None for all")
        arguments.flag("async_save", async_save)
        run = self._run if arguments.flag("frozen", frozen) else {**self._run, **WITHOUT_FROZEN}
        self.wait()
        found = self._objects(given)
        check_no_gradients_wait(found)
        group = self._group
        taken = collect_state(found, run, group)
        final, step = reserve(root, step, group)
        if not async_save:
            return write(final, taken, step=step, keep_last=keep_last, group=group, objects=found)
        # Copies, because training goes on; a group of its own, because collectives of two threads would meet.
        taken, writers = taken.copied(), None if group is None else self._background.group()
        self._background.start(lambda: write(final, taken, step=step, keep_last=keep_last, group=writers))
        return final

    def save_part(self, path: str | os.PathLike[str], *, optimizer: Any = None, lr_scheduler: Any = None) -> None:
        """Write the states of these alone as the checkpoint folder `path`."""
        from booster.checkpoint.saving import collect_state, write

        root = arguments.path("path", path)
        found = named(None, optimizer, None, None, lr_scheduler, None)
        taken = collect_state(found, {}, self._group)
        write(root, taken, step=0, keep_last=None, group=self._group, objects=found)

    def wait(self) -> None:
        self._background.wait()

    @torch.inference_mode(False)  # which tensors that are made within it would not leave: no step could write to them
    @torch.no_grad()
    def load(self, folder: str | os.PathLike[str], given: Given, *, strict: bool) -> Loaded:
        from booster.checkpoint.loading import load

        root = arguments.path("folder", folder)
        arguments.flag("strict", strict)
        self.wait()
        found = self._objects(given)
        return load(root, found, strict=strict, group=self._group)

    def _objects(self, given: Given) -> Objects:
        found = named(*given)
        carried = {name: self._carried(model.module) for name, model in found.models.items()}
        return replace(found, carried={name: own for name, own in carried.items() if own is not None})

    def resume_or_start(self, folder: str | os.PathLike[str], given: Given) -> Loaded:
        from booster.checkpoint.loading import anything_in

        root = arguments.path("folder", folder)
        named(*given)  # wrong objects are errors now, not later
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
        weights: Any,
        half: torch.dtype | None,
        wide: torch.dtype,
        merge: bool,
    ) -> None:
        from booster.checkpoint.adapters import check_merges, merged
        from booster.checkpoint.exported_files import FileOptions
        from booster.checkpoint.serving import check_served, save_weights

        arguments.flag("shard", shard)
        arguments.flag("use_safetensors", use_safetensors)
        own = bare(model.module)
        check_served(own, weights, shard=shard, use_safetensors=use_safetensors)
        if arguments.flag("merge", merge):
            check_merges(own)
        file = arguments.path("path", path)
        prefix = None if prefix is None else arguments.text("prefix", prefix, also="None")
        size_per_shard = arguments.count("size_per_shard", size_per_shard, what="of MB")
        files = FileOptions(shard, prefix, size_per_shard, use_safetensors)
        adapters = merged if merge else None
        save_weights(model, file, group=self._group, files=files, weights=weights, half=half, wide=wide, merge=adapters)

    def save_lora(self, model: ModelWrapper, folder: str | os.PathLike[str]) -> None:
        from booster.checkpoint.adapters import save_adapters

        save_adapters(model, arguments.path("folder", folder), self._group)

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_model(self, model: ModelWrapper, path: str | os.PathLike[str], *, strict: bool) -> None:
        from booster.checkpoint.loading import load_model

        file = arguments.path("path", path)
        load_model(model, file, strict=arguments.flag("strict", strict), group=self._group)
