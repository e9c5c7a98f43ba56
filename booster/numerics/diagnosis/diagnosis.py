"""`Diagnosis`: where the first bad number of a step was made, why, and what helps; and its sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from booster.common.text import listed
from booster.numerics.diagnosis.places import Numbers

Kind = Literal["data", "weights", "loss", "overflow", "loss_scale", "operation"]
Direction = Literal["forward", "loss", "backward"]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The first operation of a step that made an inf or NaN, and why. The same on every rank. None is what is not known.

    kind: "data": a tensor that the step was given held one. "weights": a parameter or buffer did. "loss": what computes the
        loss from the model's output made it, as log(0) or 0/0 do. "overflow": the true result is finite, and too large for the
        format. "loss_scale": the same in the backward pass, and a smaller scale is enough. "operation": an operation in the
        model has no finite result for these inputs, in any format. None: nothing bad was found, or not where it began.
    certain: with this operation's result mended, or by a remedy, everything was finite; or every way back led to it alone.

    module: the qualified name, "criterion" for a boosted one, the class's name for the model itself and for modules outside of
        it, "" outside of all.
    operation: as torch's dispatcher calls it, "aten.addmm".
    direction: of the pass.
    dtype: of the result, without "torch.".
    rank: where it was made.
    remedies: what was tried in the replay and made everything finite.
    advice: what was not tried.

    autograd_node, of: in a backward pass, the node, and the operation of the forward pass that it belongs to.
    parameter: the name of what is bad, for kind "weights".
    modules: those being called, the outermost first.
    passed: modules that the bad number went through afterwards.
    source: the line of the user's code, "file:line in function".
    inputs, output: ranges.
    rows: places along the first dimension of what is bad, for "data" the samples.
    micro_batch: which backward pass of the step, from 0, or which part of a pipeline's batch.
    stage: of a pipeline; None elsewhere.
    loss, loss_scale: of the replay; the loss is the mean over ranks.
    notes: what limits what is said here.
    """

    kind: Kind | None
    module: str = ""
    operation: str = ""
    direction: Direction | None = None
    dtype: str = ""
    rank: int = 0
    remedies: tuple[str, ...] = ()
    certain: bool = False
    advice: tuple[str, ...] = ()
    autograd_node: str = ""
    of: str = ""
    parameter: str = ""
    modules: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    source: str = ""
    inputs: tuple[Numbers, ...] = ()
    output: Numbers | None = None
    rows: tuple[int, ...] = ()
    micro_batch: int = 0
    stage: int | None = None
    loss: float | None = None
    loss_scale: float = 1.0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [self._what(), *self._where(), *self._numbers()]
        if self.remedies:
            parts.append(f"Tried in the replay: {'; '.join(self.remedies)}.")
        if self.advice:
            parts.append(f"Not tried: {'; '.join(self.advice)}.")
        if self.kind is not None and not self.certain:
            parts.append("This is a suspicion: mending it in the replay did not make everything finite.")
        return " ".join([*parts, *self.notes])

    def _what(self) -> str:
        if self.kind is None:
            loss = "" if self.loss is None else f", the loss {self.loss:.6g}"
            return f"No cause was found. The replay ran at loss scale {self.loss_scale:g}{loss}."
        where = f" in {self.module}" if self.module else ""
        by = f"{self.operation}{where}"
        during = {"forward": "the forward pass", "loss": "the loss", "backward": "the backward pass"}[
            self.direction or ""
        ]
        if self.kind == "data":
            return f"Bad data: {by} was the first to read a tensor that already held {self._bad()}, in {during}."
        if self.kind == "weights":
            return f"Bad weights: {self.parameter} holds {self._bad()}; {by} read it first, in {during}."
        if self.kind == "loss_scale":
            return f"The loss scale {self.loss_scale:g} is too large: {by} overflowed {self.dtype} in {during}."
        if self.kind == "overflow":
            return f"Overflow of {self.dtype}: the result of {by} is too large for it, in {during}."
        if self.kind == "loss":
            return f"The loss: {by} made {self._bad()} out of finite numbers, in {during}."
        return f"An operation: {by} made {self._bad()} out of finite numbers, in {during}."

    def _bad(self) -> str:
        if self.output is None:
            return "an inf or NaN"
        counts = (("NaN", self.output.num_nan), ("inf", self.output.num_inf))
        return " and ".join(f"{count} {what}" for what, count in counts if count) or "an inf or NaN"

    def _where(self) -> list[str]:
        found = [f"rank {self.rank}"]
        found += [f"stage {self.stage}"] if self.stage is not None else []
        found += [f"micro-batch {self.micro_batch}"] if self.micro_batch else []
        found += [f"rows {', '.join(map(str, self.rows))}"] if self.rows and self.direction != "backward" else []
        found += [f"{self.autograd_node} of {self.of}"] if self.autograd_node and self.of else []
        found += [self.source] if self.source else []
        said = [f"Where: {'; '.join(found)}."]
        if len(self.modules) > 1:
            said.append(f"Called through {' > '.join(self.modules)}.")
        if self.passed:
            said.append(f"From there it went through {listed(self.passed, 4)}.")
        return said

    def _numbers(self) -> list[str]:
        if self.kind is None or self.output is None:
            return []
        inputs = [f"Inputs: {'; '.join(map(str, self.inputs[:4]))}."] if self.inputs else []
        return [*inputs, f"Result: {self.output}."]
