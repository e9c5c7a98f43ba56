"""Whether somebody else writes to gradients between backward and step, while they are multiplied by a loss scale."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from booster.common.torch_internals.tensor_internals import local_tensor, version
from booster.model.dtensors import is_dtensor

FIRST, EVERY = 2, 100  # the first steps, and one in so many, are compared


class _Noted(NamedTuple):
    param: torch.Tensor
    value: torch.Tensor  # that holds the numbers: of a DTensor this rank's part
    version: int


class GradMutationCheck:
    """The gradients of `params` as a backward pass left them. Kept are the tensors themselves, and how often they were written.

    Torch's clip of DTensors counts nowhere, so of them an element each is kept too; comparing it waits for the device.
    """

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self._noted = [
            _Noted(param, value, _version(param)) for param in params if (value := _value(param)) is not None
        ]
        self._in_parts = [noted.value for noted in self._noted if is_dtensor(noted.param.grad)]
        self._sample = self._sampled()

    def touched(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients were written in place since, or are other tensors; not those that have none
        any more or zeros alone, and not what was written through `.data`, which torch does not count."""
        now = [(noted, _value(noted.param)) for noted in self._noted]
        found = [
            noted.param
            for noted, value in now
            if value is not None
            and (value is not noted.value or _version(noted.param) != noted.version)
            and value.any()
        ]
        if found or not self._in_parts or torch.equal(self._sample, self._sampled()):
            return found
        return [noted.param for noted in self._noted]

    def _sampled(self) -> torch.Tensor:
        elements = [value.detach().reshape(-1)[:1].float() for value in self._in_parts]
        return torch.cat(elements).nan_to_num() if elements else torch.zeros(0, dtype=torch.float32)


def _value(param: torch.Tensor) -> torch.Tensor | None:
    grad = param.grad
    if grad is None or grad.is_sparse:  # whose reader puts a coalesced one in its place
        return None
    return local_tensor(grad) if is_dtensor(grad) else grad


def _version(param: torch.Tensor) -> int:
    grad: torch.Tensor = param.grad  # type: ignore[assignment]
    return version(grad) + (version(local_tensor(grad)) if is_dtensor(grad) else 0)
