"""Tensors that ranks are to start from alike: whatever they are, and in few messages."""

import pytest
import torch
from counts import Messages

from booster import Booster
from booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from booster.ranks.agreement import SMALL, TOGETHER, broadcast_from_first, gather_bytes

PLUGINS = {
    "ddp": TorchDDPPlugin,
    "zero1": LowLevelZeroPlugin,
    "zero1 scattered": lambda: LowLevelZeroPlugin(reduce_scatter=True),
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
}


def kinds(rank):
    """Tensors of every kind, full of what only `rank` has."""
    wide = torch.full((6, 8), float(rank))
    return [
        wide,
        wide.new_full((8, 6), rank).t(),
        torch.full((), rank, dtype=torch.int64),
        torch.full((5,), rank, dtype=torch.bfloat16),
        torch.full((3,), bool(rank)),
        torch.zeros(0),
        torch.full((SMALL,), float(rank)),  # four times as many bytes
        torch.full((2, 4, 3, 3), float(rank)).to(memory_format=torch.channels_last),
        wide[:, ::2],  # a view of others' memory, with gaps
        torch.zeros(2, device="meta"),
        torch.full((1, 3), float(rank)).expand(4, 3),
        torch.full((3,), rank, dtype=torch.int16),
        torch.full((3,), float(rank)).to(torch.float8_e4m3fn),
    ]


def aligned(rank, world_size):
    tensors = kinds(rank + 1)
    with Messages() as sent:
        broadcast_from_first(tensors, torch.distributed.group.WORLD)
    pairs = zip(tensors, kinds(1), strict=True)
    alike = [torch.equal(own.double(), first.double()) for own, first in pairs if not own.is_meta]
    return alike, [each.stride() for each in tensors] == [each.stride() for each in kinds(1)], sent.count


def test_every_kind_of_tensor_becomes_what_the_first_rank_has(ranks2):
    for alike, laid_as_before, messages in ranks2(aligned):
        assert alike == [True] * 12
        assert laid_as_before
        assert messages == 3  # what they are, the large one, and all others


def messages_for(rank, world_size, count, elements):
    with Messages() as sent:
        broadcast_from_first([torch.zeros(elements) for _ in range(count)], torch.distributed.group.WORLD)
    return sent.count


@pytest.mark.parametrize(("count", "elements", "messages"), [(500, 64, 2), (3 * TOGETHER // SMALL, SMALL // 4, 4)])
def test_small_tensors_share_messages_of_bounded_size(ranks2, count, elements, messages):
    assert set(ranks2(messages_for, count, elements)) == {messages}


UNLIKE = {
    "another order": lambda rank: [torch.zeros(2, 3), torch.zeros(6)][:: 1 - 2 * rank],
    "another dtype": lambda rank: [torch.zeros(4, dtype=(torch.float32, torch.int32)[rank])],
    "one more": lambda rank: [torch.zeros(4)] * (1 + rank),
    "on meta": lambda rank: [torch.zeros(4, device=("cpu", "meta")[rank])],
}


def refused(rank, world_size, name):
    tensors = UNLIKE[name](rank)
    before = [each.clone() for each in tensors]
    with pytest.raises(RuntimeError, match="not the same on all ranks, or not in the same order"):
        broadcast_from_first(tensors, torch.distributed.group.WORLD)
    return [torch.equal(*pair) for pair in zip(tensors, before, strict=True) if not pair[0].is_meta]


@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_that_hold_other_tensors_raise_and_nothing_is_written(ranks2, name):
    assert all(all(unchanged) for unchanged in ranks2(refused, name))


def exchanged(rank, world_size):
    return gather_bytes(bytes(range(256)) * rank, torch.distributed.group.WORLD)


def test_bytes_of_any_number_arrive_as_they_were_sent(ranks2):
    assert ranks2(exchanged) == [[b"", bytes(range(256))]] * 2


class Buffers(torch.nn.Module):
    """Buffers that backends do not send as they are, full of what only `rank` has."""

    def __init__(self, rank):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        wide = torch.arange(8.0).reshape(4, 2) + 10 * rank
        for name, values in {
            "column": wide[:, 0],
            "transposed": wide.t(),
            "expanded": wide[:1, :1].expand(4, 2),
            "int16": torch.full((3,), rank + 1, dtype=torch.int16),
            "uint16": torch.full((3,), rank + 1).to(torch.uint16),
            "float8": torch.full((3,), rank + 1.0).to(torch.float8_e4m3fn),
        }.items():
            self.register_buffer(name, values)

    def forward(self, x):
        return self.layer(x)


def sent(rank, world_size, plugin):
    model = Buffers(rank)
    booster = Booster("cpu", "fp32", PLUGINS[plugin]())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), 0.1))
    own, first = booster.unwrap(model), Buffers(0)
    at_start = [torch.equal(a.double(), b.double()) for a, b in zip(own.buffers(), first.buffers(), strict=True)]
    with torch.no_grad():
        for name, buffer in own.named_buffers():
            if name != "expanded" and rank:
                buffer.copy_(torch.full(buffer.shape, 7.0).to(buffer.dtype))
    booster.backward(model(torch.ones(2, 4)).sum(), optimizer)
    optimizer.step()
    return at_start, [torch.equal(a.double(), b.double()) for a, b in zip(own.buffers(), first.buffers(), strict=True)]


@pytest.mark.parametrize("plugin", PLUGINS)
def test_buffers_of_any_strides_and_dtype_are_those_of_the_first_rank(ranks2, plugin):
    assert ranks2(sent, plugin) == [([True] * 6, [True] * 6)] * 2


def frozen(rank, world_size):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model.register_parameter("low", torch.nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn), requires_grad=False))
    with pytest.raises(ValueError, match=r"float8_e4m3fn, such as low, of 1; use TorchDDPPlugin"):
        Booster("cpu", "bf16", TorchFSDPPlugin()).boost(model, torch.optim.SGD(model[0].parameters(), 0.1))
    return True


def test_parameters_that_gloo_does_not_gather_are_named(ranks2):
    assert ranks2(frozen) == [True] * 2
