"""More planted faults, written from the description of a diagnosis without looking at how it is made.

    python tests/support/zoo_second.py [NAME...]

prints the score of these and of those of zoo.py. A set of answers means that any of them is right.
"""

import sys
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo import (
    ALL,
    BATCH,
    CLASSES,
    DIM,
    FAULTS,
    FP16,
    INF,
    LENGTH,
    NAN,
    PRECISIONS,
    Cage,
    Net,
    diagnose,
    fault,
    judge,
    main,
)

__all__ = ["ALL", "FAULTS", "PRECISIONS", "Cage", "diagnose", "judge"]

_BEFORE = len(FAULTS)
_FIRST_MODULE = {"bf16_naive": "Net", "fp16_naive": "Net", "*": "embed"}
_RECURRENT = {"aten.mkldnn_rnn_layer", "aten.addmm", "aten._to_copy", "aten.add", "aten.mm"}
_CAST = {"bf16": "aten._to_copy", "fp16": "aten._to_copy"}


class Applied(nn.Module):
    """A module around a function, so that a place has its own name."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


# ---------------------------------------------------------------------- forward


@fault("operation", "blocks.0", "aten.div", "forward")
def a_zero_vector_made_one_long(cage):
    cage.model.blocks[0].extra = lambda x: x + F.normalize(x * 0, dim=-1, eps=0.0)


@fault("operation", "blocks.1.extra", "aten._log_softmax", "forward")
def a_log_softmax_of_a_row_of_minus_infinities(cage):
    def gate(self, x):
        banned = torch.zeros(LENGTH, DIM).bool()
        banned[3] = True
        return x + x.masked_fill(banned, -INF).log_softmax(-1)

    cage.model.blocks[1].extra = Applied(gate)


@fault("overflow", "blocks.2.extra.qkv", "aten.addmm", "forward", FP16)
def one_third_of_a_fused_projection(cage):
    def attend(self, x):
        q, k, v = self.qkv(x.abs() + 1).chunk(3, -1)
        return x + (q @ k.transpose(-2, -1)).softmax(-1) @ v

    qkv = nn.Linear(DIM, 3 * DIM)
    qkv.weight.data[DIM : 2 * DIM] = 5e4
    cage.model.blocks[2].extra = Applied(attend, qkv=qkv)


@fault("overflow", "blocks.1.extra.gate", "aten.exp", "forward", FP16)
def the_gate_of_a_mixture_of_experts(cage):
    def gate(self, x):
        scores = (self.scores(x).half() + 15).exp()
        return (scores / scores.sum(-1, keepdim=True)).to(x.dtype)

    def mix(self, x):
        weights = self.gate(x)
        return x + weights[..., :1] * self.first(x) + weights[..., 1:] * self.second(x)

    gate = Applied(gate, scores=nn.Linear(DIM, 2))
    cage.model.blocks[1].extra = Applied(mix, gate=gate, first=nn.Linear(DIM, DIM), second=nn.Linear(DIM, DIM))


@fault("operation", "blocks.1.down", "aten.div_", "forward")
def a_hook_that_makes_a_weight_infinite(cage):
    def damage(module, args):
        module.weight.data.div_(0.0)

    cage.model.blocks[1].down.register_forward_pre_hook(damage)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(CLASSES, DIM)
        self.head = nn.Linear(DIM, CLASSES, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.table(x))


@fault("weights", "head", {**_CAST, "*": "aten.mm"}, "forward")
def a_tied_row_that_only_the_head_reads(cage):
    cage.model, cage.x = Tied(), torch.zeros(BATCH, dtype=torch.long)
    cage.model.table.weight.data[2] = NAN


@fault("operation", "blocks.1.extra", "aten.div", "forward")
def a_masked_mean_of_a_sample_without_tokens(cage):
    def pool(self, x):
        mask = torch.ones(BATCH, LENGTH, 1, dtype=x.dtype)
        mask[2] = 0
        return x + (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)

    cage.model.blocks[1].extra = Applied(pool)


@fault("operation", "blocks.0", "aten.var_mean", "forward")
def a_norm_by_hand_over_one_sample(cage):
    def extra(x):
        var, mean = torch.var_mean(x[:1], 0)
        return (x - mean) / (var + 1e-5).sqrt()

    cage.model.blocks[0].extra = extra


@fault("operation", "blocks.2.extra", "aten.pow", "forward")
def a_learned_power_of_a_negative_number(cage):
    cage.model.blocks[2].extra = Applied(
        lambda self, x: x + (x * 0 - 1) ** self.gamma.to(x.dtype), gamma=nn.Parameter(torch.tensor([0.7]))
    )


@fault("overflow", "blocks.1.extra.cell", {"aten.addmm", "aten.mm"}, "forward", FP16)
def a_state_that_grows_from_step_to_step(cage):
    def roll(self, x):
        state = x.abs() + 1
        for _ in range(12):
            state = self.cell(state)
        return x + state

    cell = nn.Linear(DIM, DIM)
    cell.weight.data.fill_(1.0)
    cage.model.blocks[1].extra = Applied(roll, cell=cell)


@fault("operation", "blocks.1.norm", "aten.native_layer_norm", "forward")
def a_layer_norm_of_equal_numbers_without_epsilon(cage):
    cage.model.blocks[0].extra = lambda x: x * 0
    cage.model.blocks[0].down.weight.data.zero_()
    cage.model.blocks[0].down.bias.data.zero_()
    cage.model.blocks[1].norm.eps = 0.0


@fault("overflow", "blocks.0.norm", "aten.native_layer_norm", "forward", ("fp32", "bf16"))
def a_sample_whose_square_is_beyond_float32(cage):
    cage.x[1] *= 1e30


@fault("weights", "blocks.0.extra", "aten.mul", "forward")
def a_table_of_frequencies_that_is_infinite(cage):
    module = Applied(lambda self, x: x + torch.sin(x * self.frequencies))
    module.register_buffer("frequencies", torch.tensor([1.0] * (DIM - 1) + [INF]))
    cage.model.blocks[0].extra = module


@fault("operation", "blocks.1.extra", "aten.log", "forward")
def the_logarithm_of_an_empty_spectrum(cage):
    cage.model.blocks[1].extra = Applied(lambda self, x: x + torch.fft.fft(x.float() * 0).abs().log().to(x.dtype))


@fault("weights", "blocks.1.extra.rnn", _RECURRENT, "forward", ("fp32", "bf16", "bf16_naive", "fp16_naive"))
def a_recurrent_bias_that_is_nan(cage):
    rnn = nn.LSTM(DIM, DIM, batch_first=True)
    rnn.bias_hh_l0.data[3] = NAN
    cage.model.blocks[1].extra = Applied(lambda self, x: x + self.rnn(x)[0], rnn=rnn)


@fault("operation", "blocks.0.extra.attn", {"aten._softmax", "aten.softmax"}, "forward")
def a_sample_that_is_padding_alone(cage):
    def attend(self, x):
        padding = torch.zeros(BATCH, LENGTH).bool()
        padding[1] = True
        return x + self.attn(x, x, x, key_padding_mask=padding)[0]

    cage.model.blocks[0].extra = Applied(attend, attn=nn.MultiheadAttention(DIM, 2, batch_first=True))


@fault(
    "operation",
    "blocks.2.up.parametrizations.weight.0",
    "aten._weight_norm_interface",
    "forward",
    ("fp32", "bf16", "fp16"),
)
def a_weight_norm_of_a_row_of_zeros(cage):
    up = cage.model.blocks[2].up
    nn.utils.parametrizations.weight_norm(up)
    up.parametrizations.weight.original1.data[4] = 0


@fault("operation", "Net", "aten.log", "forward")
def an_auxiliary_output(cage):
    class TwoOutputs(Net):
        def forward(self, x):
            out = super().forward(x)
            return {"logits": out, "aux": F.relu(out - 100).log().mean()}

    TwoOutputs.__name__ = "Net"
    cage.model = TwoOutputs()
    cage.loss = lambda out, cage: F.cross_entropy(out["logits"], cage.y) + 0.01 * out["aux"]


# ---------------------------------------------------------------------- data


@fault("data", "", {"aten.exp", "aten.sub"}, "loss")
def a_target_that_is_the_log_of_one_hot(cage):
    cage.y = F.one_hot(cage.y, CLASSES).float().log()
    cage.loss = lambda out, cage: F.kl_div(out.float().log_softmax(-1), cage.y, log_target=True, reduction="batchmean")


class Nested(Net):
    def forward(self, batch):
        return super().forward(batch["views"][1])


@fault("data", _FIRST_MODULE, {"fp32": "aten.addmm", "*": "aten._to_copy"}, "forward")
def the_second_view_in_a_nested_batch(cage):
    Nested.__name__ = "Net"
    cage.model = Nested()
    bad = cage.x.clone()
    bad[3, 4, 0] = -INF
    cage.x = {"batch": {"views": [cage.x, bad]}}


# ---------------------------------------------------------------------- the loss


@fault("loss", "", "aten.mse_loss", "loss")
def a_loss_over_an_empty_batch(cage):
    cage.loss = lambda out, cage: F.mse_loss(out[cage.y > 10], torch.zeros(0, CLASSES, dtype=out.dtype))


@fault("loss", "", "aten._ctc_loss", "loss")
def a_target_longer_than_its_input(cage):
    def loss(out, cage):
        logs = out.float().log_softmax(-1)[None]
        return F.ctc_loss(logs, torch.ones(BATCH, 2).long(), torch.ones(BATCH).long(), torch.full((BATCH,), 2))

    cage.loss = loss


@fault("loss", "", "aten.log", "loss")
def a_likelihood_of_variance_zero(cage):
    def loss(out, cage):
        var = F.relu(out.float() - 100)
        return (var.log() + out.float().square()).mean()

    cage.loss = loss


@fault("loss", "", "aten.mul", "loss")
def a_coefficient_that_is_nan(cage):
    cage.loss = lambda out, cage: F.cross_entropy(out, cage.y) * (INF - INF)


@fault("overflow", "", "aten.exp", "loss")
def a_log_sum_exp_by_hand(cage):
    cage.loss = lambda out, cage: (out.float() + 120).exp().sum(-1).log().mean()


# ---------------------------------------------------------------------- backward


class _WrongSlope(torch.autograd.Function):
    """Divides by the root of what it was given, also where that is zero."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.relu(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / F.relu(x)


