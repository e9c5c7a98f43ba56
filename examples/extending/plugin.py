"""A plugin of your own: data parallelism that averages each gradient as soon as backward has it.

It knows a precision only by the `DtypePolicy` that `place` is given, so it works with every one of them. Missing for real
use: buckets, which make few large messages of many small ones, and parameters that some ranks' backward does not reach.

    booster run --nproc_per_node 2 examples/extending/plugin.py
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import booster
from booster import Booster
from booster.mixed_precision import DtypePolicy, cast_parameters
from booster.plugin import PlacedModule, Plugin


class AveragingPlugin(Plugin):
    """Every rank holds the whole model and a share of the batch."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None

    def synchronise(self, module: nn.Module) -> None:
        for tensor in [*module.parameters(), *module.buffers()] if self.group else []:
            dist.broadcast(tensor.detach(), src=0, group=self.group)

    def place(self, module: nn.Module, policy: DtypePolicy, device: torch.device) -> nn.Module:
        module = cast_parameters(module.to(device), policy)
        self.synchronise(module)
        return module if self.group is None else AveragedModule(module, self.group, policy.reduce)

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        averages = getattr(module, "averages", False)
        if averages:
            module.averages = False
        try:
            yield
        finally:
            if averages:
                module.averages = True


class AveragedModule(PlacedModule):
    """Averages each gradient of `module` over `group` during backward; dtype: of what is sent, None for the gradient's."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, dtype: torch.dtype | None) -> None:
        super().__init__(module)
        self.averages = True
        self._group, self._dtype = group, dtype
        for param in module.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._average)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _average(self, param: torch.Tensor) -> None:
        # What earlier passes inside no_sync left in `.grad` is averaged along. Divided first: the sum of halves could overflow.
        if self.averages and param.grad is not None:
            sent = (param.grad / dist.get_world_size(self._group)).to(self._dtype or param.grad.dtype)
            dist.all_reduce(sent, group=self._group)
            param.grad.copy_(sent)


def main() -> None:
    booster.launch_from_torch()
    b = Booster(mixed_precision="bf16", plugin=AveragingPlugin())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, *_ = b.boost(model, optimizer)
    for step in range(1, 101):
        x = torch.randn(32, 16, device=b.device)  # each rank draws, and learns to sort, its own
        loss = nn.functional.mse_loss(model(x), x.sort(dim=1).values)
        b.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        mean = b.reduce(loss.detach())
        if step % 25 == 0 and b.plugin.data_parallel_rank == 0:
            print(f"step {step}: loss {float(mean):.3f}")


if __name__ == "__main__":
    main()
