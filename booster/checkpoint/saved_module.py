"""Modules, loaded: the entries of a model or criterion out of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from booster.casting import HALF_DTYPES
from booster.checkpoint.layout import placed_like
from booster.checkpoint.plain import reference
from booster.checkpoint.saved import Saved, listed
from booster.checkpoint.tensor_file import dtype_of, fits
from booster.interface.model import ModelWrapper
from booster.masters.loaded import LoadedWeights
from booster.modules import bare
from booster.tied import names_of


class SavedModule:
    """One module of the job, and its entry in the checkpoint. kind: "models" or "criteria"."""

    def __init__(self, saved: Saved, kind: str, name: str, module: nn.Module) -> None:
        self._saved, self._kind, self._name, self._module = saved, kind, name, module

    def differences(self, *, strict: bool) -> Iterator[str]:
        """Say what differs between the two; note what is to be read."""
        saved = self._saved.tree[self._kind].get(self._name)
        if saved is None:
            return
        current = self._module.state_dict()
        sources = self._sources(saved, current)
        rounded = [key for key, value in current.items() if not self._is_half(sources.get(key), value)]
        if self._kind == "models" and (untold := self._saved.whose_masters(self._name, rounded)):
            self._saved.notes.append(untold)
        missing = [key for key in current if key not in saved]
        # A rank of a pipeline holds some layers; what no rank wants cannot be seen from here.
        partial = getattr(getattr(self._module, "module", None), "is_partial", False)
        extra = [] if partial else [key for key in saved if key not in current]
        for keys, text in ((missing, "are not in the checkpoint"), (extra, "are not in this model")):
            if keys and strict:
                yield f"{self._kind} {self._name!r}: {listed(keys)} {text}"
            elif keys:
                self._saved.notes.append(f"{self._kind} {self._name!r}: {listed(keys)} {text}")
        for key, value in current.items():
            if key not in saved or not isinstance(value, torch.Tensor):
                self._saved.want_all(saved.get(key))
                continue
            entry = self._saved.entry(sources[key]) if reference(saved[key]) else None
            if entry is None or entry.shape != tuple(value.shape):
                shape = "no tensor" if entry is None else f"shape {entry.shape}"
                yield f"{self._kind} {self._name!r}: {key} has {shape} in the checkpoint and shape {tuple(value.shape)} here"
                continue
            if not fits(dtype_of(entry), value.dtype):
                yield f"{self._kind} {self._name!r}: {key} has dtype {dtype_of(entry)} in the checkpoint and {value.dtype} here"
                continue
            self._saved.want(sources[key], value)

    def state(self) -> dict[str, Any]:
        """Return what was read as the module takes it."""
        saved, current = self._saved.tree[self._kind][self._name], self._module.state_dict()
        sources, state = self._sources(saved, current), {}
        for key, value in current.items():
            if key not in saved:
                continue
            if isinstance(value, torch.Tensor):
                state[key] = placed_like(self._saved.tensor(sources[key]), value)  # type: ignore[arg-type]
            else:
                state[key] = self._saved.value(saved[key])
        return state

    def _sources(self, saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str | None]:
        """Return which tensor of the checkpoint each entry is read from: where float32 numbers stand behind it, these.

        Not if the module wants just the half weights that were saved: rounded anew, ties could become others.
        """
        sources = {key: reference(value) for key, value in saved.items()}
        wide = self._saved.masters_behind(self._kind, self._name)
        module = bare(self._module.module) if isinstance(self._module, ModelWrapper) else self._module
        for names in names_of(module).values() if "masters" not in self._saved.tree else ():
            behind = [wide[name] for name in names if name in wide]
            wide |= dict.fromkeys(names, behind[0]) if behind else {}
        watched = LoadedWeights.watched(module)
        for key in wide.keys() & sources.keys() & current.keys():
            if key in watched or not self._is_half(sources[key], current[key]):
                sources[key] = wide[key]
        return sources

    def _is_half(self, source: str | None, current: Any) -> bool:
        """Whether an entry was saved in half precision, and is wanted in the same."""
        entry = self._saved.entry(source)
        return entry is not None and dtype_of(entry) in HALF_DTYPES and current.dtype == dtype_of(entry)
