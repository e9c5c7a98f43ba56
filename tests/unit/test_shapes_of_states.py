"""A parameter that no longer has the shape of its states or its gradient is not stepped, whatever kernel is chosen."""

import pytest
import torch
from torch import nn

from booster import Booster
from booster.common.torch_internals.tensor_internals import like_check
from booster.mixed_precision import BF16NaiveMixedPrecision

MAKES = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "Adam amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
}
PRECISIONS = {
    "fp32": lambda: "fp32",
    "bf16": lambda: "bf16",
    "fp16": lambda: "fp16",
    "with masters": lambda: BF16NaiveMixedPrecision(keep_fp32=(nn.Embedding,)),
}


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(40, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.words(x).to(self.head.weight.dtype))


def trained(precision, make, **options):
    torch.manual_seed(0)
    model = Words()
    b = Booster("cpu", PRECISIONS[precision](), **options)
    model, optimizer, *_ = b.boost(model, MAKES[make](model.parameters()))
    for _ in range(3):  # from the third on, nothing is looked at again that is as it was
        step(b, model, optimizer)
        optimizer.zero_grad()
    return b, model, optimizer


def step(b, model, optimizer):
    b.backward(model(torch.arange(16)).float().square().mean(), optimizer)
    return optimizer.step()


@pytest.mark.crossed
@pytest.mark.parametrize("release", [False, "exact"])
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_vocabulary_made_smaller_in_place_is_told_by_name_and_nothing_is_stepped(precision, make, release):
    b, model, optimizer = trained(precision, make, release_gradients=release)
    own = b.unwrap(model)
    own.words.weight.data = own.words.weight.data[:20].clone()  # smaller: a kernel would stay within its memory
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        RuntimeError, match=r"words\.weight has shape \(20, 8\) now, and its state '\w+' has shape \(40, 8\)"
    ):
        step(b, model, optimizer)
    if not release:  # within a backward pass, others may have been stepped
        assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("make", MAKES)
def test_after_its_states_are_dropped_a_resized_vocabulary_trains_on(make):
    b, model, optimizer = trained("fp32", make)
    own = b.unwrap(model)
    own.words.weight.data = own.words.weight.data[:20].clone()
    optimizer.state.clear()
    if make == "Adagrad":
        pytest.skip("makes its states in its constructor, in some versions of torch")
    before = own.words.weight.detach().clone()
    assert step(b, model, optimizer).applied
    assert not torch.equal(before, own.words.weight)


def test_a_parameter_that_changed_between_backward_and_step_is_told_by_its_gradient():
    b, model, optimizer = trained("fp32", "SGD")
    b.backward(model(torch.arange(16)).square().mean(), optimizer)
    own = b.unwrap(model)
    own.words.weight.data = own.words.weight.data[:20].clone()
    with pytest.raises(RuntimeError, match=r"its gradient has shape \(40, 8\)"):
        optimizer.step()


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
def test_a_state_that_somebody_put_there_in_another_shape_is_told(name):
    b, model, optimizer = trained("fp32", "AdamW")
    # Larger than its parameter: a kernel would stay within its memory.
    b.unwrap(optimizer).state[b.unwrap(model).words.weight][name] = torch.zeros(60, 8)
    with pytest.raises(RuntimeError, match=rf"its state '{name}' has shape \(60, 8\)"):
        step(b, model, optimizer)


def test_a_state_that_somebody_put_there_in_another_order_is_laid_as_its_parameter():
    runs = trained("fp32", "AdamW"), trained("fp32", "AdamW")
    b, model, optimizer = runs[0]
    own = b.unwrap(optimizer).state[b.unwrap(model).words.weight]
    own["exp_avg"] = own["exp_avg"].t().contiguous().t()
    for each in runs:
        assert step(*each).applied
    assert all(map(torch.equal, runs[0][1].parameters(), runs[1][1].parameters()))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:4],
        lambda x: x.t(),
        lambda x: x.double(),
        lambda x: x.to("meta"),
        nn.Parameter,
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: None,
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_one_call_tells_whatever_a_kernel_trusts_from_what_it_was(change):
    tensors = [torch.zeros(8, 8), torch.zeros(8, 8), torch.zeros(())]
    alike = like_check(tensors)
    assert alike(*map(torch.ones_like, tensors))
    assert not alike(tensors[0], change(tensors[1]), tensors[2])
    other = [tensors[0], change(tensors[1]), tensors[2]]
    if other[1] is None or other[1].layout is not torch.strided:
        assert like_check(other) is None
