"""The path of a GPU, step by step, on a device that is none: the same numbers as on the CPU, no mixed devices, no hidden wait.

On a card tests/gpu looks at what this cannot: streams, graphs and kernels."""

import copy
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from pretended_cuda import DEVICE, UNREAD, lies, pretended
from torch import nn, optim
from torch.nn import functional as F

from booster import Booster
from booster.common.devices import DeviceCopies, HostCopy
from booster.common.torch_internals import tensor_internals
from booster.mixed_precision import BF16NaiveMixedPrecision as BF16Naive
from booster.mixed_precision import DelayedScaling, FP8MixedPrecision
from booster.mixed_precision import FP16NaiveMixedPrecision as FP16Naive
from booster.mixed_precision import Int8MixedPrecision as Int8
from booster.plugin.sequence_parallel import ring
from booster.plugin.sequence_parallel.all_to_all import Attention
from booster.plugin.sequence_parallel.sequence_cut import SequenceCut

OFFLOADED = {"offload_states": True}
# Precision and options; and how often the host waits in a step.
CASES = {
    "fp32": ("fp32", {}, 0),
    "bf16": ("bf16", {}, 0),
    "fp16": ("fp16", {}, 0),
    "fp16, 8bit": ("fp16", {"states": "8bit"}, 0),
    "fp32, bf16 states": ("fp32", {"states": "bf16"}, 0),
    "fp32, released": ("fp32", {"release_gradients": "exact"}, None),
    "fp16, released": ("fp16", {"release_gradients": "exact"}, None),
    "fp32, previous norm": ("fp32", {"release_gradients": "previous_norm"}, None),
    "fp32, offloaded": ("fp32", OFFLOADED, 0),
    "fp16, offloaded": ("fp16", OFFLOADED, 0),
    "fp16_naive": (FP16Naive, {}, 0),
    "fp16_naive, split, offloaded": (lambda: FP16Naive(master_weights="split"), OFFLOADED, 0),
    "bf16_naive": (BF16Naive, {}, 0),
    "bf16_naive, float32": (lambda: BF16Naive(master_weights="fp32"), OFFLOADED, 0),
    "bf16_naive, split24": (lambda: BF16Naive(master_weights="split24", states="8bit"), OFFLOADED, 0),
    "bf16_naive, released": (BF16Naive, {"release_gradients": "exact"}, None),
    "stochastic": (lambda: BF16Naive(master_weights="none", rounding="stochastic"), {}, 0),
    "Kahan": (lambda: BF16Naive(master_weights="none", rounding="kahan"), {}, 0),
    "fp8": (lambda: FP8MixedPrecision(emulate=True), {}, 0),
    "fp8, delayed": (lambda: FP8MixedPrecision(emulate=True, delayed_scaling=DelayedScaling()), {}, 0),
    "int8": (lambda: Int8(emulate=True), {}, 0),
    "apex O2": ("fp16_apex", {}, None),
}


class Run:
    def __init__(self, device, name, schedule=False):
        precision, options, _ = CASES[name]
        precision = precision if isinstance(precision, str) else precision()
        torch.manual_seed(0)
        layers = [
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 128),
            nn.LayerNorm(128),
            nn.Linear(128, 64),
            nn.Linear(64, 64),
        ]
        net = nn.Sequential(*layers)
        self.booster = Booster(device, precision, clip_grad_norm=1.0, half_products="native", **options)
        inner = optim.AdamW(net.parameters(), lr=2.0**-7)
        schedule = optim.lr_scheduler.StepLR(inner, 2) if schedule else None
        self.model, self.optimizer, self.criterion, _, self.schedule = self.booster.boost(
            net, inner, nn.CrossEntropyLoss(), None, schedule
        )
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(8, 64, generator=generator).to(device)
        self.y = torch.randint(0, 64, (8,), generator=generator).to(device)

    def step(self, factor=1.0):
        loss = self.criterion(self.model(self.x), self.y) * factor
        self.booster.backward(loss, self.optimizer)
        result = self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad()
        return loss.detach(), result

    def weights(self):
        return [param.detach().cpu().clone() for param in self.model.parameters()]


