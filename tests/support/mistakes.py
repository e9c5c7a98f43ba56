"""The mistakes that newcomers make, what comes of each, and the page docs/guides/mistakes.md, which this writes:
`python tests/support/mistakes.py`."""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster import Booster
from booster.mixed_precision import FP8MixedPrecision
from booster.plugin import TorchDDPPlugin

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "mistakes.md"
LEGAL = "not reported"  # of what comes: it is as in torch, or trains as it should


@dataclass(frozen=True)
class Mistake:
    """`comes`: the name of an error, WARNING, or LEGAL. message: words of it, or what happens. fix: what to do.

    make: makes the mistake; or, where it takes several ranks or processes, the test that does, as "file::function".
    """

    what: str
    comes: str
    message: str
    fix: str
    make: Callable[[], Any] | str


def run(precision: Any = "bf16", make: Any = torch.optim.SGD, **options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    own = make(net.parameters(), lr=1e-2)
    b = Booster("cpu", precision, **options)
    model, optimizer, *_ = b.boost(net, own)
    return b, model, optimizer, net, own


def loss_of(model: Any) -> torch.Tensor:
    return model(torch.ones(4, 8)).square().mean()


def bare_backward(precision: str) -> None:
    _, model, optimizer, *_ = run(precision)
    loss_of(model).backward()
    optimizer.step()


def plain_backward(*, first: bool) -> None:
    b, model, optimizer, *_ = run("fp16")
    if first:
        loss_of(model).backward()
    b.backward(loss_of(model), optimizer)
    loss_of(model).backward()
    optimizer.step()


def scaler(precision: str, *, boosted: bool) -> None:
    b, model, optimizer, *_ = run(precision)
    torchs = torch.amp.GradScaler("cpu")
    loss = torchs.scale(loss_of(model))
    b.backward(loss, optimizer) if boosted else loss.backward()
    torchs.step(optimizer)


def step_of_scaler_alone() -> None:
    b, model, optimizer, *_ = run("fp16")
    b.backward(loss_of(model), optimizer)
    torch.amp.GradScaler("cpu").step(optimizer)


def raw_optimizer(precision: str) -> None:
    b, model, optimizer, _, own = run(precision)
    b.backward(loss_of(model), optimizer)
    own.step()


def raw_model() -> None:
    _, _, optimizer, net, _ = run("bf16")
    loss_of(net)


def torchs_clip() -> None:
    b, model, optimizer, *_ = run("fp16")
    b.backward(loss_of(model), optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def half_after() -> None:
    b, model, optimizer, *_ = run("bf16")
    model.half()
    b.backward(loss_of(model), optimizer)
    optimizer.step()


def float_after() -> None:
    _, model, *_ = run("bf16_naive")
    model.float()
    loss_of(model)


def twice(which: int) -> None:
    b, *made = run()
    b.boost(made[which])


def foreign_optimizer() -> None:
    Booster("cpu").boost(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def two_names() -> None:
    net = nn.Linear(2, 2)
    _model, _optimizer = Booster("cpu").boost(net, torch.optim.SGD(net.parameters(), lr=0.1))


def third_place() -> None:
    net = nn.Linear(2, 2)
    own = torch.optim.SGD(net.parameters(), lr=0.1)
    Booster("cpu").boost(net, own, torch.optim.lr_scheduler.StepLR(own, 1))


def loader_third() -> None:
    net = nn.Linear(2, 2)
    own = torch.optim.SGD(net.parameters(), lr=0.1)
    Booster("cpu").boost(net, own, DataLoader(TensorDataset(torch.zeros(2, 2))))


def swapped() -> None:
    net = nn.Linear(2, 2)
    Booster("cpu").boost(torch.optim.SGD(net.parameters(), lr=0.1), net)


def not_boosted() -> None:
    b, model, _, _, own = run()
    b.backward(loss_of(model), own)


def half_model(*, frozen: bool) -> None:
    net = nn.Sequential(nn.Linear(64, 64).requires_grad_(not frozen), nn.Linear(64, 2)).half()
    Booster("cpu", "fp16").boost(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1))


def twice_stepped() -> None:
    b, model, optimizer, *_ = run("fp16")
    b.backward(loss_of(model), optimizer)
    optimizer.step()
    optimizer.step()


def not_scalar() -> None:
    b, model, optimizer, *_ = run()
    b.backward(model(torch.ones(4, 8)), optimizer)


def lbfgs() -> None:
    b, model, optimizer, *_ = run("fp16", torch.optim.LBFGS)
    optimizer.step(lambda: loss_of(model))


def nan_batches() -> None:
    b, model, optimizer, *_ = run("fp16")
    for _ in range(60):
        b.backward(loss_of(model) * float("nan"), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def raw_saved() -> None:
    b, _, _, net, _ = run()
    b.save("nowhere", net)


def loaded_from_nothing() -> None:
    b, model, *_ = run()
    b.load("/nonexistent", model)


def forgot_zero_grad() -> None:
    b, model, optimizer, net, _ = run("fp32")
    b.backward(loss_of(model), optimizer)
    once = net[0].weight.grad.clone()
    b.backward(loss_of(model), optimizer)
    torch.testing.assert_close(net[0].weight.grad, 2 * once)


def zeroed_before_step() -> None:
    b, model, optimizer, *_ = run()
    b.backward(loss_of(model), optimizer)
    optimizer.zero_grad()
    assert optimizer.step().applied


def scheduler_first() -> None:
    net = nn.Linear(8, 1)
    own = torch.optim.SGD(net.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(own, 1)
    *_, schedule = Booster("cpu", "fp16").boost(net, own, lr_scheduler=schedule)
    schedule.step()
    assert own.param_groups[0]["lr"] == 1.0


def scaled_grad() -> None:
    b, model, optimizer, net, _ = run("fp16")
    b.backward(loss_of(model), optimizer)
    scaled = net[0].weight.grad.clone()
    optimizer.unscale_grads()
    torch.testing.assert_close(scaled, net[0].weight.grad * 65536)


def loaded_after() -> None:
    b, model, optimizer, net, _ = run("bf16_naive")
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    b.backward(loss_of(model), optimizer)
    assert optimizer.step().applied


def traced() -> None:
    torch.jit.trace(run()[1], (torch.ones(4, 8),))


def clip_by_value() -> None:
    b, model, optimizer, *_ = run("fp16")
    b.backward(loss_of(model), optimizer)
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()


def schedule_of_own() -> None:
    b, model, optimizer, _, own = run("fp16")
    schedule = torch.optim.lr_scheduler.StepLR(own, 1)
    b.backward(loss_of(model) * float("nan"), optimizer)
    assert not optimizer.step().applied
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def layer_replaced() -> None:
    b, model, optimizer, net, _ = run()
    net[2] = nn.Linear(8, 1)
    before = net[2].weight.detach().clone()
    b.backward(loss_of(model), optimizer)
    optimizer.step()
    torch.testing.assert_close(net[2].weight.detach(), before, rtol=0, atol=0)


def made_double() -> None:
    _, model, *_ = run("bf16")
    loss_of(model.double())


def autocast_left_in() -> None:
    found = []
    for left_in in (False, True):
        b, model, optimizer, *_ = run("fp16")
        with torch.autocast("cpu", torch.bfloat16, enabled=left_in):
            loss = loss_of(model)
        b.backward(loss, optimizer)
        found.append(loss)
    assert torch.equal(*found)


def evaluated_with_gradients() -> None:
    b, model, optimizer, *_ = run("fp16")
    model.eval()
    loss_of(model)
    model.train()
    b.backward(loss_of(model), optimizer)
    assert optimizer.step().applied


def saved_by_hand() -> None:
    def one_step(b: Any, model: Any, optimizer: Any) -> None:
        b.backward(loss_of(model), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    first, second = run("bf16_naive", torch.optim.AdamW)[:3], run("bf16_naive", torch.optim.AdamW)[:3]
    one_step(*first)
    second[2].load_state_dict(copy.deepcopy(first[2].state_dict()))
    second[1].load_state_dict(first[1].state_dict())
    one_step(*first)
    one_step(*second)
    assert torch.equal(first[1][0].weight, second[1][0].weight)


def own_optimizer() -> None:
    b, model, *_ = run("fp16")
    b.backward(loss_of(model), torch.optim.SGD(model.parameters(), lr=0.1))


def own_optimizer_alone() -> None:
    _, model, *_ = run("fp16")
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    own.step()


def own_state() -> None:
    _, _, optimizer, _, own = run("bf16_naive")
    own.load_state_dict(own.state_dict())
    optimizer.step()


def no_grad_loss() -> None:
    b, model, optimizer, *_ = run("fp16")
    with torch.no_grad():
        loss = loss_of(model)
    b.backward(loss, optimizer)


def stepped_within() -> None:
    b, model, optimizer, *_ = run("fp16")
    with b.accumulate(model, optimizer, 2):
        b.backward(loss_of(model) / 2, optimizer)
        optimizer.step()


def early_clip() -> None:
    run()[2].clip_grad_by_norm(1.0)


LINE = "model, optimizer, *_ = b.boost(model, optimizer)"
MISTAKES = [
    Mistake(
        "no launch, a plugin, two ranks",
        "RuntimeError",
        "there is no process group",
        "`booster.launch_from_torch()` before the plugin is made",
        "tests/unit/test_fsdp_groups.py::test_a_launched_job_without_a_process_group_is_refused",
    ),
    Mistake(
        "no launch and no plugin, two ranks",
        "RuntimeError",
        "Booster has no plugin and there is no process group",
        "`booster.launch_from_torch()`, and `plugin=TorchDDPPlugin()`",
        "tests/unit/test_guards.py::test_several_processes_without_a_launch_and_without_a_plugin_are_refused",
    ),
    Mistake(
        "a launch and no plugin, two ranks",
        "WARNING",
        "no plugin in a job of 2 processes",
        "`plugin=TorchDDPPlugin()`",
        "tests/distributed/test_ddp.py::",
    ),
    Mistake(
        "a loader without distributed sampler, given to `boost`, two ranks",
        "ValueError",
        "has no distributed sampler",
        "`b.prepare_dataloader(dataset, batch_size)`",
        "tests/unit/test_data.py::",
    ),
    Mistake(
        "a DistributedSampler with a seed per rank, or the same rank on all",
        "ValueError",
        "so that some samples are read twice",
        "the same seed on all ranks, its own rank on each; or `b.prepare_dataloader`",
        "tests/distributed/test_data_ranks.py::test_samplers_that_do_not_deal_one_dataset_among_ranks_are_refused_on_all_of_them",
    ),
    Mistake(
        "the same loader, not given to `boost`",
        LEGAL,
        "every rank trains on the same samples",
        "give loaders to `boost`, or make them with `b.prepare_dataloader`",
        "tests/unit/test_data.py::",
    ),
    Mistake(
        "a model in DistributedDataParallel already",
        "TypeError",
        "pass its .module, and plugin=TorchDDPPlugin(...)",
        "pass the model as it was before",
        "tests/distributed/test_guards_ranks.py::test_a_model_that_is_distributed_already_is_refused",
    ),
    Mistake(
        "a model in `nn.DataParallel`",
        LEGAL,
        "trains, in one process",
        "`TorchDDPPlugin`, which is faster",
        lambda: Booster("cpu").boost(nn.DataParallel(nn.Linear(2, 2))),
    ),
    Mistake(
        "the optimizer of another model",
        "ValueError",
        "none of the optimizer's 2 parameters belong to the model",
        "build the optimizer from the model that you boost",
        foreign_optimizer,
    ),
    Mistake(
        "a bare `loss.backward()`, fp16",
        "RuntimeError",
        "there are gradients, but no b.backward(loss, optimizer)",
        "`b.backward(loss, optimizer)`",
        lambda: bare_backward("fp16"),
    ),
    Mistake(
        "a bare `loss.backward()`, bf16",
        LEGAL,
        "trains: there is no loss scale",
        "`b.backward`, so that the same loop runs in fp16",
        lambda: bare_backward("bf16"),
    ),
    Mistake(
        "a bare `loss.backward()` after `b.backward` in one step, fp16",
        "RuntimeError",
        "has a part of a bare loss.backward()",
        "every loss to `b.backward`",
        lambda: plain_backward(first=False),
    ),
    Mistake(
        "a bare `loss.backward()` before it",
        "RuntimeError",
        "has a part of a bare loss.backward()",
        "every loss to `b.backward`; looked for in the first three steps, and in one of a hundred",
        lambda: plain_backward(first=True),
    ),
    Mistake(
        "a GradScaler left in, bf16 or fp32",
        "RuntimeError",
        "a GradScaler stepped the boosted optimizer",
        "delete the GradScaler",
        lambda: scaler("bf16", boosted=False),
    ),
    Mistake(
        "a GradScaler left in, fp16",
        "RuntimeError",
        "a GradScaler stepped the boosted optimizer",
        "delete the GradScaler",
        lambda: scaler("fp16", boosted=False),
    ),
    Mistake(
        "a GradScaler around `b.backward`",
        "RuntimeError",
        "a GradScaler stepped the boosted optimizer",
        "delete the GradScaler",
        lambda: scaler("fp16", boosted=True),
    ),
    Mistake(
        "`scaler.step(optimizer)` alone left in, after `b.backward`",
        "AssertionError",
        "Attempted step but _scale is None",
        "delete the GradScaler; the message is torch's, which does not come to the optimizer",
        step_of_scaler_alone,
    ),
    Mistake(
        "the optimizer that was given to `boost` is stepped, fp16",
        "RuntimeError",
        "this SGD was given to boost(), and its step() was called",
        "step what `boost` returned",
        lambda: raw_optimizer("fp16"),
    ),
    Mistake(
        "the same under bf16_naive",
        "RuntimeError",
        "this SGD was given to boost(), and its step() was called",
        "step what `boost` returned",
        lambda: raw_optimizer("bf16_naive"),
    ),
    Mistake(
        "the model that was given to `boost` is called in training",
        "WARNING",
        "was called in training, instead of what boost() returned",
        "call what `boost` returned",
        raw_model,
    ),
    Mistake(
        "the same on several ranks",
        "RuntimeError",
        "and their weights would drift apart",
        "call what `boost` returned",
        "tests/distributed/test_guards_ranks.py::test_guards_hold_on_every_plugin_and_say_nothing_of_plain_training",
    ),
    Mistake(
        "`zero_grad()` between backward and step",
        LEGAL,
        "the step moves nothing, as in torch",
        "`zero_grad()` after the step",
        zeroed_before_step,
    ),
    Mistake(
        "`zero_grad()` forgotten",
        LEGAL,
        "gradients add up, as in torch",
        "`optimizer.zero_grad()` after each step",
        forgot_zero_grad,
    ),
    Mistake(
        "a model boosted twice",
        "RuntimeError",
        "is boosted already",
        "boost once, keep what it returned",
        lambda: twice(0),
    ),
    Mistake(
        '`Booster("cpu", "float16")`',
        "ValueError",
        "write Booster(mixed_precision='fp16')",
        "what the message says",
        lambda: Booster("cpu", "float16"),
    ),
    Mistake(
        '`"bf16-mixed"`, `"no"`, `"32-true"`: names of Fabric and Accelerate',
        "ValueError",
        "write Booster(mixed_precision='bf16')",
        "what the message says",
        lambda: Booster("cpu", "bf16-mixed"),
    ),
    Mistake(
        "the class of a plugin, not an instance",
        "TypeError",
        "pass an instance of it",
        "`plugin=TorchDDPPlugin()`",
        lambda: Booster("cpu", "bf16", TorchDDPPlugin),
    ),
    Mistake(
        '`Booster(precision="bf16")`',
        "TypeError",
        "it is called mixed_precision",
        '`mixed_precision="bf16"`',
        lambda: Booster("cpu", precision="bf16"),
    ),
    Mistake("`b.prepare(model)`", "AttributeError", "is called boost", f"`{LINE}`", lambda: Booster("cpu").prepare),
    Mistake(
        "`b.clip_grad_norm_(...)`",
        "AttributeError",
        "optimizer.clip_grad_by_norm(max_norm)",
        "a method of the boosted optimizer",
        lambda: Booster("cpu").clip_grad_norm_,
    ),
    Mistake(
        "`model, optimizer = b.boost(model, optimizer)`",
        "ValueError",
        "too many values to unpack",
        f"`{LINE}`",
        two_names,
    ),
    Mistake(
        "a scheduler in third place",
        "TypeError",
        "pass lr_scheduler by name",
        "`b.boost(model, optimizer, lr_scheduler=schedule)`",
        third_place,
    ),
    Mistake(
        "a loader in third place",
        "TypeError",
        "pass dataloader by name",
        "`b.boost(model, optimizer, dataloader=loader)`",
        loader_third,
    ),
    Mistake("model and optimizer swapped", "TypeError", "model must be a torch.nn.Module", "the model first", swapped),
    Mistake(
        "`b.backward(loss, optimizer)` with the optimizer that was given to `boost`",
        "TypeError",
        "backward needs the optimizer that boost() returned",
        "the boosted one",
        not_boosted,
    ),
    Mistake(
        "a model that is half already",
        "ValueError",
        "these trainable ones are in half precision",
        "`model.float()`, or fp16_naive",
        lambda: half_model(frozen=False),
    ),
    Mistake(
        "adapters that are half, as under LoRA",
        "ValueError",
        "Most weights are frozen, as under LoRA, and may stay half",
        "cast what trains, as the message writes",
        lambda: half_model(frozen=True),
    ),
    Mistake(
        "torch's `clip_grad_norm_` under fp16",
        "WARNING",
        "was changed between b.backward and step()",
        "`optimizer.clip_grad_by_norm(max_norm)`",
        torchs_clip,
    ),
    Mistake(
        "`.grad` read under fp16",
        LEGAL,
        "it carries the loss scale until the step",
        "`optimizer.unscale_grads()` first",
        scaled_grad,
    ),
    Mistake(
        "torch's `clip_grad_value_` under fp16",
        "WARNING",
        "was changed between b.backward and step()",
        "`optimizer.clip_grad_by_value(value)`",
        clip_by_value,
    ),
    Mistake(
        "a scheduler that `boost` was not given",
        LEGAL,
        "it moves the learning rate, also where a step was skipped",
        "`b.boost(..., lr_scheduler=schedule)`",
        schedule_of_own,
    ),
    Mistake(
        "a layer replaced after `boost`",
        LEGAL,
        "it does not train, as in torch: no optimizer holds it",
        "replace layers before the optimizer is made",
        layer_replaced,
    ),
    Mistake(
        "`model.double()` after `boost`",
        "RuntimeError",
        "must have the same dtype",
        "leave it out",
        made_double,
    ),
    Mistake(
        "`torch.autocast` left in around forward",
        LEGAL,
        "the precision of the Booster counts, to the bit",
        "delete it",
        autocast_left_in,
    ),
    Mistake(
        "evaluation without `torch.no_grad()`",
        LEGAL,
        "right, and holds activations as in torch",
        "`with torch.no_grad():`",
        evaluated_with_gradients,
    ),
    Mistake(
        "`state_dict()` of both saved and loaded by hand, on one device",
        LEGAL,
        "goes on to the bit, in either order",
        "`b.save` and `b.load`, which also serve ranks",
        saved_by_hand,
    ),
    Mistake(
        "an optimizer made of the boosted model",
        "TypeError",
        "backward needs the optimizer that boost() returned",
        "make it before, and give it to `boost`",
        own_optimizer,
    ),
    Mistake(
        "the same, with a bare `loss.backward()` and its own `step()`",
        LEGAL,
        "trains without loss scale, and half weights without masters: none of the three passes here, so nobody can tell",
        "make it before, and give it to `boost`",
        own_optimizer_alone,
    ),
    Mistake(
        "`state_dict()` or `load_state_dict()` of the optimizer that was given to `boost`, bf16_naive",
        "RuntimeError",
        "state_dict() of the SGD that was given to boost() was called instead of that of the boosted one",
        "that of what `boost` returned",
        own_state,
    ),
    Mistake(
        "`torch.save(optimizer)` on several ranks",
        "RuntimeError",
        "take no optimizer that ranks share",
        "`torch.save(optimizer.state_dict(), path)`, or `b.save`",
        "tests/distributed/test_guards_ranks.py::test_a_bare_backward_beside_scaled_ones_and_states_of_the_own_optimizer_are_refused",
    ),
    Mistake(
        "a loss computed under `no_grad`",
        "RuntimeError",
        "the loss does not require gradients",
        "call the model outside of `torch.no_grad()`",
        no_grad_loss,
    ),
    Mistake(
        "`optimizer.step()` after each micro-batch of `b.accumulate`",
        "RuntimeError",
        "step once the group is complete",
        "one step after the group",
        stepped_within,
    ),
    Mistake(
        "a clip before backward, or after the step",
        "RuntimeError",
        "clip_grad_by_norm() came before b.backward",
        "between `b.backward` and `optimizer.step()`",
        early_clip,
    ),
    Mistake(
        "two steps after one backward, fp16",
        "RuntimeError",
        "no b.backward(loss, optimizer) since the last step",
        "one step for each group of backward passes",
        twice_stepped,
    ),
    Mistake(
        "`schedule.step()` before the first step",
        LEGAL,
        "the schedule waits",
        "after `optimizer.step()`",
        scheduler_first,
    ),
    Mistake(
        "a loss of several elements", "ValueError", "reduce it first, e.g. loss.mean()", "`loss.mean()`", not_scalar
    ),
    Mistake(
        "60 batches of NaN, fp16",
        "LossScaleError",
        "steps in a row were skipped",
        "read the names in the message",
        nan_batches,
    ),
    Mistake(
        "`model.half()` after `boost`",
        "RuntimeError",
        "was float32 at boost() and is torch.float16 now",
        "leave it out, or take fp16_naive",
        half_after,
    ),
    Mistake(
        "`model.float()`, `model.half()` or `model.to(dtype)` after `boost`, with weights in half",
        "RuntimeError",
        "weights were bfloat16 at boost() and are float32 now",
        "leave the weights as they are; `b.switch(precision)` changes the precision",
        float_after,
    ),
    Mistake(
        "`load_state_dict` after `boost`, under masters", LEGAL, "masters follow the weights", "nothing", loaded_after
    ),
    Mistake(
        "`b.save` with the model that was given to `boost`",
        "TypeError",
        "the boosted one",
        "what `boost` returned",
        raw_saved,
    ),
    Mistake(
        "`b.load` where nothing was saved",
        "CheckpointError",
        "/nonexistent",
        "`b.resume_or_start`",
        loaded_from_nothing,
    ),
    Mistake(
        "`torch.save(model.state_dict())` on one rank under FSDP",
        "WARNING",
        "b.save_model(model, path)",
        "`b.save_model` on all ranks",
        "tests/distributed/test_guards_ranks.py::test_parts_of_weights_are_told_and_methods_that_meet_them_say_what_to_call",
    ),
    Mistake(
        "fp8 on a CPU",
        "ValueError",
        "emulate=True",
        "`FP8MixedPrecision(emulate=True)` to rehearse it",
        lambda: Booster("cpu", FP8MixedPrecision()),
    ),
    Mistake("LBFGS under fp16", "RuntimeError", "cannot run under a loss scaler", "fp32, bf16 or bf16_naive", lbfgs),
    Mistake(
        "`torch.jit.trace(model)`",
        "RuntimeError",
        "torch.jit.trace does not follow a boosted model",
        "`torch.export.export`, or trace `b.unwrap(model)`",
        traced,
    ),
]


def page() -> str:
    """The page, from the table."""
    rows = [
        f"| {each.what} | {each.message if each.comes == LEGAL else f'{each.comes}: `{each.message}`'} | {each.fix} |"
        for each in MISTAKES
    ]
    return "\n".join(
        [
            "# Mistakes, and what comes of them",
            "",
            "What new users do wrong first. `b` is a `Booster`. Each row is a test; `python tests/support/mistakes.py` writes",
            "this page from them. A WARNING comes once, from the logger `booster`. Other messages:",
            "[Troubleshooting](../faq.md#troubleshooting).",
            "",
            '<div class="stacked" markdown="1">',  # on a phone: site.css
            "",
            "| mistake | what comes | what to do |",
            "|---|---|---|",
            *rows,
            "",
            "</div>",
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit(0)
