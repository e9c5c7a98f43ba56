"""A zoo of planted faults: a tiny model, one thing wrong with it, and what a diagnosis of it has to say.

    python tests/support/zoo.py [NAME...]

prints the score. A fault is a function that gets a `Cage`, plants the fault in it, and is decorated with what is true of it.
Entries may be a dict by precision, where a precision runs other operations; the key "*" is for all others.
"""

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision

DIM, LENGTH, BATCH, CLASSES = 8, 5, 4, 3
NAN, INF = math.nan, math.inf

PRECISIONS = {
    "fp32": lambda scale: "fp32",
    "bf16": lambda scale: "bf16",
    "bf16_naive": lambda scale: "bf16_naive",
    "fp16": lambda scale: FP16TorchMixedPrecision(init_scale=scale),
    "fp16_naive": lambda scale: FP16NaiveMixedPrecision(initial_scale=scale),
}
ALL = tuple(PRECISIONS)
FP16 = ("fp16", "fp16_naive")
HALF = ("bf16", "bf16_naive", "fp16", "fp16_naive")
NAIVE = ("bf16_naive", "fp16_naive")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.gain, self.mask = 1.0, None

    def forward(self, x):
        scores = (self.q(x) * self.gain) @ (self.k(x) * self.gain).transpose(-2, -1)
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask, -INF)
        return scores.softmax(-1) @ self.v(x)


class Block(nn.Module):
    """extra: what is done to the activations before the MLP. Only one block of a Net has attention: it takes time."""

    def __init__(self, attends):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attn = Attention() if attends else nn.Identity()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.extra = None

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        if self.extra is not None:
            x = self.extra(x)
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.position = nn.Parameter(torch.randn(LENGTH, DIM) * 0.1)
        self.blocks = nn.ModuleList(Block(index == 1) for index in range(3))
        self.head = nn.Linear(DIM, CLASSES)
        self.recompute = False

    def forward(self, x):
        x = self.embed(x) + self.position.to(self.embed.weight.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x.mean(1))


@dataclass
class Cage:
    """What a fault is planted in. model, x, y: before `boost`. loss: of the model's output and the cage. after: called with
    the boosted model. criterion: boosted, called in place of `loss`."""

    precision: str
    model: Any = field(default_factory=Net)
    x: Any = field(default_factory=lambda: torch.randn(BATCH, LENGTH, DIM))
    y: torch.Tensor = field(default_factory=lambda: torch.arange(BATCH) % CLASSES)
    loss: Callable[[Any, Any], torch.Tensor] = lambda out, cage: F.cross_entropy(out, cage.y)
    after: Callable[[Any], Any] | None = None
    criterion: Any = None
    scale: float = 2.0**10


@dataclass(frozen=True)
class Fault:
    name: str
    plant: Callable[[Cage], None]
    kind: Any
    module: Any
    operation: Any
    direction: Any
    precisions: tuple[str, ...]

    def truth(self, precision):
        return {
            name: value.get(precision, value.get("*")) if isinstance(value, dict) else value
            for name, value in vars(self).items()
            if name in ("kind", "module", "operation", "direction")
        }


FAULTS: list[Fault] = []


def fault(kind, module, operation, direction, precisions=ALL):
    def add(plant):
        FAULTS.append(Fault(plant.__name__, plant, kind, module, operation, direction, precisions))
        return plant

    return add