def same(run, other, what=torch.equal):
    return all(map(what, run.weights(), other.weights()))


@pytest.mark.parametrize("name", CASES)
def test_steps_of_the_path_of_a_gpu_are_those_of_a_cpu(name):
    here = Run("cpu", name)
    expected = [here.step(float("inf") if number == 2 else 1.0) for number in range(5)]
    with pretended() as device:
        there = Run("cuda", name)
        assert all(map(lies, there.model.parameters()))
        assert there.step()[1].applied
        device.syncs = 0
        found = [there.step()]
        assert CASES[name][2] is None or device.syncs <= CASES[name][2]
        found += [there.step(float("inf") if number == 2 else 1.0) for number in range(2, 5)]
        applied = [result.applied for _, result in found]
        assert applied == [result.applied for _, result in expected[1:]]
        for (loss, _), (other, _) in zip(found, expected[1:], strict=True):
            torch.testing.assert_close(loss.cpu(), other.cpu(), rtol=2.0**-7, atol=0.0, equal_nan=True)
        near = 2.0**-6 if name == "stochastic" else 2.0**-10  # a device draws other numbers
        assert same(there, here, lambda a, b: torch.allclose(a.float(), b.float(), rtol=2.0**-7, atol=near))


@pytest.mark.parametrize(
    "name", ["fp32", "fp16", "bf16_naive, split24", "stochastic", "fp8, delayed", "fp16, offloaded"]
)
@pytest.mark.parametrize("async_save", [False, True])
def test_what_is_saved_while_a_gpu_trains_on_resumes_to_the_bit(name, async_save, tmp_path):
    with pretended():
        run, other = Run("cuda", name, True), Run("cuda", name, True)
        for _ in range(3):
            run.step()
        run.booster.save(tmp_path, run.model, run.optimizer, lr_scheduler=run.schedule, step=3, async_save=async_save)
        for _ in range(2):
            run.step()
        run.booster.wait_for_save()
        other.booster.load(tmp_path, other.model, other.optimizer, lr_scheduler=other.schedule)
        for _ in range(2):
            other.step()
        assert same(run, other)


class FlashAttention:
    """The kernels of a GPU, by those of CPUs: halves, features by eights and next to each other, log-sum-exps without gaps."""

    def __init__(self):
        aten = torch.ops.aten
        self._forward = aten._scaled_dot_product_flash_attention_for_cpu
        self._backward = aten._scaled_dot_product_flash_attention_for_cpu_backward

    def _check(self, *given):
        for each in given:
            assert (each.dtype, each.stride(-1), each.shape[-1] % 8) == (torch.bfloat16, 1, 0)

    def _scaled_dot_product_flash_attention(self, q, k, v, dropout, is_causal, *, scale):
        self._check(q, k, v)
        out, lse = self._forward(q.float(), k.float(), v.float(), dropout, is_causal, scale=scale)
        return out.bfloat16(), lse, None

    def _scaled_dot_product_flash_attention_backward(self, grad, q, k, v, out, lse, *rest, scale):
        self._check(q, k, v)
        assert lse.is_contiguous()
        found = self._backward(*(x.float() for x in (grad, q, k, v, out)), lse, 0.0, rest[5], scale=scale)
        return tuple(each.bfloat16() for each in found)


