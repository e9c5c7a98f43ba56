"""A run with a precision that is a schedule: the same as switching by hand, also when it is resumed."""

import copy

import pytest
import torch
import torch.utils.checkpoint
from switching import PRECISIONS, Job, Net, differences
from torch import nn

from booster import Booster
from booster.facade import precision_run as course
from booster.mixed_precision import FP16ApexMixedPrecision, MixedPrecision, PrecisionSchedule
from booster.numerics.record.recorded_run import read_run
from booster.numerics.reports.page import page
from booster.numerics.reports.summary import summarise


def schedule():
    phases = {0: PRECISIONS["mxfp8"](), 0.3: PRECISIONS["bf16_naive"](), 6: PRECISIONS["fp32"]()}
    return PrecisionSchedule(phases, total_steps=10)


def test_a_schedule_is_a_switch_by_hand_after_those_steps():
    planned, by_hand = Job(schedule()), Job("mxfp8")
    torch.manual_seed(1)
    losses = planned.steps(0, 8)
    torch.manual_seed(1)
    expected = by_hand.steps(0, 3)
    by_hand.booster.switch(PRECISIONS["bf16_naive"]())
    expected += by_hand.steps(3, 6)
    by_hand.booster.switch(PRECISIONS["fp32"]())
    assert losses == expected + by_hand.steps(6, 8)
    assert differences(planned.state(), by_hand.state()) == []


@pytest.mark.parametrize("stop", [2, 3, 5, 7])
def test_a_resumed_run_is_in_the_phase_that_its_step_is_in(stop, tmp_path):
    whole = Job(schedule())
    torch.manual_seed(1)
    whole.steps(0, stop)
    whole.booster.save(tmp_path, *whole.parts)
    expected = whole.steps(stop, 9)
    resumed = Job(schedule())
    resumed.booster.load(tmp_path, *resumed.parts)
    assert resumed.steps(stop, 9) == expected
    assert differences(resumed.state(), whole.state()) == []


def test_a_phase_does_not_end_between_backward_and_step():
    job = Job(PrecisionSchedule({0: "fp32", 1: "bf16_naive"}))
    x, y = torch.randn(8, 32), torch.zeros(8, dtype=torch.long)
    for dtype in (torch.float32, torch.bfloat16):
        with job.booster.accumulate(job.model, job.optimizer, 2):
            for _ in range(2):
                job.booster.backward(job.criterion(job.model(x), y), job.optimizer)
                assert job.model.out.weight.dtype == dtype
        job.optimizer.step()
        job.optimizer.zero_grad()


def test_of_several_optimizers_the_one_counts_that_made_fewest_steps():
    booster = Booster("cpu", PrecisionSchedule({0: "fp32", 2: "bf16_naive"}))
    pairs = []
    for _ in range(2):
        model = Net(nn.LayerNorm)
        pairs.append(booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2])
    for number, dtype in enumerate(4 * [torch.float32] + [torch.bfloat16]):
        model, optimizer = pairs[number % 2]
        booster.backward(model(torch.randn(4, 32)).square().mean(), optimizer)
        assert model.out.weight.dtype == dtype
        optimizer.step()
        optimizer.zero_grad()


def test_copies_of_the_model_and_evaluation_leave_the_schedule_alone():
    job = Job(PrecisionSchedule({0: "fp32", 5: "bf16"}))
    clone = copy.deepcopy(job.model)
    with torch.no_grad():
        clone(torch.randn(4, 32))
    job.steps(0, 1)


def test_the_record_says_when_and_why(tmp_path):
    job = Job(schedule())
    with job.booster.record(tmp_path, activations="blocks.0.up"):
        job.steps(0, 8)
    run = read_run(tmp_path)
    assert [(each.step, each.precision.split("(")[0]) for each in run.switches] == [
        (3, "BF16NaiveMixedPrecision"),
        (6, "FP32"),
    ]
    assert "the schedule, after step 3" in page(run)
    assert [each["step"] for each in summarise(run).as_dict()["switches"]] == [3, 6]


def test_activations_are_looked_at_after_a_switch_too(tmp_path):
    job = Job("mxfp8")
    with job.booster.record(tmp_path, every=1, activations="blocks.0.up"):
        job.steps(0, 1)
        job.booster.switch("bf16")
        job.steps(1, 2)
    looked = {(sample.step, sample.name) for sample in read_run(tmp_path).samples["0"] if sample.of == "activation"}
    assert looked == {(1, "blocks.0.up"), (2, "blocks.0.up")}


