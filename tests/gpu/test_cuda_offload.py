"""On a CUDA device: states in pinned memory of the host, copied during the step. Not run yet, for want of a GPU."""

import copy
from typing import Any

import pytest
import torch
from cuda_syncs import syncs_forbidden
from torch import nn

from booster import Booster
from booster.masters.offload import is_offloaded, tensors_of
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, MixedPrecision, make

pytestmark = pytest.mark.gpu

PRECISIONS = {
    "fp32": lambda: make("fp32"),
    "bf16": lambda: make("bf16"),
    "fp16": lambda: make("fp16"),
    "bf16, 8bit": lambda: make("bf16").with_kept(states="8bit"),
    "bf16_naive": lambda: BF16NaiveMixedPrecision(),
    "bf16_naive, separate": lambda: BF16NaiveMixedPrecision(master_weights="fp32"),
    "bf16_naive, split24, 8bit": lambda: BF16NaiveMixedPrecision(master_weights="split24", states="8bit"),
    "fp16_naive, split": lambda: FP16NaiveMixedPrecision(master_weights="split"),
}


def make_parts(precision: MixedPrecision, offload: bool, width: int = 512, depth: int = 6) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))).cuda()
    booster = Booster("cuda", precision, offload_states=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return booster, *booster.boost(model, optimizer, nn.MSELoss())[:3]


def train(parts: Any, steps: int, seed: int = 1) -> None:
    booster, model, optimizer, criterion = parts
    generator = torch.Generator("cuda").manual_seed(seed)
    for _ in range(steps):
        width = next(model.parameters()).shape[-1]
        x = torch.randn(64, width, device="cuda", generator=generator)
        booster.backward(criterion(model(x), x), optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()


def travelling(optimizer: Any) -> list[torch.Tensor]:
    found = []
    for bucket in optimizer._update.optimizer_state.masters.buckets:
        found += [] if bucket.residual is None or bucket.whole else [bucket.residual]
        own = optimizer.unwrap().state.get(bucket.handles[0], {})
        found += [t for v in own.values() if is_offloaded(v, bucket.size) for t in tensors_of(v)]
    return found


@pytest.mark.parametrize("name", PRECISIONS)
def test_states_that_travel_train_to_the_same_bits_as_those_that_stay(name: str) -> None:
    stays, moved = (make_parts(PRECISIONS[name](), offload) for offload in (False, True))
    for parts in (stays, moved):
        train(parts, 20)
    for param, other in zip(stays[1].parameters(), moved[1].parameters(), strict=True):
        assert torch.equal(param, other)
    assert len(travelling(moved[2])) > 8
    assert all(tensor.is_pinned() for tensor in travelling(moved[2]))


@pytest.mark.parametrize("name", ["bf16_naive", "bf16_naive, split24, 8bit"])
def test_a_checkpoint_of_the_one_resumes_as_the_other_to_the_bit(name: str) -> None:
    moved, resumed = make_parts(PRECISIONS[name](), True), make_parts(PRECISIONS[name](), False)
    train(moved, 5)
    saved = copy.deepcopy((moved[1].state_dict(), moved[2].state_dict()))
    resumed[1].load_state_dict(saved[0])
    resumed[2].load_state_dict(saved[1])
    for parts in (moved, resumed):
        train(parts, 5, seed=2)
    for param, other in zip(moved[1].parameters(), resumed[1].parameters(), strict=True):
        assert torch.equal(param, other)


def test_a_step_does_not_wait_for_the_device() -> None:
    parts = make_parts(PRECISIONS["bf16_naive"](), True)
    train(parts, 3)
    booster, model, optimizer, criterion = parts
    x = torch.randn(64, 512, device="cuda")
    booster.backward(criterion(model(x), x), optimizer)
    with syncs_forbidden():
        optimizer.step()


def test_the_device_holds_neither_states_nor_masters_and_two_buckets_of_them_at_the_peak() -> None:
    held, peak = {}, {}
    for offload in (False, True):
        torch.cuda.empty_cache()
        parts = make_parts(PRECISIONS["bf16_naive"](), offload, width=2048, depth=8)
        train(parts, 2)
        torch.cuda.synchronize()
        booster, model, optimizer, criterion = parts
        x = torch.randn(64, 2048, device="cuda")
        booster.backward(criterion(model(x), x), optimizer)
        torch.cuda.reset_peak_memory_stats()
        held[offload] = torch.cuda.memory_allocated()
        optimizer.step()
        torch.cuda.synchronize()
        peak[offload] = torch.cuda.max_memory_allocated()
        count = sum(p.numel() for p in model.parameters())
        assert (booster.memory(model, optimizer).host > 9 * count) == offload
        del parts, booster, model, optimizer, criterion
    assert held[False] - held[True] > 9 * count  # two moments and half a master, 10 bytes
    assert peak[False] - peak[True] > 8 * count