def diagnose(planted, precision, plugin=None):
    """Plant the fault, boost, and diagnose a step of it."""
    torch.manual_seed(3)
    cage = Cage(precision)
    planted.plant(cage)
    booster = Booster("cpu", PRECISIONS[precision](cage.scale), plugin)
    trained = [param for param in cage.model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    model, optimizer, criterion, *_ = booster.boost(cage.model, optimizer, cage.criterion)
    if cage.after is not None:
        cage.after(model)

    def forward():
        out = model(**cage.x) if isinstance(cage.x, dict) else model(cage.x)
        return cage.loss(out, cage) if criterion is None else criterion(out, cage.y)

    return booster.diagnose(forward, optimizer)


def judge(found, truth):
    """Return what of `truth` the diagnosis got wrong. A set has several right answers."""
    answers = {name: value if isinstance(value, set) else {value} for name, value in truth.items()}
    return {name: (getattr(found, name), truth[name]) for name in truth if getattr(found, name) not in answers[name]}


# ---------------------------------------------------------------------- overflow in the forward pass


@fault("overflow", "blocks.0.up", "aten.addmm", "forward", FP16)
def large_weights_in_the_first_block(cage):
    cage.model.blocks[0].up.weight.data.fill_(6e4)
    cage.model.blocks[0].extra = lambda x: x.abs() + 1


@fault("overflow", "blocks.2.down", "aten.addmm", "forward", FP16)
def large_weights_in_the_last_block(cage):
    cage.model.blocks[2].down.weight.data.fill_(6e4)
    cage.model.blocks[2].up.bias.data.fill_(9)


@fault("overflow", "head", "aten.addmm", "forward", FP16)
def large_weights_in_the_head(cage):
    cage.model.head.weight.data.fill_(6e4)
    cage.model.blocks[2].down.bias.data.fill_(4)


@fault("overflow", "blocks.1.attn", "aten.bmm", "forward", FP16)
def attention_scores_without_scaling(cage):
    cage.model.blocks[1].attn.gain = 3000.0


@fault("overflow", {"fp16": "embed", "*": "Net"}, "aten._to_copy", "forward", FP16)
def data_beyond_half(cage):
    cage.x[1, 2, 3] = 1e5


@fault(
    {"fp16": "overflow", "*": "weights"},
    "blocks.1.down",
    {"fp16": "aten._to_copy", "*": "aten.addmm"},
    "forward",
    FP16,
)
def a_weight_beyond_half(cage):
    cage.model.blocks[1].down.weight.data[0, 0] = 1e5


@fault("overflow", "blocks.0", "aten.pow", "forward", FP16)
def a_fourth_power(cage):
    cage.model.blocks[0].extra = lambda x: x + ((x.half() + 20) ** 4).to(x.dtype)


@fault("overflow", "blocks.1", "aten.sum", "forward", FP16)
def a_sum_in_half(cage):
    cage.model.blocks[1].extra = lambda x: x + (x.half() * 0 + 2e4).sum(-1, keepdim=True)


@fault("overflow", "blocks.2", "aten.exp", "forward", FP16)
def exp_of_twelve_in_half(cage):
    cage.model.blocks[2].extra = lambda x: x + (x.half() * 0 + 12).exp()


@fault("overflow", "blocks.0", "aten.cumsum", "forward", FP16)
def a_running_sum_in_half(cage):
    cage.model.blocks[0].extra = lambda x: x + (x.half() * 0 + 2e4).cumsum(-1)


@fault("overflow", "blocks.1", "aten.add", "forward", FP16)
def a_residual_sum_in_half(cage):
    cage.model.blocks[1].extra = lambda x: x + ((x.half() * 0 + 4e4) + (x.half() * 0 + 4e4))


@fault("overflow", "blocks.1", "aten.linalg_vector_norm", "forward", FP16)
def a_norm_in_half(cage):
    cage.model.blocks[1].extra = lambda x: x + (x.half() * 0 + 6e4).norm(dim=-1, keepdim=True)


@fault("overflow", "blocks.0", "aten.mul", "forward")
def a_product_beyond_float32(cage):
    cage.model.blocks[0].extra = lambda x: x + ((x.float() * 0 + 1e30) * 1e30).to(x.dtype)


@fault("overflow", "blocks.0", "aten.mul", "forward", ("bf16", "bf16_naive"))
def a_product_beyond_bfloat16(cage):
    cage.model.blocks[0].extra = lambda x: x + (x.bfloat16() * 0 + 1e30) * 1e10


@fault("overflow", "blocks.2.up", "aten.addmm", "forward", FP16)
def an_overflow_in_a_recomputed_block(cage):
    cage.model.recompute = True
    cage.model.blocks[2].up.weight.data.fill_(6e4)
    cage.model.blocks[2].extra = lambda x: x.abs() + 1


@fault("overflow", "blocks.2.up", "aten.addmm", "forward", FP16)
def an_overflow_behind_a_mask(cage):
    """The mask's infinities come first and are harmless."""
    cage.model.blocks[1].attn.mask = torch.ones(LENGTH, LENGTH).tril().bool()
    cage.model.blocks[2].up.weight.data.fill_(6e4)
    cage.model.blocks[2].extra = lambda x: x.abs() + 1


@fault("overflow", "blocks.1", "aten.exp", "forward", FP16)
def an_overflow_that_only_gradients_show(cage):
    """A sigmoid by hand: 1 / (1 + inf) is 0, so that the loss is finite."""
    cage.model.blocks[1].extra = lambda x: x + 1 / (1 + (x.half() * 0 + 12).exp())


# ---------------------------------------------------------------------- operations without a finite result


@fault("operation", "blocks.0", "aten.log", "forward")
def log_of_zero_in_a_block(cage):
    cage.model.blocks[0].extra = lambda x: x + F.relu(x - 100).log()


@fault("operation", "blocks.1", "aten.div", "forward")
def zero_by_zero_in_a_block(cage):
    cage.model.blocks[1].extra = lambda x: (x * 0) / (x * 0)


@fault("operation", "blocks.1.attn", "aten._softmax", "forward")
def softmax_of_a_row_that_is_masked_out(cage):
    mask = torch.ones(LENGTH, LENGTH).bool()
    mask[2] = False
    cage.model.blocks[1].attn.mask = mask


@fault("operation", "blocks.1.attn", "aten._softmax", "forward")
def a_mask_that_is_all_false(cage):
    cage.model.blocks[1].attn.mask = torch.zeros(LENGTH, LENGTH).bool()


@fault("operation", "blocks.0", "aten.sqrt", "forward")
def root_of_a_negative_number(cage):
    cage.model.blocks[0].extra = lambda x: x + (x * 0 - 1).sqrt()


@fault("operation", "blocks.0", "aten.mul", "forward")
def a_mask_made_by_zero_times_infinity(cage):
    cage.model.blocks[0].extra = lambda x: x + torch.zeros(DIM, dtype=x.dtype) * -INF


@fault("operation", "blocks.2", "aten.sub", "forward")
def infinity_minus_infinity(cage):
    def extra(x):
        masked = x.masked_fill(torch.ones(DIM).bool(), -INF)
        return x + (masked - masked.amax(-1, keepdim=True)).exp()

    cage.model.blocks[2].extra = extra


@fault("operation", "blocks.2", "aten.std", "forward")
def the_deviation_of_one_sample(cage):
    cage.model.blocks[2].extra = lambda x: x / x[:1].std(0)


@fault("operation", "blocks.1", "aten.mean", "forward")
def the_mean_of_nothing(cage):
    cage.model.blocks[1].extra = lambda x: x - x[x > 1e4].mean()


@fault("operation", "blocks.1", "aten.rsqrt", "forward")
def reciprocal_root_of_zero(cage):
    cage.model.blocks[1].extra = lambda x: x * (x * 0).rsqrt()


@fault("operation", "blocks.0", "aten.pow", "forward")
def a_broken_power_of_a_negative_number(cage):
    cage.model.blocks[0].extra = lambda x: (x * 0 - 2) ** 0.5 + x**1


@fault("operation", "blocks.0", "aten.atanh", "forward")
def atanh_of_one(cage):
    cage.model.blocks[0].extra = lambda x: x + (x * 0 + 1).atanh()


@fault("operation", "blocks.2", "aten.acos", "forward")
def acos_of_two(cage):
    cage.model.blocks[2].extra = lambda x: x + (x * 0 + 2).acos()


@fault("operation", "blocks.1", "aten.reciprocal", "forward")
def one_over_zero(cage):
    cage.model.blocks[1].extra = lambda x: x * (x * 0).reciprocal()


@fault("operation", "blocks.1", "aten.div", "forward", FP16)
def an_epsilon_that_half_does_not_hold(cage):
    cage.model.blocks[1].extra = lambda x: x + (x.half() * 0) / (x.half() * 0 + 1e-8)


class _NanForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.full_like(x, NAN)

    @staticmethod
    def backward(ctx, grad):
        return grad


@fault("operation", "blocks.0", "aten.full_like", "forward")
def a_function_of_ones_own_that_returns_nan(cage):
    cage.model.blocks[0].extra = _NanForward.apply


@fault("operation", "blocks.1.up", "aten.mul", "forward")
def a_forward_hook_that_damages_the_output(cage):
    cage.model.blocks[1].up.register_forward_hook(lambda module, args, out: out * NAN)


@fault("operation", "blocks.1.up", "aten.mul_", "forward")
def a_forward_hook_that_damages_the_output_in_place(cage):
    def damage(module, args, out):
        out.data.mul_(NAN)

    cage.model.blocks[1].up.register_forward_hook(damage)


@fault("operation", "blocks.2.down", "aten.div", "forward")
def a_pre_hook_that_divides_by_zero(cage):
    cage.model.blocks[2].down.register_forward_pre_hook(lambda module, args: (args[0] / 0.0,))


@fault("operation", "blocks.0", "aten.mul", "forward")
def a_factor_that_is_infinite(cage):
    cage.model.blocks[0].extra = lambda x: x * INF


@fault("operation", "blocks.0", "aten.log1p", "forward")
def log1p_of_minus_one(cage):
    cage.model.blocks[0].extra = lambda x: x + (x * 0 - 1).log1p()


@fault("operation", "Net", "aten.div", "forward")
def a_division_by_zero_in_the_model_itself(cage):
    class Dividing(Net):
        def forward(self, x):
            return super().forward(x) / 0.0

    cage.model = Dividing()
    cage.model.__class__.__name__ = "Net"


# ---------------------------------------------------------------------- data

_READS = {"fp32": "aten.view", "bf16": "aten._to_copy", "fp16": "aten._to_copy", "*": "aten._to_copy"}
_READER = {"bf16_naive": "Net", "fp16_naive": "Net", "*": "embed"}
_FIRST = {**_READS, "fp32": "aten.addmm", "fp16_naive": "aten.clamp"}  # which keeps finite inputs finite


@fault("data", _READER, _FIRST, "forward")
def one_sample_with_nan(cage):
    cage.x[2, 1, 3] = NAN


@fault("data", _READER, _FIRST, "forward")
def one_sample_with_inf(cage):
    cage.x[1, 0, 0] = INF


@fault("data", _READER, _FIRST, "forward")
def a_feature_that_is_the_log_of_zero(cage):
    cage.x = cage.x.abs().masked_fill(torch.arange(DIM) == 3, 0.0).log()


@fault("data", "", "aten.mse_loss", "loss")
def a_target_with_nan(cage):
    cage.y = torch.zeros(BATCH, CLASSES)
    cage.y[3, 1] = NAN
    cage.loss = lambda out, cage: F.mse_loss(out, cage.y)


@fault("data", "", "aten.mul", "loss")
def a_weight_of_a_sample_that_is_nan(cage):
    weights = torch.ones(BATCH)
    weights[1] = NAN
    cage.loss = lambda out, cage: (F.cross_entropy(out, cage.y, reduction="none") * weights).mean()


@fault("data", _READER, _FIRST, "forward")
def a_keyword_input_with_nan(cage):
    cage.x[3] = NAN
    cage.x = {"x": cage.x}


# ---------------------------------------------------------------------- weights


@fault("weights", "blocks.1.down", {"bf16": "aten._to_copy", "fp16": "aten._to_copy", "*": "aten.addmm"}, "forward")
def a_weight_that_is_nan(cage):
    cage.model.blocks[1].down.weight.data[0, 0] = NAN


@fault("weights", "head", {"bf16": "aten._to_copy", "fp16": "aten._to_copy", "*": "aten.addmm"}, "forward")
def a_bias_that_is_infinite(cage):
    cage.model.head.bias.data[1] = INF


@fault("weights", "blocks.2.norm", "aten.native_layer_norm", "forward")
def a_norm_whose_weight_is_nan(cage):
    cage.model.blocks[2].norm.weight.data[0] = NAN


@fault("weights", "Net", {"bf16_naive": "aten.add", "fp16_naive": "aten.add", "*": "aten.add"}, "forward")
def a_parameter_of_the_model_itself(cage):
    cage.model.position.data[0, 0] = NAN


class Classifier(nn.Module):
    """Rows of a table, a BatchNorm, a Linear."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.table(x)))


def _classifier(cage):
    cage.model, cage.x = Classifier(), torch.arange(BATCH) * 2
    return cage.model


# A CPU that widens halves casts a small table of them before it is read.
READS_TABLE = {
    "*": "aten.embedding",
    **dict.fromkeys(("bf16_naive", "fp16_naive"), {"aten.embedding", "aten._to_copy"}),
}


@fault("weights", "table", READS_TABLE, "forward")
def a_row_of_the_table_that_was_never_filled(cage):
    _classifier(cage).table.weight.data[7:] = NAN
    cage.x[2] = 8


@fault("weights", "norm", "aten.native_batch_norm", "forward")
def a_running_variance_that_is_nan(cage):
    _classifier(cage).eval().norm.running_var[0] = NAN


@fault("operation", "norm", "aten.native_batch_norm", "forward", ("fp32", "bf16"))
def a_running_variance_that_is_negative(cage):
    _classifier(cage).eval().norm.running_var.fill_(-1.0)


@fault("weights", "criterion", {"*": "aten.nll_loss_forward"}, "loss")
def a_class_weight_that_is_nan(cage):
    cage.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, NAN, 1.0]))


# ---------------------------------------------------------------------- the loss


@fault("loss", "", "aten.log", "loss")
def log_of_a_probability_that_is_zero(cage):
    cage.loss = lambda out, cage: -(out.softmax(-1) * torch.tensor([0.0, 1, 1])).log().mean()


@fault("loss", "", "aten.div", "loss")
def a_loss_that_divides_by_no_tokens(cage):
    cage.loss = lambda out, cage: F.cross_entropy(out, cage.y, reduction="none").mul(torch.zeros(BATCH)).sum() / 0.0


@fault("loss", "", "aten.nll_loss_forward", "loss")
def a_target_that_is_masked_out(cage):
    cage.loss = lambda out, cage: F.cross_entropy(out.masked_fill(torch.arange(CLASSES) == 1, -INF), cage.y)


@fault("loss", "", "aten.nll_loss_forward", "loss")
def all_targets_ignored(cage):
    cage.y = torch.full((BATCH,), -100)


class OwnCriterion(nn.Module):
    def forward(self, out, y):
        return (out.float() - out.float().detach()).abs().sum().sub(1).sqrt()


@fault("loss", "criterion", "aten.sqrt", "loss")
def a_boosted_criterion_that_takes_the_root_of_a_negative_number(cage):
    cage.criterion = OwnCriterion()


@fault("loss", "", "aten.div", "backward")
def the_root_of_a_perfect_loss(cage):
    cage.loss = lambda out, cage: F.mse_loss(out, out.detach()).sqrt()


@fault("overflow", "", "aten.pow", "loss")
def a_loss_computed_in_half(cage):
    cage.loss = lambda out, cage: ((out.half() + 300) ** 2).mean().float()


@fault("overflow", "", "aten.exp", "loss")
def the_exp_of_a_poisson_loss(cage):
    cage.loss = lambda out, cage: ((out + 200).exp() - out).mean()


@fault("loss", "", "aten.exp", "loss")
def an_exp_beyond_any_format(cage):
    cage.loss = lambda out, cage: (out + 2000).exp().mean()


@fault("loss", "", "aten.div", "loss")
def a_divergence_from_a_zero_probability(cage):
    cage.loss = lambda out, cage: (out.softmax(-1) / torch.tensor([0.0, 1, 1])).log().mean()


@fault("loss", "", "aten.div", "backward")
def a_cosine_of_zero_vectors_by_hand(cage):
    def loss(out, cage):
        diff = out - out.detach()
        return (diff.pow(2).sum(-1)).sqrt().mean()

    cage.loss = loss


# ---------------------------------------------------------------------- the backward pass


@fault({"*": "overflow"}, "blocks.1", "aten.mul", "backward", FP16)
def a_slope_beyond_half_at_any_scale(cage):
    cage.scale = 2.0
    cage.model.blocks[1].extra = lambda x: x + ((x.half() * 0 + x.half()) / 6e4 / 6e4) * 6e4 * 6e4 * 6e4


@fault("loss_scale", "blocks.1", "aten.mul", "backward", FP16)
def a_slope_beyond_half_at_this_scale(cage):
    cage.scale = 2.0**14
    cage.model.blocks[1].extra = lambda x: x + (x.half() / 3e4) * 3e4


@fault("loss_scale", "Net", "aten._to_copy", "backward", FP16)
def a_loss_scale_that_is_too_large(cage):
    cage.scale = 2.0**24


@fault("loss_scale", "Net", "aten._to_copy", "backward", FP16)
def a_loss_that_is_summed(cage):
    cage.scale = 2.0**16
    cage.loss = lambda out, cage: F.cross_entropy(out, cage.y, reduction="sum") * 100


@fault("operation", "blocks.1", "aten.div", "backward")
def the_slope_of_a_root_at_zero(cage):
    cage.model.blocks[1].extra = lambda x: x + (x * 0).sqrt()


@fault("operation", "blocks.2", "aten.div", "backward")
def the_slope_of_a_branch_that_was_not_taken(cage):
    cage.model.blocks[2].extra = lambda x: x + torch.where(x > 100, (x * 0).log(), 0.0)


@fault("operation", "blocks.0", "aten.pow", "backward")
def the_slope_of_a_broken_power_at_zero(cage):
    cage.model.blocks[0].extra = lambda x: x + (x * 0) ** 0.5


@fault("operation", "blocks.0", "aten.rsqrt", "backward")
def the_slope_of_acos_at_one(cage):
    cage.model.blocks[0].extra = lambda x: x + (x * 0 + 1).acos()


class _NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, NAN)


class _InfBackward(_NanBackward):
    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, INF)


@fault("operation", "blocks.2", "aten.full_like", "backward")
def a_function_of_ones_own_whose_gradient_is_nan(cage):
    cage.model.blocks[2].extra = _NanBackward.apply


@fault("operation", "blocks.2", "aten.full_like", "backward")
def a_function_of_ones_own_whose_gradient_is_infinite(cage):
    cage.model.blocks[2].extra = _InfBackward.apply


@fault("operation", "blocks.1", "aten.mul", "backward")
def a_hook_on_a_gradient(cage):
    def extra(x):
        x = x * 1
        x.register_hook(lambda grad: grad * NAN)
        return x

    cage.model.blocks[1].extra = extra


@fault("operation", "blocks.1", "aten.mul_", "backward")
def a_hook_that_damages_a_gradient_in_place(cage):
    def damage(grad):
        grad.mul_(NAN)

    def extra(x):
        x = x * 1
        x.register_hook(damage)
        return x

    cage.model.blocks[1].extra = extra


@fault("operation", "blocks.0.up", "aten.div", "backward")
def a_backward_hook_of_a_module(cage):
    cage.model.blocks[0].up.register_full_backward_hook(lambda module, into, out: (into[0] / 0.0,))


@fault("operation", "blocks.2.down", "aten.mul_", "backward")
def a_hook_on_the_gradient_of_a_parameter(cage):
    def damage(param):
        param.grad.mul_(NAN)

    cage.after = lambda model: model.blocks[2].down.weight.register_post_accumulate_grad_hook(damage)


@fault(None, "", "", None)
def a_layer_that_no_gradient_reaches(cage):
    """Underflow stalls it; nothing is inf or NaN."""
    cage.model.blocks[1].extra = lambda x: x + (x * 1e-30) * 1e-30


@fault(None, "", "", None)
def a_causal_mask(cage):
    """Infinities that do no harm."""
    cage.model.blocks[1].attn.mask = torch.ones(LENGTH, LENGTH).tril().bool()


@fault(None, "", "", None, FP16)
def an_overflow_that_reaches_nothing(cage):
    def extra(x):
        (x.half() * 6e4 * 6e4).sum()
        return x

    cage.model.blocks[1].extra = extra


def main(names):
    """Print what was got wrong, and the score, over all faults (or those with one of `names` in their name)."""
    right, wrong, unsure, confident = 0, 0, 0, 0
    for planted in [each for each in FAULTS if not names or any(name in each.name for name in names)]:
        for precision in planted.precisions:
            found = diagnose(planted, precision)
            errors = judge(found, planted.truth(precision))
            right, wrong = right + (not errors), wrong + bool(errors)
            unsure += found.kind is not None and not found.certain
            confident += bool(errors) and found.certain
            if errors or names:
                print(f"{planted.name} under {precision}: {errors or 'right'}\n  {found}")
    print(
        f"{right} of {right + wrong} right ({100 * right / (right + wrong):.1f} %): module, operation, direction and kind; "
        f"{confident} certain and wrong, {unsure} not certain; {len(FAULTS)} faults"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
