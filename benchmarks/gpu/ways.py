"""Ways to make a step: by hand, by peers, by us, and in graphs. Each function returns one that makes a step."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.gpu.models import Weights, tiny
from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision

Step = Callable[[], object]
HALF = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
NAIVE = {
    "bf16_naive, float32 masters": lambda: BF16NaiveMixedPrecision(master_weights="fp32"),
    "bf16_naive, split": lambda: BF16NaiveMixedPrecision(master_weights="split"),
    "bf16_naive, split24": lambda: BF16NaiveMixedPrecision(master_weights="split24"),
    "bf16_naive, Kahan": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="kahan"),
    "bf16_naive, stochastic": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="stochastic"),
    "split24 + 8-bit states": lambda: BF16NaiveMixedPrecision(master_weights="split24", states="8bit"),
    "fp16_naive": FP16NaiveMixedPrecision,
}


def adamw(
    module: nn.Module, lr: float = 1e-4, *, fused_optimizer: bool | str = "triton", **_: Any
) -> torch.optim.AdamW:
    """AdamW, which keeps torch's fused kernel where `fused_optimizer` is True, in the place of those that True takes."""
    return torch.optim.AdamW(module.parameters(), lr=lr, fused=fused_optimizer is True or None)


class Update:
    """AdamW on given parameters, clipped at norm 1, with gradients that stay."""

    def __init__(self, device: str, shapes: list[tuple[int, ...]]) -> None:
        self._device, self._shapes = device, shapes

    def _filled(self, module: nn.Module, scale: float = 1.0) -> None:
        generator = torch.Generator(self._device).manual_seed(1)
        for param in module.parameters():
            noise = torch.randn(param.shape, device=self._device, generator=generator)
            param.grad = (noise * 1e-3 * scale).to(param.dtype)

    def by_hand(self, *, scaled: bool = False, fused: bool | None = None, clip: bool = True) -> Step:
        module = Weights(self._shapes, self._device)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=fused)
        scaler = torch.amp.GradScaler(self._device, init_scale=1.0, enabled=scaled, growth_interval=10**9)
        scaler.scale(torch.zeros((), device=self._device))
        self._filled(module)

        def step() -> None:
            scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

        return step

    def peer(self, module_name: str, name: str, half: bool = False) -> Step:
        made = getattr(import_module(module_name), name)
        module = Weights(self._shapes, self._device)
        module = module.bfloat16() if half else module
        optimizer = made(module.parameters(), lr=1e-4)
        self._filled(module)

        def step() -> None:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()

        return step

    def ours(self, precision: Any, **options: Any) -> Step:
        """`bytes_of_a_step` of what it returns: what kernels read and write, where they step."""
        booster = Booster(self._device, _made(precision), clip_grad_norm=1.0, **options)
        module = Weights(self._shapes, self._device)
        model, optimizer, *_ = booster.boost(module, adamw(module, **options))
        booster.backward(model(), optimizer)
        self._filled(module, optimizer.loss_scale)
        update: Any = optimizer._update
        update.gradients.mutation_check = None  # these gradients are meant to be others

        def step() -> None:
            # The state of an update behind a backward pass whose gradients are those.
            update.gradients.num_backwards, update.gradients.scale = 1, update.gradients.next_scale
            optimizer.step()

        step()
        check_stepped(optimizer)
        steps = getattr(update.decision, "steps", None)
        tables = [] if steps is None or not steps._sets else steps._sets[0].tables.each
        step.bytes_of_a_step = sum(table.bytes_of_a_step for table in tables)  # type: ignore[attr-defined]
        return step


def _made(precision: Any) -> Any:
    return precision() if callable(precision) else precision


def check_stepped(optimizer: Any) -> None:
    """Raise RuntimeError where torch made the last step in the place of kernels, whose time this would not be."""
    decision: Any = optimizer._update.decision
    launches = [decision.steps, *decision._parts, *decision._readings] if hasattr(decision, "_parts") else []
    for steps in launches:
        if steps.reason is not None:
            raise RuntimeError(f"torch stepped, and not kernels: {steps.reason}")


