"""A GPU's step in one command: the update alone, the step of a tiny model, and a GPT, beside hand-written torch and peers.

    python -m benchmarks.gpu [--section update|tiny|graph|gpt|kernels] [--small] [--device cpu]

Prints microseconds, medians of rounds in a shuffled order, beside "again", a second copy of the first way, whose ratio
is what the machine says of equal things; launches on the device, as torch's profiler counts them; waits of the host for
it; and of the GPT the peak of its memory. Peers are those that are installed. It ends with whether `fused_optimizer=True` may
take Triton kernels: whether they train as torch does, and how long they take. All sections take less than 5 minutes.
--small and --device cpu are to see that it runs, and their numbers say nothing.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.timing import describe_machine, interleave
from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision

Step = Callable[[], object]
BY = {"": True, " by Triton": "triton"}
NAIVE = {
    "bf16_naive, float32 masters": lambda: BF16NaiveMixedPrecision(master_weights="fp32"),
    "bf16_naive, split": lambda: BF16NaiveMixedPrecision(master_weights="split"),
    "bf16_naive, split24": lambda: BF16NaiveMixedPrecision(master_weights="split24"),
    "bf16_naive, Kahan": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="kahan"),
    "bf16_naive, stochastic": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="stochastic"),
    "split24 + 8-bit states": lambda: BF16NaiveMixedPrecision(master_weights="split24", states="8bit"),
    "fp16_naive": FP16NaiveMixedPrecision,
}


def gpt2_shapes(small: bool) -> list[tuple[int, ...]]:
    """Shapes of the 148 parameters of GPT-2 124M; of a few small ones."""
    if small:
        return [(64, 64)] * 8
    block = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,), (768,), (768,), (3072, 768), (3072,)]
    block += [(768, 3072), (768,)]
    return [(50304, 768), (1024, 768), *block * 12, (768,), (768,)]


def adamw(
    module: nn.Module, lr: float = 1e-4, *, fused_optimizer: bool | str = "triton", **_: Any
) -> torch.optim.AdamW:
    """AdamW, which keeps torch's fused kernel where `fused_optimizer` is True, in the place of those that True takes."""
    return torch.optim.AdamW(module.parameters(), lr=lr, fused=fused_optimizer is True or None)


class Weights(nn.Module):
    """Parameters, and a loss of them whose gradients are given."""

    def __init__(self, shapes: list[tuple[int, ...]], device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = nn.ParameterList(nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes)

    def forward(self) -> torch.Tensor:
        return sum((param.reshape(-1)[:1].sum() for param in self.all), torch.zeros((), device=self.all[0].device))


class UpdateSection:
    """AdamW on the parameters of GPT-2 124M, clipped at norm 1, with gradients that stay."""

    title = "update of GPT-2 124M, 148 tensors, AdamW, clip at 1, gradients given"

    def __init__(self, device: str, small: bool) -> None:
        self._device, self._shapes = device, gpt2_shapes(small)

    def ways(self) -> Iterator[tuple[str, Callable[[], Step]]]:
        yield "torch fused, clip", partial(self._torch, fused=True)
        yield "again", partial(self._torch, fused=True)
        yield "torch default, clip", self._torch
        yield "torch fp16: GradScaler, fused", partial(self._torch, scaled=True, fused=True)
        for way, how in BY.items():
            for precision in ("fp32", "bf16", "fp16"):
                yield f"{precision}{way}", partial(self._ours, precision, fused_optimizer=how)
            yield f"fp32, 8-bit states{way}", partial(self._ours, "fp32", states="8bit", fused_optimizer=how)
            for name, made in NAIVE.items():
                yield f"{name}{way}", lambda made=made, how=how: self._ours(made(), fused_optimizer=how)
        if find_spec("bitsandbytes"):
            yield "bitsandbytes AdamW8bit", partial(self._peer, "bitsandbytes.optim", "AdamW8bit")
        if find_spec("flashoptim"):
            yield "FlashAdamW", partial(self._peer, "flashoptim", "FlashAdamW")

    def _filled(self, module: nn.Module, scale: float = 1.0) -> None:
        generator = torch.Generator(self._device).manual_seed(1)
        for param in module.parameters():
            noise = torch.randn(param.shape, device=self._device, generator=generator)
            param.grad = (noise * 1e-3 * scale).to(param.dtype)

    def _torch(self, *, scaled: bool = False, fused: bool | None = None) -> Step:
        module = Weights(self._shapes, self._device)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=fused)
        scaler = torch.amp.GradScaler(self._device, init_scale=1.0, enabled=scaled, growth_interval=10**9)
        scaler.scale(torch.zeros((), device=self._device))
        self._filled(module)

        def step() -> None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

        return step

    def _peer(self, module_name: str, name: str) -> Step:
        made = getattr(__import__(module_name, fromlist=[name]), name)
        module = Weights(self._shapes, self._device)
        module = module.bfloat16() if name.startswith("Flash") else module
        optimizer = made(module.parameters(), lr=1e-4)
        self._filled(module)

        def step() -> None:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()

        return step

    def _ours(self, precision: Any, **options: Any) -> Step:
        booster = Booster(self._device, precision, clip_grad_norm=1.0, **options)
        module = Weights(self._shapes, self._device)
        model, optimizer, *_ = booster.boost(module, adamw(module, **options))
        booster.backward(model(), optimizer)
        self._filled(module, optimizer.loss_scale)
        update: Any = optimizer._update.gradients
        update.noted = None  # these gradients are meant to be others

        def step() -> None:
            # The state of an update behind a backward pass whose gradients are those.
            update.num_backwards, update.scale = 1, update.next_scale
            optimizer.step()

        return step


