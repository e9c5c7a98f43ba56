"""Gather and reduce over several ranks: right rows, right order, right errors, and never a hang."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from booster import Booster, find_batch_size
from booster.data import DataLoaderWrapper, prepare_dataloader
from booster.facade.collectives import gather, reduce
from booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int64,
    torch.half,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


def world():
    return dist.group.WORLD


# ---- gather


def gather_uneven(rank, world_size, dtype):
    rows = torch.full((rank, 2), 1 + rank).to(dtype)  # rank 0 has none
    return gather(rows, group=world())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_come_in_rank_order_for_every_dtype_and_any_count(ranks4, dtype):
    expected = torch.tensor([[2, 2], [3, 3], [3, 3], [4, 4], [4, 4], [4, 4]]).to(dtype)
    for result in ranks4(gather_uneven, dtype):
        assert result.dtype == dtype
        assert result.shape == expected.shape
        assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8))


def gather_containers(rank, world_size):
    empty = gather(torch.zeros(0, 3), group=world())
    strided = gather(torch.arange(4.0).view(2, 2).t() + rank, group=world())
    result = gather(
        {"scalar": torch.tensor(float(rank)), "pair": (rank, [torch.full((rank + 1,), rank)])}, group=world()
    )
    return empty, strided, result


def test_containers_scalars_numbers_empty_and_strided_tensors(ranks2):
    for empty, strided, result in ranks2(gather_containers):
        assert empty.shape == (0, 3)
        assert strided.tolist() == [[0.0, 2.0], [1.0, 3.0], [1.0, 3.0], [2.0, 4.0]]
        assert result["scalar"].tolist() == [0.0, 1.0]
        assert result["pair"][0].tolist() == [0, 1]
        assert result["pair"][1][0].tolist() == [0, 1, 1]


def gather_in_subgroup(rank, world_size):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    result = gather(torch.tensor([rank]), group=groups[rank % 2])
    total = reduce(rank, "sum", group=groups[rank % 2])
    return result.tolist(), total, gather(torch.tensor([rank])).tolist(), reduce(rank, "sum")


def test_a_group_is_its_own_world_and_no_group_means_no_collective(ranks4):
    assert ranks4(gather_in_subgroup) == [([r % 2, r % 2 + 2], 2 + 2 * (r % 2), [r], r) for r in range(4)]


def misuse(rank, world_size):
    """The error of every wrong call, on this rank; afterwards the group still works."""
    odd = rank == 1
    calls = {
        "dtype": lambda: gather(torch.ones(2, dtype=torch.half if odd else torch.float), group=world()),
        "shape": lambda: gather(torch.ones(2, 3 if odd else 4), group=world()),
        "dims": lambda: gather(torch.ones(2, 3) if odd else torch.ones(2), group=world()),
        "container": lambda: gather([torch.ones(1)] * (2 if odd else 1), group=world()),
        "object": lambda: gather("text" if odd else torch.ones(1), group=world()),
        "call": lambda: reduce(torch.ones(1), "max" if odd else "sum", group=world()),
        "op": lambda: reduce(torch.ones(1), "median" if odd else "sum", group=world()),
        "reduce shape": lambda: reduce(torch.ones(2 if odd else 3), group=world()),
    }
    errors = {}
    for name, call in calls.items():
        with pytest.raises((ValueError, TypeError)) as info:
            call()
        errors[name] = str(info.value)
    return errors, reduce(1, "sum", group=world())


def test_ranks_that_disagree_all_get_a_clear_error_and_none_hangs(ranks4):
    for rank, (errors, alive) in enumerate(ranks4(misuse)):
        assert alive == 4
        assert (
            "equal dtypes and shapes after the first dimension, got by rank: torch.float32 [2], torch.float16 [2]"
            in errors["dtype"]
        )
        assert "torch.float32 [2, 4], torch.float32 [2, 3]" in errors["shape"]
        assert "torch.float32 [2], torch.float32 [2, 3]" in errors["dims"]
        assert "different containers" in errors["container"]
        assert ("got str" if rank == 1 else "ranks [1] of the group could not take part") in errors["object"]
        assert "different collectives" in errors["call"]
        assert ("op='median' is not legal" if rank == 1 else "ranks [1]") in errors["op"]
        assert "equal dtypes and shapes, got by rank: torch.float32 [3], torch.float32 [2]" in errors["reduce shape"]


# ---- gather in dataset order


def numbers(length):
    return TensorDataset(torch.arange(length))


def evaluate(rank, world_size, length, batch_size, options):
    plain = prepare_dataloader(numbers(length), batch_size, rank=rank, world_size=world_size, **options)
    loader = DataLoaderWrapper(plain, "cpu")
    epochs = []
    for _ in range(2):
        own, by_batch = [], []
        for (batch,) in loader:
            own.append(batch)
            by_batch += gather(batch, group=world(), padding_from=loader).tolist()
        by_epoch = gather(torch.cat(own), group=world(), padding_from=loader).tolist()
        epochs.append((torch.cat(own).tolist(), by_batch, by_epoch))
    return epochs


@pytest.mark.crossed
@pytest.mark.parametrize("length", [1, 3, 8, 10, 13])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_every_sample_once_and_in_dataset_order(ranks4, length, batch_size):
    for epochs in ranks4(evaluate, length, batch_size, {}):
        for _, by_batch, by_epoch in epochs:
            assert by_batch == by_epoch == list(range(length))


def test_a_shuffled_epoch_has_every_sample_once_in_its_own_order(ranks4):
    results = ranks4(evaluate, 10, 2, {"shuffle": True})
    first, second = ([epochs[e][1] for epochs in results] for e in range(2))
    assert sorted(first[0]) == sorted(second[0]) == list(range(10))
    assert first[0] != second[0]
    assert all(rows == first[0] for rows in first)
    assert all(by_batch == by_epoch for epochs in results for _, by_batch, by_epoch in epochs)


def test_what_is_dropped_is_not_there(ranks4):
    for epochs in ranks4(evaluate, 13, 2, {"drop_last": True}):
        # 12 of 13 divide among 4 ranks, and 2 of the 3 on each rank fill a batch
        assert all(by_batch == by_epoch == list(range(8)) for _, by_batch, by_epoch in epochs)


def test_ranks_see_disjoint_data(ranks2):
    own = [epochs[0][0] for epochs in ranks2(evaluate, 12, 2, {"shuffle": True})]
    assert set(own[0]).isdisjoint(own[1])
    assert sorted(own[0] + own[1]) == list(range(12))


def gather_after_a_break(rank, world_size):
    loader = DataLoaderWrapper(prepare_dataloader(numbers(10), 2, rank=rank, world_size=world_size), "cpu")
    (batch,) = next(iter(loader))
    first = gather(batch, group=world(), padding_from=loader).tolist()
    return first, loader.epoch


def test_after_an_early_break_nothing_is_taken_for_padding(ranks4):
    assert ranks4(gather_after_a_break) == [(list(range(8)), 1)] * 4


class Pairs:
    """A batch sampler without an attribute for its batch size."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        indices = list(self.sampler)
        return iter([indices[i : i + 2] for i in range(0, len(indices), 2)])

    def __len__(self):
        return (len(self.sampler) + 1) // 2


