"""Gather and reduce in a world of one: no collective, the same results and the same checks."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from booster.data import DataLoaderWrapper, prepare_dataloader
from booster.facade.collectives import gather, reduce


def test_alone_gather_returns_the_rows():
    rows = torch.arange(6.0, requires_grad=True).view(3, 2)
    gathered = gather({"a": (rows, 2), "b": torch.tensor(True)})
    assert torch.equal(gathered["a"][0], rows)
    assert not gathered["a"][0].requires_grad
    assert torch.equal(gathered["a"][1], torch.tensor([2]))
    assert torch.equal(gathered["b"], torch.tensor([True]))


@pytest.mark.parametrize("op", ["mean", "sum", "max", "min"])
def test_alone_reduce_returns_a_copy(op):
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    reduced = reduce(tensor, op)
    assert torch.equal(reduced, tensor)
    assert not reduced.requires_grad
    reduced.add_(1)
    assert tensor[0] == 1.0


@pytest.mark.parametrize(
    ("op", "given", "dtype"),
    [
        ("mean", torch.half, torch.half),
        ("sum", torch.bfloat16, torch.bfloat16),
        ("mean", torch.int32, torch.float32),
        ("mean", torch.bool, torch.float32),
        ("sum", torch.int8, torch.int64),
        ("sum", torch.bool, torch.int64),
        ("max", torch.int16, torch.int16),
        ("min", torch.bool, torch.bool),
        ("mean", torch.float64, torch.float64),
        ("sum", torch.complex64, torch.complex64),
    ],
)
def test_the_dtype_of_the_result(op, given, dtype):
    assert reduce(torch.ones(3, dtype=given), op).dtype == dtype


def test_numbers_stay_numbers():
    reduced = reduce({"mean": 3, "flag": True, "loss": 0.1})
    assert reduced == {"mean": 3.0, "flag": 1.0, "loss": 0.1}
    assert [type(value) for value in reduced.values()] == [float] * 3
    assert type(reduce(3, "sum")) is int
    assert type(reduce(2**60 + 1, "max")) is int
    assert reduce(2**60 + 1, "max") == 2**60 + 1
    assert reduce(2**24 + 1) == 2**24 + 1
    assert reduce(True, "min") is True


def test_what_is_not_a_number_or_an_operation_is_refused():
    with pytest.raises(ValueError, match=r"op='median' is not legal; choose one of \['mean', 'sum', 'max', 'min'\]"):
        reduce(torch.ones(1), "median")
    with pytest.raises(TypeError, match="complex numbers, which have no order"):
        reduce(torch.ones(1, dtype=torch.complex64), "max")
    for call in (gather, reduce):
        with pytest.raises(TypeError, match="dense tensors, numbers and containers of them, got str"):
            call("text")
        with pytest.raises(TypeError, match="sparse_coo"):
            call(torch.ones(2, 2).to_sparse())


def test_labels_beside_numbers_stay_in_reduce():
    labelled = {"task": "cola", "note": None, "raw": b"x", "loss": [1.5, "of the epoch"], "seen": torch.tensor(2)}
    assert reduce(labelled, "sum") == labelled
    with pytest.raises(TypeError, match="got str"):
        gather(labelled)


def test_rows_that_do_not_fit_the_loader_are_refused():
    dataset = TensorDataset(torch.arange(10))
    loader = DataLoaderWrapper(prepare_dataloader(dataset, 4, rank=0, world_size=2), "cpu")
    with pytest.raises(TypeError, match="dataloader that boost"):
        gather(torch.ones(4), padding_from=loader.unwrap())
    with pytest.raises(RuntimeError, match="not yielded a batch"):
        gather(torch.ones(4), padding_from=loader)
    next(iter(loader))
    with pytest.raises(ValueError, match="deals to 2 ranks, but this gathers over 1"):
        gather(torch.ones(4), padding_from=loader)


def test_alone_a_loader_without_a_distributed_sampler_has_all_rows():
    loader = DataLoaderWrapper(DataLoader(TensorDataset(torch.arange(5)), batch_size=2), "cpu")
    rows = [gather(batch, padding_from=loader) for (batch,) in loader]
    assert torch.cat(rows).tolist() == list(range(5))