class TinySection:
    """A whole step of four layers of 64: what the host takes."""

    title = "step of 4 x Linear(64), batch 8, clip: the host's time"

    def __init__(self, device: str, small: bool) -> None:
        self._device = device
        self._x, self._y = torch.randn(8, 64, device=device), torch.randint(0, 64, (8,), device=device)

    def ways(self) -> Iterator[tuple[str, Callable[[], Step]]]:
        for precision in ("fp32", "bf16", "fp16"):
            yield f"torch fused, {precision}", partial(self.by_hand, precision)
            yield f"again, {precision}", partial(self.by_hand, precision)
            for way, how in BY.items():
                yield f"{precision}{way}", partial(self.ours, precision, fused_optimizer=how)
            if find_spec("accelerate"):
                yield f"Accelerate, {precision}", partial(self._accelerate, precision)
            if find_spec("lightning"):
                yield f"Fabric, {precision}", partial(self._fabric, precision)
        for way, how in BY.items():
            for name, made in NAIVE.items():
                yield f"{name}{way}", lambda made=made, how=how: self.ours(made(), fused_optimizer=how)

    def _net(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.ReLU()))).to(self._device)

    def by_hand(self, precision: str, *, clip: bool = True) -> Step:
        net = self._net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
        scaler = torch.amp.GradScaler(self._device, enabled=precision == "fp16")
        dtype = torch.float16 if precision == "fp16" else torch.bfloat16

        def step() -> None:
            with torch.autocast(self._device, dtype, enabled=precision != "fp32"):
                loss = F.cross_entropy(net(self._x), self._y)
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step

    def ours(self, precision: Any, *, clip: bool = True, **options: Any) -> Step:
        net = self._net()
        booster = Booster(
            self._device, precision, clip_grad_norm=1.0 if clip else 0.0, half_products="native", **options
        )
        model, optimizer, criterion, *_ = booster.boost(net, adamw(net, **options), nn.CrossEntropyLoss())

        def step() -> None:
            booster.backward(criterion(model(self._x), self._y), optimizer)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _accelerate(self, precision: str) -> Step:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
        accelerator = Accelerator(mixed_precision={"fp32": "no"}.get(precision, precision), cpu=self._device == "cpu")
        net = self._net()
        net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True))

        def step() -> None:
            with accelerator.autocast():
                loss = F.cross_entropy(net(self._x), self._y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _fabric(self, precision: str) -> Step:
        from lightning.fabric import Fabric

        names = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
        fabric = Fabric(accelerator="cpu" if self._device == "cpu" else "gpu", devices=1, precision=names[precision])
        net = self._net()
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-4))

        def step() -> None:
            fabric.backward(F.cross_entropy(model(self._x), self._y))
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()

        return step