@fault("operation", "blocks.1", "aten.div", "backward")
def a_function_of_ones_own_with_a_wrong_backward(cage):
    cage.model.blocks[1].extra = _WrongSlope.apply


@fault("operation", "blocks.0.extra", "aten.log", "backward")
def the_slope_of_a_learned_exponent(cage):
    """(-2)**2 is 4; its slope by the exponent has log(-2)."""
    cage.model.blocks[0].extra = Applied(
        lambda self, x: x + (x * 0 - 2) ** self.gamma.to(x.dtype), gamma=nn.Parameter(torch.tensor([2.0]))
    )


@fault("operation", "blocks.1.extra", "aten.div", "backward")
def a_root_in_a_block_recomputed_the_old_way(cage):
    inner = Applied(lambda self, x: x + (x * 0).sqrt())
    cage.model.blocks[1].extra = inner
    forward = inner.forward
    inner.forward = lambda x: checkpoint(forward, x, use_reentrant=True)


@fault("operation", "blocks.1.extra", "aten.div", "backward")
def a_quotient_that_where_takes_out(cage):
    def pool(self, x):
        count = (x * 0).sum(1, keepdim=True)
        return x + torch.where(count > 0, x / count, 0.0)

    cage.model.blocks[1].extra = Applied(pool)