def gather_with_own_batch_sampler(rank, world_size):
    loader = DataLoaderWrapper(
        DataLoader(numbers(10), batch_sampler=Pairs(DistributedSampler(numbers(10), shuffle=False))), "cpu"
    )
    return [row for (batch,) in loader for row in gather(batch, group=world(), padding_from=loader).tolist()]


def test_a_batch_sampler_of_the_user_over_a_distributed_sampler_works(ranks4):
    assert ranks4(gather_with_own_batch_sampler) == [list(range(10))] * 4


def wrong_rows(rank, world_size):
    loader = DataLoaderWrapper(prepare_dataloader(numbers(10), 2, rank=rank, world_size=world_size), "cpu")
    batches = [batch for (batch,) in loader]
    errors = []
    for rows in (torch.ones(4), torch.ones(1 if rank else 3)):
        with pytest.raises(ValueError) as info:
            gather(rows, group=world(), padding_from=loader)
        errors.append(str(info.value))
    plain = DataLoaderWrapper(DataLoader(numbers(4)), "cpu")
    next(iter(plain))
    with pytest.raises(ValueError, match="not a torch DistributedSampler; gather without the dataloader"):
        gather(torch.ones(1), group=world(), padding_from=plain)
    return errors, gather(batches[-1], group=world(), padding_from=loader).tolist()