def test_the_estimate_is_that_of_the_phase_that_takes_most():
    batch = (torch.randn(8, 32), torch.zeros(8, dtype=torch.long))

    def peak(precision):
        model = Net(nn.LayerNorm)
        optimizer = torch.optim.AdamW(model.parameters())
        return Booster("cpu", precision).estimate_memory(model, optimizer, batch, nn.CrossEntropyLoss()).peak

    peaks = {name: peak(name) for name in ("fp32", "bf16_naive")}
    assert peak(PrecisionSchedule({0: "bf16_naive", 5: "fp32"})) == max(peaks.values()) != min(peaks.values())


@pytest.mark.parametrize(
    ("phases", "options", "match"),
    [
        ({0.5: "bf16"}, {"total_steps": 10}, "none at 0"),
        ({0: "fp32", 0.5: "bf16"}, {}, "pass total_steps"),
        ({0: "fp32", 0.5: "bf16", 5: "fp16"}, {"total_steps": 10}, "two phases begin at step 5"),
        ({0: "fp32", 1.5: "bf16"}, {}, "a whole number of steps, or a share"),
        ({0: "fp32", 12: "bf16"}, {"total_steps": 10}, "total_steps=10"),
        ({0: "fp32", -1: "bf16"}, {}, "a place in phases"),
    ],
)
def test_phases_that_are_none_are_refused(phases, options, match):
    with pytest.raises(ValueError, match=match):
        PrecisionSchedule(phases, **options)


class Own(MixedPrecision):
    def convert(self, model):
        return model


@pytest.mark.parametrize(
    ("phases", "match"),
    [
        (
            {0: "fp32", 2: FP16ApexMixedPrecision("O2")},
            r"has 2 phases, .* because the levels of apex .*; give Booster one",
        ),
        ({0: FP16ApexMixedPrecision("O1"), 2: "fp32"}, "because the levels of apex"),
        ({0: "fp32", 2: Own()}, "because Own converts models and has no revert"),
    ],
)
def test_what_no_run_goes_over_to_is_refused_by_the_constructor(phases, match):
    with pytest.raises(ValueError, match=match):
        Booster("cpu", PrecisionSchedule(phases))


def test_a_schedule_of_one_phase_may_be_of_any_precision():
    assert isinstance(
        Booster("cpu", PrecisionSchedule({0: FP16ApexMixedPrecision("O2")})).precision, FP16ApexMixedPrecision
    )


def test_what_a_later_phase_cannot_do_is_refused_at_boost():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.blocks[0].compile(backend="eager")
    with pytest.raises(RuntimeError, match="because the model was compiled"):
        Booster("cpu", PrecisionSchedule({0: "fp32", 5: "bf16"})).boost(model, optimizer)
    with pytest.raises(ValueError, match="is unknown"):
        Booster("cpu", PrecisionSchedule({0: "fp32", 5: "fp99"}))


def test_a_switch_by_hand_beside_a_schedule_is_refused():
    job = Job(PrecisionSchedule({0: "fp32", 5: "bf16"}))
    with pytest.raises(RuntimeError, match="in a run with a PrecisionSchedule"):
        job.booster.switch("bf16")


# ---------------------------------------------------------------------- when it goes over


def small(precision):
    booster = Booster("cpu", precision)
    model = Net(nn.LayerNorm)
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]


def train(booster, model, *optimizers):
    booster.backward(model(torch.randn(4, 32)).square().mean(), optimizers)
    for each in optimizers:
        each.step()
        each.zero_grad()


@pytest.mark.parametrize("evaluating", [torch.no_grad, torch.inference_mode])
def test_evaluation_which_one_rank_may_do_alone_leaves_the_precision(evaluating):
    booster, model, optimizer = small(PrecisionSchedule({0: "fp32", 1: "bf16_naive"}))
    train(booster, model, optimizer)
    before = booster.precision
    with evaluating():
        model(torch.randn(4, 32))
    assert booster.precision is before
    model.eval()(torch.randn(4, 32))
    assert booster.precision is before
    train(booster, model.train(), optimizer)
    assert model.out.weight.dtype == torch.bfloat16


def test_a_model_that_trains_in_evaluation_mode_goes_over_too():
    booster, model, optimizer = small(PrecisionSchedule({0: "fp32", 2: "bf16_naive"}))
    model.eval()
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        train(booster, model, optimizer)
        assert model.out.weight.dtype == dtype


