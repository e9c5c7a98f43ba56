"""Gradient accumulation: a group of micro-batches is the full batch, and cannot be left half done."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from booster import Booster


def make(precision: str = "fp32", lr: float = 0.5, **options: Any) -> tuple[Booster, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    booster = Booster("cpu", precision, **options)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))
    return booster, boosted, optimizer


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 5, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def groups(
    x: torch.Tensor, y: torch.Tensor, micro: int, per_group: int
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    pairs = list(zip(x.split(micro), y.split(micro), strict=True))
    return [pairs[start : start + per_group] for start in range(0, len(pairs), per_group)]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("fp16", 5e-3), ("bf16", 3e-2)])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_groups_equal_full_batches_also_the_short_last_one(precision, tolerance, clip):
    x, y = batch(28)  # micro-batches of 4: groups of 3, 3 and 1
    whole, parts = make(precision), make(precision)
    for group in groups(x, y, 12, 1):
        booster, model, optimizer = whole
        optimizer.zero_grad()
        booster.backward(cross_entropy(model(group[0][0]), group[0][1]), optimizer)
        if clip:
            optimizer.clip_grad_by_norm(clip)
        assert optimizer.step()
    for group in groups(x, y, 4, 3):
        booster, model, optimizer = parts
        optimizer.zero_grad()
        with booster.accumulate(model, optimizer, num_micro_batches=len(group)):
            for part_x, part_y in group:
                booster.backward(cross_entropy(model(part_x), part_y), optimizer)
        if clip:
            optimizer.clip_grad_by_norm(clip)
        assert optimizer.step()
    torch.testing.assert_close(weights(parts[1]), weights(whole[1]), rtol=0, atol=tolerance)


def test_num_tokens_weighs_every_token_equally_in_uneven_micro_batches():
    x, y = batch(13)
    (booster, model, optimizer), (other, twin, twin_optimizer) = make(), make()
    other.backward(cross_entropy(twin(x), y), twin_optimizer)
    twin_optimizer.step()
    with booster.accumulate(model, optimizer, num_micro_batches=3, num_tokens=13):
        for rows in (slice(0, 1), slice(1, 10), slice(10, 13)):
            booster.backward(cross_entropy(model(x[rows]), y[rows], reduction="sum"), optimizer)
    optimizer.step()
    torch.testing.assert_close(weights(model), weights(twin), rtol=0, atol=1e-6)


def test_several_optimizers_accumulate_one_group():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    twin = copy.deepcopy(model)
    booster = Booster("cpu")
    boosted, first, *_ = booster.boost(model, torch.optim.SGD(model[0].parameters(), lr=0.5))
    head = nn.Identity()
    head.layer = model[2]
    _, second, *_ = booster.boost(head, torch.optim.SGD(model[2].parameters(), lr=0.5))
    x, y = batch(8)
    with booster.accumulate(boosted, [first, second], num_micro_batches=2):
        for part_x, part_y in zip(x.split(4), y.split(4), strict=True):
            booster.backward(cross_entropy(boosted(part_x), part_y), [first, second])
    assert first.step()
    assert second.step()
    plain = torch.optim.SGD(twin.parameters(), lr=0.5)
    cross_entropy(twin(x), y).backward()
    plain.step()
    torch.testing.assert_close(weights(model), weights(twin), rtol=0, atol=1e-6)


def test_backward_after_the_group_is_not_divided():
    x, y = batch(4)
    (booster, model, optimizer), (other, twin, twin_optimizer) = make(), make()
    with booster.accumulate(model, optimizer, num_micro_batches=1):
        booster.backward(cross_entropy(model(x), y), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    booster.backward(cross_entropy(model(x), y), optimizer)
    optimizer.step()
    for _ in range(2):
        twin_optimizer.zero_grad()
        other.backward(cross_entropy(twin(x), y), twin_optimizer)
        twin_optimizer.step()
    assert torch.equal(weights(model), weights(twin))


def test_under_fp16_an_overflow_in_one_micro_batch_skips_the_whole_group():
    booster, model, optimizer = make("fp16")
    before = weights(model)
    scale = optimizer.loss_scale
    x, y = batch(12)
    x[4, 0] = 1e8
    with booster.accumulate(model, optimizer, num_micro_batches=3):
        for part_x, part_y in zip(x.split(4), y.split(4), strict=True):
            booster.backward(cross_entropy(model(part_x), part_y), optimizer)
            assert optimizer.loss_scale == scale
    result = optimizer.step()
    assert not result
    assert torch.equal(weights(model), before)
    assert optimizer.loss_scale == scale / 2
    assert optimizer.num_skipped == 1


def test_leaving_early_raises_and_names_the_fix():
    booster, model, optimizer = make()
    x, y = batch(4)
    with pytest.raises(RuntimeError, match=r"after 1 of num_micro_batches=3 .*num_micro_batches=len\(group\)"):
        with booster.accumulate(model, optimizer, num_micro_batches=3):
            booster.backward(cross_entropy(model(x), y), optimizer)


def test_one_backward_too_many_raises_and_names_the_fix():
    booster, model, optimizer = make()
    x, y = batch(4)
    with booster.accumulate(model, optimizer, num_micro_batches=1):
        booster.backward(cross_entropy(model(x), y), optimizer)
        before = [param.grad.clone() for param in model.parameters()]
        with pytest.raises(RuntimeError, match=r"backward number 2 in a group of num_micro_batches=1"):
            booster.backward(cross_entropy(model(x), y), optimizer)
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_a_step_inside_the_group_raises_until_the_group_is_complete():
    booster, model, optimizer = make()
    x, y = batch(4)
    with booster.accumulate(model, optimizer, num_micro_batches=2):
        booster.backward(cross_entropy(model(x), y), optimizer)
        with pytest.raises(RuntimeError, match="after 1 of 2 micro-batches; step once the group is complete"):
            optimizer.step()
        booster.backward(cross_entropy(model(x), y), optimizer)
        assert optimizer.step()


def test_an_exception_propagates_and_releases_optimizer_and_booster():
    booster, model, optimizer = make()
    x, y = batch(4)
    with pytest.raises(OSError, match="disk"):
        with booster.accumulate(model, optimizer, num_micro_batches=3):
            booster.backward(cross_entropy(model(x), y), optimizer)
            raise OSError("disk")
    optimizer.zero_grad()
    with booster.accumulate(model, optimizer, num_micro_batches=1):
        booster.backward(cross_entropy(model(x), y), optimizer)
    assert optimizer.step()


def test_groups_of_one_optimizer_do_not_nest_and_the_outer_one_survives():
    booster, model, optimizer = make()
    x, y = batch(4)
    with booster.accumulate(model, optimizer, num_micro_batches=2):
        with pytest.raises(RuntimeError, match="does not nest"):
            with booster.accumulate(model, optimizer, num_micro_batches=2):
                pass
        with pytest.raises(RuntimeError, match="after 0 of 2"):
            optimizer.step()
        for _ in range(2):
            booster.backward(cross_entropy(model(x), y), optimizer)
    assert optimizer.step()


def test_groups_of_different_optimizers_may_overlap():
    booster = Booster("cpu")
    first, second = nn.Linear(5, 3), nn.Linear(5, 3)
    a, a_optimizer, *_ = booster.boost(first, torch.optim.SGD(first.parameters(), lr=1.0))
    b, b_optimizer, *_ = booster.boost(second, torch.optim.SGD(second.parameters(), lr=1.0))
    x, y = batch(4)
    with booster.accumulate(a, a_optimizer, num_micro_batches=2):
        booster.backward(cross_entropy(a(x), y), a_optimizer)
        with booster.accumulate(b, b_optimizer, num_micro_batches=1):
            booster.backward(cross_entropy(b(x), y), b_optimizer)
        assert b_optimizer.step()
        booster.backward(cross_entropy(a(x), y), a_optimizer)
    assert a_optimizer.step()


def test_backward_for_a_part_of_the_group_s_optimizers_is_refused():
    booster, model, optimizer = make()
    other = nn.Linear(5, 3)
    _, stranger, *_ = booster.boost(other, torch.optim.SGD(other.parameters(), lr=1.0))
    x, y = batch(4)
    with pytest.raises(ValueError, match="exactly the optimizer"):
        with booster.accumulate(model, optimizer, num_micro_batches=1):
            booster.backward(cross_entropy(model(x), y), [optimizer, stranger])


def test_the_reason_of_a_skip_is_found_in_any_micro_batch():
    booster, model, optimizer = make("fp16")
    x, y = batch(4)
    with booster.accumulate(model, optimizer, num_micro_batches=2):
        booster.backward(cross_entropy(model(x), y) * float("nan"), optimizer)
        booster.backward(cross_entropy(model(x), y), optimizer)
    assert optimizer.step().skipped_reason == "nonfinite_loss"


def test_the_optimizers_own_backward_is_refused_inside_a_group():
    model = torch.nn.Linear(2, 1)
    booster = Booster("cpu")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), 0.1))
    with booster.accumulate(model, optimizer, num_micro_batches=1):
        with pytest.raises(RuntimeError, match="call b.backward"):
            optimizer.backward(model(torch.ones(1, 2)).sum())
        booster.backward(model(torch.ones(1, 2)).sum(), optimizer)
    optimizer.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(ValueError, match="whole number"):
        booster.accumulate(model, optimizer, num_micro_batches=2.5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_execute_pipeline_lets_go_of_outputs_before_their_backward(precision):
    model = nn.Linear(4, 3)
    booster = Booster("cpu", precision)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    outputs, alive = [], []
    model.weight.register_hook(lambda grad: alive.append([output() is not None for output in outputs]))

    def criterion(output, target):
        outputs.append(weakref.ref(output))
        return output.sum()  # saves nothing of it

    booster.execute_pipeline(iter([(torch.ones(2, 4), torch.ones(2))]), boosted, criterion, optimizer)
    assert alive == [[False]]


def test_no_sync_of_one_model_leaves_passes_of_another_alone():
    booster = Booster("cpu", release_gradients="exact")
    models = [torch.nn.Linear(2, 2) for _ in range(2)]
    (one, own, *_), (other, others, *_) = (booster.boost(m, torch.optim.SGD(m.parameters(), 0.1)) for m in models)
    with booster.no_sync(one):
        for model, optimizer in ((one, own), (other, others)):
            booster.backward(model(torch.ones(2, 2)).sum(), optimizer)
    assert [model.weight.grad is None for model in models] == [False, True]  # a gradient that is used is released