@fault("operation", "blocks.0.extra", "aten.div", "backward", ("fp32", "bf16", "bf16_naive"))
def a_length_by_hand_of_a_vector_of_zeros(cage):
    cage.model.blocks[0].extra = Applied(lambda self, x: x + (x * 0).square().sum(-1, keepdim=True).sqrt())


@fault("loss_scale", "blocks.2.extra", "aten.mul", "backward", FP16)
def a_slope_that_a_learned_gain_makes_large(cage):
    """A gain of 30000 behind a division by it."""
    cage.scale = 2.0**14
    cage.model.blocks[2].extra = Applied(
        lambda self, x: x + (x.half() / 3e4 * self.gain.half()).to(x.dtype),
        gain=nn.Parameter(torch.tensor([3e4])),
    )


# ---------------------------------------------------------------------- nothing wrong


@fault(None, "", "", None, FP16)
def a_square_that_overflows_and_only_divides(cage):
    """1 / sqrt(inf) is 0, and so is its slope."""
    cage.model.blocks[1].extra = lambda x: x + ((x.half() * 0 + 300) ** 2).mean(-1, keepdim=True).detach().rsqrt()


@fault(None, "", "", None)
def the_angle_of_a_zero_vector(cage):
    """Torch gives it the slope zero."""
    cage.model.blocks[2].extra = lambda x: x + torch.atan2(x * 0, x * 0)


@fault(None, "", "", None)
def a_window_whose_rows_keep_the_diagonal(cage):
    def extra(x):
        scores = (x @ x.transpose(-2, -1)).masked_fill(~torch.eye(LENGTH).bool(), -INF)
        return x + scores.log_softmax(-1).exp() @ x

    cage.model.blocks[1].extra = extra


SECOND = FAULTS[_BEFORE:]

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