def test_a_forward_that_waits_for_its_backward_pass_holds_a_phase():
    """As of a generator: its graph is open while the discriminator is stepped."""
    booster, generator, of_generator = small(PrecisionSchedule({0: "fp32", 2: "bf16_naive"}))
    discriminator = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    discriminator, of_discriminator, *_ = booster.boost(
        discriminator, torch.optim.SGD(discriminator.parameters(), lr=0.1)
    )
    train(booster, generator, of_generator)  # which is trained first, so that the other completes the steps of both
    dtypes = []
    for _ in range(3):
        fake = generator(torch.randn(4, 32))
        booster.backward(discriminator(fake.detach()).mean(), of_discriminator)
        of_discriminator.step()
        of_discriminator.zero_grad()
        loss = discriminator(fake).mean()
        dtypes.append(generator.out.weight.dtype)
        booster.backward(loss, of_generator)
        of_generator.step()
        of_generator.zero_grad()
    assert dtypes == [torch.float32, torch.float32, torch.bfloat16]


def test_an_output_that_is_kept_and_never_used_holds_no_phase():
    booster, model, optimizer = small(PrecisionSchedule({0: "fp32", 1: "bf16_naive"}))
    kept = model(torch.randn(4, 32))
    train(booster, model, optimizer)
    train(booster, model, optimizer)
    assert kept.requires_grad
    assert model.out.weight.dtype == torch.bfloat16


def test_a_recomputation_within_a_backward_pass_goes_nowhere():
    booster, model, optimizer = small(PrecisionSchedule({0: "fp32", 1: "bf16_naive"}))
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.utils.checkpoint.checkpoint(model, torch.randn(4, 32), use_reentrant=False)
        booster.backward(out.square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        assert model.out.weight.dtype == dtype


def test_an_optimizer_that_begins_late_or_never_neither_holds_a_phase_nor_goes_back():
    booster, model, optimizer = small(PrecisionSchedule({0: "fp32", 2: "bf16", 6: "bf16_naive"}))
    for _ in range(3):
        train(booster, model, optimizer)
    late = Net(nn.LayerNorm)
    late, of_late, *_ = booster.boost(late, torch.optim.SGD(late.parameters(), lr=0.1))
    names = []
    for number in range(5):
        train(booster, model, optimizer)
        names.append(type(booster.precision).__name__)
        if number:
            train(booster, late, of_late)
    assert names == ["BF16MixedPrecision"] * 3 + ["BF16NaiveMixedPrecision"] * 2


def test_a_resumed_run_knows_where_an_optimizer_began(tmp_path):
    def build():
        booster, model, first = small(PrecisionSchedule({0: "fp32", 5: "bf16_naive"}))
        late = Net(nn.LayerNorm)
        return booster, model, first, *booster.boost(late, torch.optim.SGD(late.parameters(), lr=0.1))[:2]

    booster, model, first, late, second = build()
    for _ in range(3):
        train(booster, model, first)
    for _ in range(2):
        train(booster, model, first)
        train(booster, late, second)
    booster.save(tmp_path, [model, late], [first, second])
    booster, model, first, late, second = build()
    booster.load(tmp_path, [model, late], [first, second])
    train(booster, model, first)
    assert model.out.weight.dtype == torch.bfloat16


def test_a_run_that_is_resumed_with_other_phases_is_told_once(tmp_path, caplog):
    def job(total):
        return Job(PrecisionSchedule({0: "fp32", 0.5: "bf16"}, total_steps=total))

    before = job(4)
    before.steps(0, 3)
    before.booster.save(tmp_path, *before.parts)
    same, longer = job(4), job(100)
    same.booster.load(tmp_path, *same.parts)
    assert "PrecisionSchedule" not in caplog.text
    longer.booster.load(tmp_path, *longer.parts)
    (warning,) = [each.getMessage() for each in caplog.records if "PrecisionSchedule" in each.getMessage()]
    assert "total_steps=4 where this" in warning
    assert "total_steps=100 now" in warning
    longer.steps(3, 4)
    assert "FP32" in repr(longer.booster.precision)


@pytest.mark.parametrize(
    ("share", "total", "start"), [(0.55, 100, 55), (0.07, 100, 7), (0.29, 100, 29), (1 / 3, 300, 100)]
)
def test_a_share_is_the_fraction_that_was_written(share, total, start):
    assert list(PrecisionSchedule({0: "fp32", share: "bf16"}, total_steps=total).phases) == [0, start]


def test_a_share_of_which_no_step_is_left_is_refused():
    with pytest.raises(ValueError, match="which is none of its steps"):
        PrecisionSchedule({0: "fp32", 0.999: "bf16"}, total_steps=100)


# ---------------------------------------------------------------------- an optimizer that steps no more


def two(starts):
    """A booster with two pairs of a model and its optimizer, each of which has made a step."""
    booster, *first = small(PrecisionSchedule({0: "fp32", **dict.fromkeys(starts, "bf16_naive")}))
    model = Net(nn.LayerNorm)
    second = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]
    for pair in (first, second):
        train(booster, *pair)
    return booster, first, list(second)