def test_rows_that_are_not_one_per_sample_raise_on_all_ranks(ranks4):
    for errors, last in ranks4(wrong_rows):
        assert "got 4 rows, but the dataloader's last batch and its epoch so far have [1, 3] rows" in errors[0]
        assert "equal dtypes and shapes, got by rank: torch.float32 [3], torch.float32 [1]" in errors[1]
        assert last == [8, 9]


# ---- reduce


def reduce_all(rank, world_size):
    tensor = torch.tensor([1.0, -2.0]) * (rank + 1)
    before = tensor.clone()
    results = {op: reduce(tensor, op, group=world()) for op in ("mean", "sum", "max", "min")}
    assert torch.equal(tensor, before)
    results["integer mean"] = reduce(torch.tensor([rank]), group=world())
    results["any"] = reduce(torch.tensor([rank == 0]), "max", group=world())
    results["all"] = reduce(torch.tensor([rank == 0]), "min", group=world())
    results["count"] = reduce(torch.tensor([True]), "sum", group=world())
    results["int8"] = reduce(torch.tensor([100], dtype=torch.int8), "sum", group=world())
    results["complex"] = reduce(torch.tensor([1j * rank]), "sum", group=world())
    results["strided"] = reduce(torch.arange(4.0).view(2, 2).t(), "sum", group=world())
    results["empty"] = reduce(torch.zeros(0), "sum", group=world())
    results["numbers"] = reduce({"loss": 0.5 * rank, "seen": rank}, group=world())
    results["labels"] = reduce(["cola", 0.5 * rank, None], group=world())
    with pytest.raises(ValueError, match="different containers"):
        reduce(["cola", 0.5] if rank else [0.5, "cola"], group=world())
    return results


def test_every_operation_on_every_kind_of_value(ranks4):
    for result in ranks4(reduce_all):
        assert result["mean"].tolist() == [2.5, -5.0]
        assert result["sum"].tolist() == [10.0, -20.0]
        assert result["max"].tolist() == [4.0, -2.0]
        assert result["min"].tolist() == [1.0, -8.0]
        assert result["integer mean"].tolist() == [1.5]
        assert result["any"].tolist() == [True]
        assert result["all"].tolist() == [False]
        assert result["count"].tolist() == [4]
        assert result["int8"].tolist() == [400]
        assert result["complex"].tolist() == [6j]
        assert result["strided"].tolist() == [[0.0, 8.0], [4.0, 12.0]]
        assert result["empty"].shape == (0,)
        assert result["numbers"] == {"loss": 0.75, "seen": 1.5}
        assert result["labels"] == ["cola", 0.75, None]


def reduce_extremes(rank, world_size):
    values = torch.tensor([[1.0, -2.0, float("inf"), -0.0], [3.0, -5.0, -float("inf"), 0.0], [0.5, -1.0, 2.0, -0.0]])
    found = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.half):
        for op in ("max", "min"):
            own = values[min(rank, 2)].to(dtype)
            found[dtype, op] = reduce(own, op, group=world()).tolist()
            for holder in range(world_size):
                with_nan = own.clone()
                with_nan[1] = float("nan") if rank == holder else own[1]
                result = reduce(with_nan, op, group=world())
                found[dtype, op, holder] = result.isnan().tolist() == [False, True, False, False]
    found["number"] = [
        math.isnan(reduce(float("nan") if rank == holder else 1.0, "max", group=world()))
        for holder in range(world_size)
    ]
    return found


