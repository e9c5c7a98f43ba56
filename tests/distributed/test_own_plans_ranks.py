"""Plans of one's own for tensor parallelism: what they leave out is named, and what all heads share is right."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from booster import Booster
from booster.plugin import HybridParallelPlugin
from booster.plugin.tensor_parallel.tp_plan import resolve_plan

DIM, HEADS = 8, 4


class MultiQuery(nn.Module):
    """Attention with heads that share keys and values; a norm of every head's queries, and a temperature of all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(DIM, DIM)
        self.q, self.kv, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM // HEADS), nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM // HEADS)
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, x, temperature=False):
        x = x + torch.tanh(self.inp(x))
        q = self.norm(self.q(x).unflatten(-1, (-1, DIM // HEADS))).transpose(1, 2)
        k, v = self.kv(x).chunk(2, dim=-1)
        q = q * self.temperature if temperature else q + 0 * self.temperature.detach()
        heads = F.scaled_dot_product_attention(q, *(each.unsqueeze(1).expand_as(q) for each in (k, v)))
        return self.out(heads.transpose(1, 2).flatten(2))


PLAN = {
    "q": "colwise",
    "out": "rowwise",
    "norm": "replicated_with_grad_allreduce",
    "kv": "replicated_with_output_grad_allreduce",
}
LEFT_OUT = {
    "norm": "norm.weight, norm.bias",
    "kv": "inp.weight, inp.bias, kv.weight, kv.bias",
    "temperature": "temperature",
}


def boosted(precision, plan, **options):
    model = MultiQuery()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    booster = Booster("cpu", precision, HybridParallelPlugin(tp_size=2, pp_size=1, tp_plan=plan, **options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return before, booster, model, optimizer


def batch(number):
    return torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(number))


def errors_by_plan(rank, world_size, precision, options):
    found = {}
    for left in ("", "norm", "kv", "temperature"):
        plan = {name: style for name, style in PLAN.items() if name != left}
        _, booster, model, optimizer = boosted(precision, plan, **options)
        try:
            for number in range(4):
                booster.backward(model(batch(number), left == "temperature").float().square().mean(), optimizer)
                optimizer.step()
                optimizer.zero_grad()
        except RuntimeError as error:
            found[left] = str(error).partition(", which each rank")[0].removeprefix("the gradient of ")
    return found


@pytest.mark.slow_cases("bf16", "fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_naive"])
def test_parameters_with_the_terms_of_this_rank_s_heads_are_named_before_the_first_step(ranks2, precision):
    assert ranks2(errors_by_plan, precision, {}) == [LEFT_OUT] * 2


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_they_are_named_where_data_parallel_ranks_divide_them_once_more(ranks4, zero_stage):
    assert ranks4(errors_by_plan, "fp32", {"zero_stage": zero_stage}) == [LEFT_OUT] * 4


def change(rank, world_size, precision):
    before, booster, model, optimizer = boosted(precision, PLAN)
    booster.backward(model(batch(0)).float().square().mean(), optimizer)
    optimizer.step()
    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach().float() - before[name]
        for name, param in booster.unwrap(model).named_parameters()
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_keys_and_values_that_all_heads_share_step_as_in_one_process(ranks2, precision):
    model = MultiQuery()
    model(batch(0)).square().mean().backward()
    for found in ranks2(change, precision):
        for name, param in model.named_parameters():
            right = torch.zeros_like(param) if param.grad is None else -param.grad
            assert (found[name] - right).norm() <= (1e-5 if precision == "fp32" else 0.2) * right.norm() + 1e-7, name


def gathered(rank, world_size, precision):
    _, booster, model, optimizer = boosted(precision, {**PLAN, "kv": "colwise_gather_output"})
    with pytest.raises(
        RuntimeError, match="gives 'kv' 'colwise_gather_output', and all ranks must use its whole output"
    ):
        booster.backward(model(batch(0)).float().square().mean(), optimizer)
    # Read by all ranks alike it is right, and nothing is compared after the first passes.
    _, booster, model, optimizer = boosted(precision, {"inp": "colwise_gather_output"})
    for number in range(5):
        booster.backward(model(batch(number)).float().square().mean(), optimizer)
        assert optimizer.step().applied
        optimizer.zero_grad()
    return True


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gathered_output_that_ranks_read_for_their_own_heads_is_named(ranks2, precision):
    assert ranks2(gathered, precision) == [True] * 2


class Latent(nn.Module):
    """Attention with keys and values that come of a latent, and positions that every head reads."""

    qk_rope_head_dim = 2

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.kv_a, self.norm = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM), nn.LayerNorm(DIM - 2)
        self.kv_b, self.out = nn.Linear(DIM - 2, 2 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        latent, positions = self.kv_a(x).split([DIM - 2, 2], dim=-1)
        q = self.q(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        k, v = self.kv_b(self.norm(latent)).unflatten(-1, (-1, 4)).transpose(1, 2).chunk(2, dim=-1)
        k = torch.cat([k, positions.unsqueeze(1).expand_as(k)], dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


LATENT = {"q": "colwise", "kv_a": "mla_kv_a_proj", "kv_b": "colwise", "out": "rowwise"}


def latent(rank, world_size):
    model = Latent()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    booster = Booster("cpu", "fp32", HybridParallelPlugin(tp_size=2, pp_size=1, tp_plan=LATENT))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    booster.backward(model(batch(0)).square().mean(), optimizer)
    optimizer.step()
    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach() - before[name]
        for name, param in booster.unwrap(model).named_parameters()
    }


def test_latent_attention_steps_as_in_one_process(ranks2):
    model = Latent()
    model(batch(0)).square().mean().backward()
    for found in ranks2(latent):
        for name, param in model.named_parameters():
            assert (found[name] + param.grad).norm() <= 1e-5 * param.grad.norm() + 1e-7, name


def test_a_latent_projection_needs_to_know_how_many_positions_there_are():
    model = Latent()
    model.qk_rope_head_dim = None
    with pytest.raises(ValueError, match=r"gives 'kv_a' 'mla_kv_a_proj', but the Latent around it does not say"):
        resolve_plan(model, LATENT, tp_size=2, sequence_parallelism=False)