class Tiny:
    """A whole step of four layers of 64, batch 8: what the host takes."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.x, self.y = torch.randn(8, 64, device=device), torch.randint(0, 64, (8,), device=device)

    def by_hand(self, precision: str, *, clip: bool = True, fused: bool | None = True) -> Step:
        net = tiny(self._device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=fused)
        scaler = torch.amp.GradScaler(self._device, enabled=precision == "fp16")
        half = HALF[precision]

        def step() -> None:
            with torch.autocast(self._device, half or torch.bfloat16, enabled=half is not None):
                loss = F.cross_entropy(net(self.x), self.y)
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step

    def ours(self, precision: Any, *, clip: bool = True, **options: Any) -> Step:
        net, max_norm = tiny(self._device), 1.0 if clip else 0.0
        booster = Booster(self._device, _made(precision), clip_grad_norm=max_norm, half_products="native", **options)
        model, optimizer, criterion, *_ = booster.boost(net, adamw(net, **options), nn.CrossEntropyLoss())

        def step() -> None:
            booster.backward(criterion(model(self.x), self.y), optimizer)
            optimizer.step()
            optimizer.zero_grad()

        step()
        check_stepped(optimizer)
        return step

    def accelerate(self, precision: str) -> Step:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
        accelerator = Accelerator(mixed_precision={"fp32": "no"}.get(precision, precision), cpu=self._device == "cpu")
        net = tiny(self._device)
        net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True))

        def step() -> None:
            with accelerator.autocast():
                loss = F.cross_entropy(net(self.x), self.y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def fabric(self, precision: str) -> Step:
        from lightning.fabric import Fabric

        names = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
        fabric = Fabric(accelerator="cpu" if self._device == "cpu" else "gpu", devices=1, precision=names[precision])
        net = tiny(self._device)
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-4))

        def step() -> None:
            fabric.backward(F.cross_entropy(model(self.x), self.y))
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()

        return step


def trained(net: nn.Module, criterion: Any, x: torch.Tensor, y: torch.Tensor, precision: str) -> Step:
    """By hand: autocast, clip and fused AdamW, in float32 or bfloat16."""
    optimizer, half = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True), HALF[precision]

    def step() -> None:
        with torch.autocast(x.device.type, half or torch.bfloat16, enabled=half is not None):
            loss = criterion(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def captured(
    net: nn.Module,
    criterion: Any,
    x: torch.Tensor,
    y: torch.Tensor,
    precision: Any,
    *,
    capture: bool = True,
    **options: Any,
) -> Step:
    """A step of `net` by AdamW, clipped at 1, in one graph of ours; as it is where not `capture`. options: of `Booster`."""
    booster = Booster(x.device, _made(precision), clip_grad_norm=1.0, half_products="native", **options)
    model, optimizer, criterion, *_ = booster.boost(net, adamw(net, **options), criterion)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = criterion(model(x), y)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = booster.capture(step, x, y) if capture else step
    return lambda: run(x, y)


def torch_graph(
    net: nn.Module,
    criterion: Any,
    x: torch.Tensor,
    y: torch.Tensor,
    precision: str,
    *,
    cuda: Any = torch.cuda,
) -> Step:
    """The same step by hand, in one graph: fused AdamW, and torch's kernels for the scale of float16. cuda: what records it."""
    device, half = x.device, HALF[precision]
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-4, device=device), fused=True)
    scale = torch.full((), 2.0**16, device=device)
    growth = torch.zeros((), dtype=torch.int32, device=device)

    def step() -> None:
        with torch.autocast(device.type, half or torch.bfloat16, enabled=half is not None):
            loss = criterion(net(x), y)
        (loss * scale if precision == "fp16" else loss).backward()
        if precision == "fp16":
            found = torch.zeros((), device=device)
            grads = [param.grad for param in net.parameters()]
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale.double().reciprocal().float())
            optimizer.found_inf = found  # type: ignore[attr-defined]
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if precision == "fp16":
            torch._amp_update_scale_(scale, growth, found, 2.0, 0.5, 2000)
        optimizer.zero_grad()

    if device.type == "cpu" and cuda is torch.cuda:
        return step
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        for _ in range(3):
            step()
    cuda.current_stream().wait_stream(stream)
    optimizer.param_groups[0]["capturable"] = True  # without it torch refuses, and with it warns of the steps above
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        step()

    # Who holds this holds `step`, and so the memory that the graph reads and writes.
    def replay(_: Step = step) -> None:
        graph.replay()

    return replay
