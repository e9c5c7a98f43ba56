"""Frozen weights in 4 and 8 bits: the numbers they stand for, and the layer that multiplies with them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from booster.frozen import FORMS, FrozenLinear
from booster.number_formats.number_format import NF4_LEVELS, decode_nf4, encode_nf4

# Half the distance between neighbours, over the largest of a block.
LARGEST_ERROR = {"int8": 0.5 / 127, "fp8": 2.0**-4, "nf4": (1.0 - 0.6961928009986877) / 2}


def weights(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def frozen(form, columns=70, rows=48, bias=True, **options):
    torch.manual_seed(0)
    linear = nn.Linear(columns, rows, bias=bias)
    layer = FrozenLinear.of(linear, FORMS.get(form, form), **options)
    layer.weight.detach().copy_(
        linear.weight.detach() if layer.form is None else layer.form.pack(linear.weight.detach())
    )
    return layer, linear


def test_nf4_has_the_quantiles_of_the_paper():
    offset = (1 - 1 / (2 * 15) + 1 - 1 / (2 * 16)) / 2
    ends = (
        torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1],
        torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1],
    )
    above, below = (torch.special.ndtri(end) for end in ends)
    levels = torch.cat([-below, above, torch.zeros(1, dtype=torch.float64)]).sort().values / above.max()
    torch.testing.assert_close(torch.tensor(NF4_LEVELS, dtype=torch.float64), levels, rtol=0, atol=2e-7)


def test_nf4_takes_the_nearest_level_and_gives_every_level_back():
    levels = torch.tensor([NF4_LEVELS])
    assert torch.equal(decode_nf4(encode_nf4(levels), 16), levels)
    x = torch.linspace(-1, 1, 1001).view(1, -1)
    nearest = levels[0][(x.view(-1, 1) - levels).abs().argmin(1)]
    assert torch.equal(decode_nf4(encode_nf4(x), 1001)[0], nearest)


@pytest.mark.parametrize("form", FORMS.values(), ids=str)
@pytest.mark.parametrize("columns", [1, 63, 64, 129, 300])
def test_packed_rows_stand_for_the_numbers_up_to_the_form_s_rounding(form, columns):
    x = weights(7, columns)
    x[3] = 0
    x[4] *= 1e-20
    packed = form.pack(x)
    assert packed.dtype == torch.uint8
    assert packed.shape == (7, form.row_bytes(columns))
    wide = form.unpack(packed, columns, torch.float32)
    for start in range(0, columns, form.block):
        block, got = x[:, start : start + form.block], wide[:, start : start + form.block]
        bound = block.abs().amax(1, keepdim=True) * LARGEST_ERROR[form.name] * (1 + 1e-5)
        assert bool(((got - block).abs() <= bound).all())
    assert torch.equal(form.pack(x[2:3]), packed[2:3]), "a row is packed by itself"
    assert torch.equal(form.unpack(form.pack(wide), columns, torch.float32), wide), "what is stored stays what it is"


def test_bytes_a_number_are_those_of_codes_and_scales():
    assert {name: form.row_bytes(1024) / 1024 for name, form in FORMS.items()} == {
        "int8": 1.03125,
        "fp8": 1.03125,
        "nf4": 0.5625,
    }


def test_large_matrices_are_packed_piece_by_piece_alike(monkeypatch):
    x = weights(33, 200)
    whole = {name: form.pack(x) for name, form in FORMS.items()}
    monkeypatch.setattr("booster.frozen._AT_ONCE", 700)
    for name, form in FORMS.items():
        assert torch.equal(form.pack(x), whole[name])
        pieces = form.unpack(whole[name], 200, torch.bfloat16)
        monkeypatch.setattr("booster.frozen._AT_ONCE", 2**18)
        assert torch.equal(pieces, form.unpack(whole[name], 200, torch.bfloat16))
        monkeypatch.setattr("booster.frozen._AT_ONCE", 700)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("form", FORMS.values(), ids=str)
def test_inf_and_nan_are_refused(form, bad):
    x = weights(2, 80)
    x[1, 70] = bad
    with pytest.raises(ValueError, match=f"{form} has no code for inf or NaN"):
        form.pack(x)


@pytest.mark.parametrize("stored", [*FORMS, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_multiplies_with_what_its_weight_stands_for_in_both_passes(stored, bias):
    layer, _ = frozen(stored, bias=bias)
    x = weights(6, 70, seed=1).view(2, 3, 70).requires_grad_()
    other = x.detach().clone().requires_grad_()
    plain_bias = layer.bias.detach().clone().requires_grad_() if bias else None
    y = layer(x)
    expected = F.linear(other, layer.unpacked(), plain_bias)
    assert torch.equal(y, expected)
    g = weights(6, 48, seed=2).view(2, 3, 48)
    y.backward(g)
    expected.backward(g)
    torch.testing.assert_close(x.grad, other.grad)
    if bias:
        torch.testing.assert_close(layer.bias.grad, plain_bias.grad)
    assert layer.weight.grad is None
    assert [name for name, param in layer.named_parameters() if param.requires_grad] == ["bias"] * bias


@pytest.mark.parametrize("compute", [None, torch.bfloat16, torch.float16, torch.float32])
def test_it_computes_in_the_dtype_asked_for_and_returns_that_of_autocast_or_input(compute):
    layer, _ = frozen("nf4", compute_dtype=compute)
    x = weights(3, 70)
    y = layer(x)
    dtype = compute or torch.float32
    assert y.dtype == torch.float32
    assert torch.equal(y, F.linear(x.to(dtype), layer.unpacked(dtype), layer.bias.to(dtype)).float())
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    dtype = compute or torch.bfloat16
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, F.linear(x.to(dtype), layer.unpacked(dtype), layer.bias.to(dtype)).to(torch.bfloat16))


def test_neither_a_wide_weight_nor_the_input_is_kept_for_backward():
    layer, _ = frozen("nf4", 256, 256, bias=False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(weights(8, 256).requires_grad_())
    assert [tensor.data_ptr() for tensor in kept] == [layer.weight.data_ptr()]


def test_gradients_of_gradients_are_those_of_a_plain_layer():
    layer, _ = frozen("int8", 6, 4)
    x = weights(5, 6).double().requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,))
    assert torch.autograd.gradgradcheck(layer, (x,))


def test_casts_of_a_model_leave_the_weight_alone_and_a_forced_one_is_an_error():
    layer, _ = frozen("nf4")
    before = layer.weight.clone()
    layer.half()
    assert torch.equal(layer.weight, before)
    assert layer.bias.dtype == torch.float16
    assert layer(weights(2, 70).half()).dtype == torch.float16
    layer.type(torch.bfloat16)
    with pytest.raises(RuntimeError, match="a weight stored in nf4 was cast to torch.bfloat16, which destroys it"):
        layer(weights(2, 70).bfloat16())


def test_a_state_dict_says_its_form_and_loads_into_that_form_alone():
    layer, _ = frozen("nf4")
    assert list(layer.state_dict()) == ["weight_nf4", "bias"]
    other, _ = frozen("nf4")
    other.weight.detach().zero_()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, layer.weight)
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight_int8"'):
        frozen("int8")[0].load_state_dict(layer.state_dict())


def test_it_keeps_hooks_and_copies_and_says_what_it_is():
    linear = nn.Linear(4, 2)
    seen = []
    linear.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    layer = FrozenLinear.of(linear, FORMS["int8"], compute_dtype=torch.bfloat16)
    layer.weight.detach().copy_(layer.form.pack(linear.weight.detach()))
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(torch.ones(1, 4)), layer(torch.ones(1, 4)))
    assert seen == [FrozenLinear, FrozenLinear]
    assert isinstance(layer, nn.Linear)
    assert (
        repr(layer)
        == "FrozenLinear(in_features=4, out_features=2, bias=True, stored=int8, compute_dtype=torch.bfloat16)"
    )
    with pytest.raises(RuntimeError, match=r"give the model its weights by booster.load_weights"):
        layer.reset_parameters()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch's compiler about itself
@pytest.mark.parametrize("form", FORMS)
def test_a_compiled_layer_gives_what_the_layer_gives(form):
    layer, _ = frozen(form, 128, 96)
    results = []
    for forward in (layer, torch.compile(layer, fullgraph=True, dynamic=False)):
        x = weights(6, 128, seed=1).requires_grad_()
        y = forward(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, layer.bias.grad))
        layer.bias.grad = None
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