def test_an_optimizer_that_steps_no_more_holds_no_phase_and_is_named(monkeypatch, caplog):
    monkeypatch.setattr(course, "PATIENCE", 5)
    booster, first, second = two([4])
    for _ in range(5):
        train(booster, *first)
    assert first[0].out.weight.dtype == torch.float32
    assert "no step while" not in caplog.text
    for _ in range(2):
        train(booster, *first)
    assert {model.out.weight.dtype for model, _ in (first, second)} == {torch.bfloat16}
    (warning,) = [each.getMessage() for each in caplog.records if "no step while" in each.getMessage()]
    assert warning.startswith("SGD of 14 parameters has made no step while another optimizer made 5")


def test_an_output_of_what_steps_no_more_holds_no_phase(monkeypatch):
    monkeypatch.setattr(course, "PATIENCE", 5)
    booster, first, second = two([4])
    kept = second[0](torch.randn(4, 32))
    for _ in range(7):
        train(booster, *first)
    assert kept.requires_grad
    assert first[0].out.weight.dtype == torch.bfloat16


def test_an_optimizer_that_steps_again_counts_on_from_where_the_run_is(monkeypatch):
    monkeypatch.setattr(course, "PATIENCE", 3)
    booster, first, second = two([12])
    for _ in range(6):
        train(booster, *first)
    train(booster, *second)  # its second step, when the run has made seven
    train(booster, *first)
    steps = []
    for _ in range(2):
        steps.append(booster._run.scheduler.step)
        train(booster, *second)
        train(booster, *first)
    assert steps == [7, 8]


def test_a_critic_that_makes_more_steps_than_its_generator_does_not_say_where_the_run_is():
    booster, critic, generator = two([8])
    for _ in range(5):
        for _ in range(20):
            train(booster, *critic)
        train(booster, *generator)
    assert booster._run.scheduler.step == 6
    assert generator[0].out.weight.dtype == torch.float32


@pytest.mark.parametrize("steps", [4, 8])
def test_a_resumed_run_knows_which_optimizer_is_at_rest_and_since_when(steps, tmp_path, monkeypatch):
    monkeypatch.setattr(course, "PATIENCE", 6)
    booster, first, second = two([4])
    for _ in range(steps):
        train(booster, *first)
    booster.save(tmp_path, [first[0], second[0]], [first[1], second[1]])
    again, *others = two([4])
    models, optimizers = zip(*others, strict=True)
    again.load(tmp_path, list(models), list(optimizers))
    for _ in range(5):
        train(booster, *first)
        train(again, *others[0])
        assert others[0][0].out.weight.dtype == first[0].out.weight.dtype
        assert again._run.scheduler.step == booster._run.scheduler.step


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's compiler about itself
def test_a_boosted_model_that_is_compiled_goes_over_as_one_that_is_not():
    def losses(compiled):
        booster, model, optimizer = small(PrecisionSchedule({0: "fp32", 2: "bf16", 3: "bf16_naive"}))
        run, found = torch.compile(model, backend="eager") if compiled else model, []
        for number in range(4):
            loss = run(torch.randn(4, 32, generator=torch.Generator().manual_seed(number))).square().mean()
            found.append(loss.item())
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return found, booster.precision, model.state_dict()

    torch.compiler.reset()
    torch.manual_seed(0)
    expected = losses(compiled=False)
    torch.manual_seed(0)
    found = losses(compiled=True)
    assert found[0] == expected[0]
    assert repr(found[1]) == repr(expected[1])
    assert differences(found[2], expected[2]) == []


def test_a_schedule_around_a_whole_graph_is_refused_by_name():
    _, model, _ = small(PrecisionSchedule({0: "fp32", 2: "bf16"}))
    torch.compiler.reset()
    with pytest.raises(Exception, match="a PrecisionSchedule counts steps"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(4, 32))