class GraphSection(TinySection):
    """The same step in a CUDA graph, from forward to `zero_grad`, beside the same by hand."""

    title = "step of 4 x Linear(64), batch 8, clip, in one CUDA graph"

    def ways(self) -> Iterator[tuple[str, Callable[[], Step]]]:
        for precision in ("fp32", "bf16", "fp16"):
            yield f"torch in a graph, {precision}", partial(self._torch_graph, precision)
            yield f"again, {precision}", partial(self._torch_graph, precision)
            yield f"captured, {precision}", partial(self._captured, precision)
            yield f"eager, {precision}", partial(self.ours, precision)
        for name in ("bf16_naive, float32 masters", "bf16_naive, split"):
            yield f"captured, {name}", lambda made=NAIVE[name]: self._captured(made())

    def _captured(self, precision: Any) -> Step:
        return captured(self._net(), nn.CrossEntropyLoss(), self._x, self._y, precision)

    def _torch_graph(self, precision: str) -> Step:
        return torch_graph(self._net(), F.cross_entropy, self._x, self._y, precision)


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
    """A step of `net` by AdamW, clipped at 1, in one graph of ours; as it is where not `capture`."""
    booster = Booster(x.device, precision, clip_grad_norm=1.0, half_products="native", **options)
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
    net: nn.Module, criterion: Any, x: torch.Tensor, y: torch.Tensor, precision: str, *, capture: bool = True
) -> Step:
    """The same step by hand, in one graph: fused AdamW, and torch's kernels for the scale of float16."""
    device = x.device
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-4, device=device), fused=True)
    half = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
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

    if device.type == "cpu" or not capture:
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=self.causal)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GPTSection:
    """A GPT of 369 million parameters on 16 x 1,024 tokens. One way at a time is on the device."""

    title = "GPT of 369 M (6 x 2048), 16 x 1,024 tokens, AdamW, clip"

    def __init__(self, device: str, small: bool) -> None:
        self._device = device
        self._size = (64, 2, 4, 32, 128) if small else (2048, 6, 16, 1024, 32768)
        length, vocabulary = self._size[3:]
        self._x = torch.randint(0, vocabulary, (2 if small else 16, length), device=device)
        self._y = torch.roll(self._x, -1, 1)

    def ways(self) -> Iterator[tuple[str, Callable[[], Step]]]:
        yield "torch fused, bf16 autocast", self._torch
        yield "again", self._torch
        for way, how in BY.items():
            for precision in ("bf16", "fp16"):
                yield f"{precision}{way}", partial(self._ours, precision, how)
            for name in ("bf16_naive, split", "split24 + 8-bit states"):
                yield f"{name}{way}", lambda made=NAIVE[name], how=how: self._ours(made(), how)

    def _net(self) -> nn.Module:
        torch.manual_seed(0)
        return GPT(*self._size).to(self._device)

    def _torch(self) -> Step:
        net = self._net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True)

        def step() -> None:
            with torch.autocast(self._device, torch.bfloat16):
                loss = F.cross_entropy(net(self._x).flatten(0, 1), self._y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _ours(self, precision: Any, fused_optimizer: bool | str) -> Step:
        net = self._net()
        booster = Booster(self._device, precision, clip_grad_norm=1.0, fused_optimizer=fused_optimizer)
        criterion = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
        model, optimizer, criterion, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=3e-4), criterion)

        def step() -> None:
            booster.backward(criterion(model(self._x), self._y), optimizer)
            optimizer.step()
            optimizer.zero_grad()

        return step


def launches(step: Step) -> int:
    """How many kernels a call launches; -1 where there is no GPU."""
    if not torch.cuda.is_available():
        return -1
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(
        event.count for event in profile.key_averages() if not event.key.startswith(("Memcpy", "Memset", "cuda"))
    )


def waits(step: Step) -> int:
    """How often a call waits for the device; -1 where there is no GPU."""
    if not torch.cuda.is_available():
        return -1
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) and "prototype" not in str(each.message) for each in said)


def shown(section: Any, rounds: int, calls: int, *, apart: bool) -> dict[str, float]:
    """Print the table of a section, and return the seconds of each way. apart: one way is on the device at a time, and its peak
    of memory is shown."""
    print(f"\n## {section.title}\n\n| way | us | of the first | launches | waits |{' peak GiB |' if apart else ''}")
    print("|---|---|---|---|---|" + ("---|" if apart else ""))
    base: float | None = None
    made: dict[str, Step] = {}
    found: dict[str, float] = {}

    def row(name: str, seconds: list[float], step: Step, peak: str = "") -> None:
        nonlocal base
        median = statistics.median(seconds) / calls
        base = median if base is None else base
        found[name] = median
        print(
            f"| {name} | {median * 1e6:,.0f} | {median / base:.2f} | {launches(step)} | {waits(step)} |{peak}",
            flush=True,
        )

    for name, make in section.ways():
        gc.collect()
        if apart and torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            step = make()
            for _ in range(3):
                step()
        except Exception as error:  # a peer, or a precision that this GPU has not
            print(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:100]} | | | |", flush=True)
            continue
        if not apart:
            made[name] = partial(repeated, step, calls)
            continue
        seconds = interleave({name: partial(repeated, step, calls)}, rounds)[name]
        memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        row(name, seconds, step, f" {memory:.2f} |")
        del step
    if made:
        for name, seconds in interleave(made, rounds).items():
            row(name, seconds, made[name].args[0])  # type: ignore[attr-defined]
    return found


TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}  # two steps of a half format


def differences(device: str) -> dict[str, float]:
    """How far weights that kernels trained are from those of torch's steps, in shares of what is tolerated; one step of six is
    skipped by an infinity. Infinite where kernels did not step."""
    found = {}
    precisions: dict[str, Callable[[], Any]] = {"fp32": lambda: "fp32", "fp16": lambda: "fp16", **NAIVE}
    precisions["fp16_naive"] = lambda: FP16NaiveMixedPrecision(initial_scale=2.0**10)  # which these gradients fit
    for name, precision in precisions.items():
        weights = [_trained(device, precision(), how) for how in BY.values()]
        found[name] = max(
            float((a.float() - b.float()).abs().max() / (b.float().abs().max() * TOLERANCES[b.dtype]))
            for b, a in zip(*weights, strict=True)
        )
    return found


def _trained(device: str, precision: Any, how: bool | str) -> list[torch.Tensor]:
    booster = Booster(device, precision, clip_grad_norm=1.0, skip_nonfinite=True, fused_optimizer=how)
    module = Weights([(65, 130), (3000,), (7, 5)], device)
    model, optimizer, *_ = booster.boost(module, adamw(module, lr=1e-3, fused_optimizer=how))
    generator = torch.Generator(device).manual_seed(2)
    params = list(module.parameters())
    for number in range(6):
        grads = [torch.randn(param.shape, device=device, generator=generator) for param in params]
        if number == 3:
            grads[1][77] = float("inf")
        loss = sum((param.float() * grad).sum() for param, grad in zip(params, grads, strict=True))
        booster.backward(loss, optimizer)
        assert bool(optimizer.step()) is (number != 3)
        optimizer.zero_grad()
    return [param.detach().clone() for param in params]


def verdict(found: dict[str, dict[str, float]], apart: dict[str, float]) -> str:
    """One line: whether `fused_optimizer=True` may take kernels, with what decides it.

    found: seconds by section and way. apart: `differences`.
    """
    wrong = [f"{name} {share:.2g} of what is tolerated" for name, share in apart.items() if not share <= 1.0]
    slow = []
    for section, base in (("update", "torch fused, clip"), ("tiny", "torch fused, fp32")):
        ways = found.get(section, {})
        mine = ways.get("fp32 by Triton", float("inf"))
        share = mine / ways[base] if base in ways else float("inf")
        if not share <= 1.0:
            slow.append(f"{section} {share:.2f} of torch's fused")
    if wrong or slow:
        return f"verdict: booster/kernels/eligibility.py TAKEN_BY_TRUE is to be (): {'; '.join([*wrong, *slow])}"
    return 'verdict: booster/kernels/eligibility.py TAKEN_BY_TRUE stays ("cuda",): kernels train as torch does, and no slower'


def repeated(step: Step, calls: int) -> None:
    for _ in range(calls):
        step()


SECTIONS: dict[str, tuple[Any, int, int, bool]] = {
    "update": (UpdateSection, 7, 4, True),
    "tiny": (TinySection, 15, 20, False),
    "graph": (GraphSection, 15, 50, False),
    "gpt": (GPTSection, 3, 4, True),
}


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=[*SECTIONS, "kernels"], help="only this one")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print(
            f"benchmarks.gpu needs a GPU, and torch {torch.__version__} sees none; --small --device cpu shows that it runs"
        )
        return 2
    print(describe_machine())
    found: dict[str, dict[str, float]] = {}
    for name, (section, rounds, calls, apart) in SECTIONS.items():
        if given.section in (None, name):
            found[name] = shown(
                section(given.device, given.small),
                2 if given.small else rounds,
                1 if given.small else calls,
                apart=apart,
            )
    if given.section in (None, "kernels"):
        print()
        try:
            print(verdict(found, differences(given.device)))
        except ValueError as refused:  # by name, where there are no kernels
            print(f"verdict: none, {refused}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