@pytest.mark.parametrize("features", [12, 16])
def test_attention_in_a_ring_calls_the_kernels_of_a_gpu_as_they_want_it_and_waits_for_nothing(features, monkeypatch):
    monkeypatch.setattr(tensor_internals, "_aten", FlashAttention())
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, heads, 16, features, generator=draw).bfloat16() for heads in (4, 2, 2, 4)]
    q, k, v = (each.float().requires_grad_() for each in whole[:3])
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected.backward(whole[3].float())
    cuts = [SequenceCut(2, 16, 2, rank, True) for rank in range(2)]
    near = {"rtol": 2.0**-6, "atol": 2.0**-6}
    with pretended() as device:
        parts = [[cut.cut(each, 2, 0.0).to("cuda") for each in whole] for cut in cuts]
        totals = [torch.zeros(1, device="cuda") for _ in cuts]
        for rank, (query, key, value, grad) in enumerate(parts):

            def passed(held, group, sums=None, rank=rank):
                for source in (rank, 1 - rank):
                    yield source, F.pad(torch.stack(parts[source][1:3]), (0, held.shape[-1] - features))
                    if sums is not None:
                        totals[source] = totals[source] + sums
                        sums.zero_()

            monkeypatch.setattr(ring, "_passed_round", passed)
            query, group = query.requires_grad_(), SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
            call = Attention(0.0, True, None, cuts[rank], group)
            device.syncs = 0
            out = ring.attend_in_ring(query, key, value, None, call)
            out.backward(grad)
            assert device.syncs == 0
            for found, all_ranks in ((out, expected), (query.grad, q.grad)):
                torch.testing.assert_close(found.float().cpu(), cuts[rank].cut(all_ranks, 2, 0.0), **near)
            for wrong in ((query.float(), None), (query, torch.ones(1, 1, 16, 16))):
                with pytest.raises(RuntimeError, match='takes halves in up to 256, .* choose "all_to_all"'):
                    ring.attend_in_ring(wrong[0], key, value, wrong[1], call)
        for cut, total in zip(cuts, totals, strict=True):
            for found, all_ranks in zip(total[..., :features], (k.grad, v.grad), strict=True):
                torch.testing.assert_close(found.cpu(), cut.cut(all_ranks, 2, 0.0), **near)


# ---- the device itself


def test_tensors_of_two_devices_are_refused_as_cuda_refuses_them():
    with pretended():
        a, b = torch.ones(3, device="cuda"), torch.ones(3)
        assert (a.device, (a + 1).device, a[b.long()].device, (a * torch.tensor(2.0)).device) == (DEVICE,) * 4
        assert (b.device.type, a.to("cpu").device.type, torch.zeros_like(a, device="cpu").device.type) == ("cpu",) * 3
        for mixed in (lambda: a + b, lambda: b[a.long()], lambda: torch.stack([a, b]), lambda: b * a.sum()):
            with pytest.raises(RuntimeError, match="on the same device"):
                mixed()
        grad = a.requires_grad_()
        (grad * 2).sum().backward()
        assert lies(grad.grad)


def test_a_copy_that_nobody_waits_for_has_no_numbers_yet():
    with pretended() as device:
        a = torch.arange(3.0, device="cuda")
        target = torch.empty(3, pin_memory=True)
        target.copy_(a, non_blocking=True)
        a.zero_()
        assert bool((target.view(torch.uint8) == UNREAD).all())
        device.wait()
        assert target.tolist() == [0.0, 1.0, 2.0]
        for wrong in (lambda: torch.empty(3).copy_(a, non_blocking=True), lambda: a.to("cpu", non_blocking=True)):
            with pytest.raises(AssertionError, match="nothing waits for"):
                wrong()
        pinned = torch.ones(3).pin_memory()
        there = pinned.to("cuda", non_blocking=True)
        pinned.fill_(2.0)
        with pytest.raises(AssertionError, match="written to while the device read it"):
            there.tolist()


def test_what_crosses_to_the_host_and_back_waits_where_it_is_read_alone():
    with pretended() as device:
        flag = torch.ones((), device="cuda", dtype=torch.bool)
        with mock.patch.object(torch.cuda, "current_stream", wraps=torch.cuda.current_stream) as stream_of:
            on_its_way = HostCopy(flag)
        stream_of.assert_called_once_with(DEVICE)  # which need not be the current one
        there = DeviceCopies()(torch.arange(4), DEVICE)
        assert (device.syncs, on_its_way.ready(), there.device) == (0, False, DEVICE)
        flag.zero_()
        assert on_its_way() is True
        assert there.tolist() == [0, 1, 2, 3]
        assert copy.deepcopy(there).device == DEVICE