def test_extremes_are_those_of_all_ranks_and_nan_where_any_rank_has_one(ranks4):
    for found in ranks4(reduce_extremes):
        assert found.pop("number") == [True] * 4
        for key, value in found.items():
            wanted = {"max": [3.0, -1.0, math.inf, 0.0], "min": [0.5, -5.0, -math.inf, 0.0]}
            assert value == (True if len(key) == 3 else wanted[key[1]]), key


def reduce_half(rank, world_size):
    mean = reduce(torch.tensor([60000.0], dtype=torch.half), group=world())
    # Each addition of 1 to 256 would be lost in bfloat16.
    total = reduce(torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16), "sum", group=world())
    return mean, total


def test_halves_are_reduced_in_float32(ranks4):
    for mean, total in ranks4(reduce_half):
        assert mean.dtype == torch.half
        assert mean.item() == 60000.0 // 32 * 32
        assert total.item() == 260.0  # 259 is between two bfloat16 numbers
        assert total.dtype == torch.bfloat16


class Streamed(torch.utils.data.IterableDataset):
    """Deals its samples to ranks by itself, of which the last gets fewer."""

    def __init__(self, rank, world_size):
        self.samples = torch.arange(7)[rank::world_size]

    def __iter__(self):
        yield from self.samples


def gather_streamed(rank, world_size):
    booster = Booster("cpu", None, TorchDDPPlugin())
    loader = booster.boost(torch.nn.Linear(1, 1), None, None, DataLoader(Streamed(rank, world_size), 2))[3]
    rows = torch.cat([booster.gather(batch, loader) for batch in loader])
    return rows, booster.gather({"seen": torch.cat(list(loader))}, loader)["seen"]


@pytest.mark.filterwarnings("ignore")
def test_rows_of_an_iterable_dataset_come_in_the_order_of_ranks(ranks2):
    for rows, epoch in ranks2(gather_streamed):
        assert rows.tolist() == [0, 2, 1, 3, 4, 6, 5]
        assert epoch.tolist() == [0, 2, 4, 6, 1, 3, 5]


# ---- find_batch_size


class Full(nn.Module):
    """Two layers; between them rank 1 runs out of memory, in forward or in backward, with more than 5 samples."""

    def __init__(self, rank, where):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.where = where if rank == 1 else None

    def forward(self, x):
        x = self.first(x)
        if len(x) > 5 and self.where == "forward":
            self.fill()
        elif len(x) > 5 and self.where == "backward":
            x.register_hook(self.fill)
        return self.second(x)

    def fill(self, grad=None):
        raise MemoryError("out of memory")


FULL = {
    "fsdp": lambda: TorchFSDPPlugin(wrap_policy=nn.Linear),
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
}


def found(rank, world_size):
    sizes, changes = {}, {}
    for name, plugin in FULL.items():
        for where in (None, "forward", "backward"):
            b, model = Booster("cpu", "fp32", plugin()), Full(rank, where)
            model, optimizer, *_ = b.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

            def trial(size):
                b.backward(model(torch.ones(size, 4)).square().mean(), optimizer)  # noqa: B023
                optimizer.zero_grad()  # noqa: B023

            sizes[name, where] = find_batch_size(trial, 16)
            b.backward(model(torch.ones(2, 4)).square().mean(), optimizer)
            optimizer.step()
            weights = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in model.state_dict().values()]
            changes[name, where] = torch.cat([weight.flatten() for weight in weights])
    for name, where in sizes:
        assert torch.equal(changes[name, where], changes[name, None]), (name, where)
    return sizes


def test_all_ranks_take_the_smaller_batch_where_one_of_them_alone_runs_out_of_memory(ranks2):
    right = {(name, where): 4 if where else 16 for name in FULL for where in (None, "forward", "backward")}
    assert ranks2(found) == [right] * 2
