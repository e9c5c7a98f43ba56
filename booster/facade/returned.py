"""What `boost` returns: five objects, and a word for who unpacks another number of them."""

from __future__ import annotations

import opcode
import sys
from collections.abc import Iterator
from typing import Any

_UNPACK = opcode.opmap["UNPACK_SEQUENCE"]


class Returned(tuple[Any, ...]):
    """(model, optimizer, criterion, dataloader, lr_scheduler); unpacking it to another number of names says how to write it."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        frame = sys._getframe(1)  # Python tells nobody else how many names stand on the left
        code, at = frame.f_code.co_code, frame.f_lasti
        if 0 <= at < len(code) and code[at] == _UNPACK and code[at + 1] != len(self):
            names = ("model", "optimizer", "criterion", "dataloader", "lr_scheduler")[: code[at + 1]]
            left = ", ".join(names if code[at + 1] < len(self) else ("model", "optimizer"))
            raise TypeError(
                f"boost() returns {len(self)} objects: model, optimizer, criterion, dataloader and lr_scheduler, None for what "
                f"it was not given; unpacked to {code[at + 1]}. Write {left}, *_ = b.boost({left})"
            )
        return super().__iter__()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"boost() returns {len(self)} objects, not a model, and together they have no attribute {name!r}. Write "
            "model, optimizer, *_ = b.boost(model, optimizer)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)
