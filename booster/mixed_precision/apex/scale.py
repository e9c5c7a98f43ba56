"""The loss scales of apex: one for each loss, moved by every backward pass, shared by all optimizers of a strategy."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from booster.common import arguments
from booster.loss_scaler import SMALLEST_SCALE, LossScaler

_logger = logging.getLogger(__name__)

INIT_SCALE = 2.0**16


class ApexScale:
    """One loss scale. `found_inf` overflows halve it, and skip the step; `window` clean passes in a row double it.

    A static one is a number: nothing is checked, nothing skipped. minimum: None or 0 is no floor, so it may fall below 1.
    It stops at 2**-126: the inverse of that is the last that float32 holds.
    """

    def __init__(
        self, loss_scale: float | str, *, minimum: float | None = None, maximum: float = 2.0**24, window: int = 2000
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self.scale = min(maximum, INIT_SCALE) if self.dynamic else float(loss_scale)
        self.unskipped = 0
        self._minimum = minimum
        self._maximum = maximum
        self._window = window
        self._warned = False

    @property
    def is_null(self) -> bool:
        """Whether it does nothing: a static 1."""
        return not self.dynamic and self.scale == 1.0

    def is_alike(self, other: ApexScale) -> bool:
        """Whether both began with the same options."""
        mine, others = (
            (s.dynamic, *((s._minimum, s._maximum, s._window) if s.dynamic else (s.scale,))) for s in (self, other)
        )
        return mine == others

    def update(self, found_inf: bool) -> bool:
        """Take note of one backward pass; returns whether the step is to be skipped."""
        skip = found_inf and self.dynamic
        if skip:
            self.scale = max(self.scale / 2.0, self._minimum or SMALLEST_SCALE)
            self.unskipped = 0
            if self.scale < 1.0 and not self._warned:
                self._warned = True
                _logger.warning(
                    "the loss scale fell below 1, to %g: gradients overflow without any scaling. As in apex it goes on "
                    "falling; min_loss_scale=1 would stop it",
                    self.scale,
                )
        else:
            self.unskipped += 1
        # As apex, which counts clean passes of a static scale too, and never moves it.
        if self.unskipped == self._window and self.dynamic:
            self.scale = min(self._maximum, self.scale * 2.0)
            self.unskipped = 0
        return skip

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scale": self.scale, "unskipped": self.unskipped}


class ApexScales(LossScaler):
    """All loss scales of a strategy. What one optimizer step did does not move them; passes do, see `ApexScale.update`."""

    def __init__(self, scales: list[ApexScale]) -> None:
        self._scales = scales

    def __getitem__(self, loss_id: int) -> ApexScale:
        """The scale of a loss; IndexError beyond the last."""
        if not arguments.is_whole(loss_id):
            raise TypeError(arguments.refusal("loss_id", loss_id, "the number of a loss scaler, from 0"))
        if not 0 <= loss_id < len(self._scales):
            raise IndexError(
                f"loss_id={loss_id} is not legal: there are num_losses={len(self._scales)} loss scalers, from number 0"
            )
        return self._scales[loss_id]

    def __len__(self) -> int:
        return len(self._scales)

    def is_alike(self, other: ApexScales) -> bool:
        """Whether there are as many scales, with the same options."""
        return len(self) == len(other) and self[0].is_alike(other[0])

    @property
    def enabled(self) -> bool:  # type: ignore[override]
        return not self._scales[0].is_null

    @property
    def scale(self) -> float:
        """That of loss 0."""
        return self._scales[0].scale

    def describe(self) -> str:
        return ", ".join(f"{scale.scale:g}" for scale in self._scales)

    def state_dict(self) -> dict[str, Any]:
        """As `amp_state_dict`, and whether each is dynamic."""
        entries = zip(self.amp_state_dict().items(), self._scales, strict=True)
        return OrderedDict((key, {**entry, "dynamic": scale.dynamic}) for (key, entry), scale in entries)

    def amp_state_dict(self) -> dict[str, Any]:
        """In apex's format: `loss_scaler0`, `loss_scaler1` and so on, each with `loss_scale` and `unskipped`."""
        return OrderedDict((f"loss_scaler{index}", scale.state_dict()) for index, scale in enumerate(self._scales))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` or apex gave; if the number of scales differs a WARNING says so, and those that fit load."""
        good, unexpected = _entries(state)
        if unexpected or not state:
            raise ValueError(
                f"the loss-scaler state holds {sorted(map(str, state))}, where fp16_apex keeps loss_scaler0 and so on, each "
                "with a positive loss_scale and unskipped; resume with the precision that wrote it, or delete that entry to "
                "start over"
            )
        kinds = [value.get("dynamic") for value in state.values()]
        kept = []
        for index, (mine, (scale, _), dynamic) in enumerate(zip(self._scales, good, kinds, strict=False)):
            if (dynamic is False) if mine.dynamic else (scale != mine.scale):
                # A static scale stays the number that it is, and a dynamic one does not take over a static one's: one WARNING
                # says so.
                good[index] = (mine.scale, mine.unskipped)
                kept.append(f"{mine.scale:g} instead of {scale:g}")
        if kept:
            _logger.warning(
                "the checkpoint's loss scale is not loaded, because %s: this run keeps %s",
                "this run's is dynamic and that one was static" if self._scales[0].dynamic else "this run's is static",
                ", ".join(kept),
            )
        self._load(good)

    def load_amp_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `load_state_dict`, but as apex's own: RuntimeError for entries that are no loss scaler's, the others loaded."""
        good, unexpected = _entries(state)
        self._load(good)
        if unexpected:
            keys = ", ".join(f'"{key}"' for key in unexpected)
            raise RuntimeError(f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {keys}. ")

    def _load(self, entries: list[tuple[float, int]]) -> None:
        count = len(self._scales)
        if len(entries) != count:
            _logger.warning("state_dict contains %d entries, while %d loss_scalers are used", len(entries), count)
        for index, entry in enumerate(entries):
            if index < count:
                self._scales[index].scale, self._scales[index].unskipped = entry
            else:
                _logger.warning("Skipping loss_scaler[%d], since num_losses was set to %d", index, count)


def _entries(state: Mapping[str, Any]) -> tuple[list[tuple[float, int]], list[str]]:
    """(scale, unskipped) of every loss scaler in `state`, and the keys of what is none."""
    good, unexpected = [], []
    for key, value in state.items():
        entry = value if isinstance(value, Mapping) else {}
        scale, unskipped = entry.get("loss_scale"), entry.get("unskipped")
        counted = arguments.is_whole(unskipped) and unskipped >= 0
        if "loss_scaler" in str(key) and counted and arguments.is_number(scale) and scale > 0:
            good.append((float(scale), int(unskipped)))  # type: ignore[arg-type]
        else:
            unexpected.append(str(key))
    return good, unexpected
