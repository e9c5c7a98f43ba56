"""The Trainer of transformers under a Booster: its knobs keep their meaning, its checkpoints resume to the bit.

Slow, and with the real packages: `make integrations` installs them.
"""

import copy
import functools
import math

import pytest
import torch
from trainers import Rows, arguments, llama, logged, needed

from booster.interface.model import extras_of
from booster.mixed_precision import Autopilot, NVFP4MixedPrecision, PrecisionSchedule

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PRECISIONS = ["fp32", "bf16", "fp16", "bf16_naive", "fp16_naive"]


packages = needed("transformers", "accelerate")


def trained(folder, *, plain=False, precision=None, model=None, rows=None, resume=None, then=None, **options):
    """A Trainer that has trained: transformers' own with `plain`, otherwise the boosted one."""
    import transformers

    from booster.integrations.trainer import BoosterTrainer

    then = then or {}
    given = {"model": model or llama(), "args": arguments(folder, **options), "train_dataset": rows or Rows(), **then}
    trainer = transformers.Trainer(**given) if plain else BoosterTrainer(**given, mixed_precision=precision)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same_as_plain(folder, **options):
    """Losses, norms and rates of the boosted Trainer in float32 are those of transformers'."""
    ours, theirs = trained(folder / "a", **options), trained(folder / "b", plain=True, **options)
    # A few units in the last place of float32: the clip is folded into the step.
    assert logged(ours) == pytest.approx(logged(theirs), rel=4 * 2**-23)
    assert logged(ours, "learning_rate") == logged(theirs, "learning_rate")
    assert logged(ours, "grad_norm") == pytest.approx(logged(theirs, "grad_norm"), rel=1e-5)
    return ours, theirs


# ---- knobs ----

KNOBS = {
    "as it comes": {},
    "no clip": {"max_grad_norm": 0.0},
    "one micro-batch": {"gradient_accumulation_steps": 1},
    "a short last group": {"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 2},
    "linear with warmup": {"lr_scheduler_type": "linear", "warmup_steps": 3},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "checkpointing, reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "adafactor": {"optim": "adafactor"},
    "sgd": {"optim": "sgd"},
    "adamw of torch, not fused": {"optim": "adamw_torch"},
    "weight decay": {"weight_decay": 0.1},
    "noise in embeddings": {"neftune_noise_alpha": 5.0},
}


@pytest.mark.parametrize("knob", KNOBS)
def test_a_knob_does_in_float32_what_it_does_without_a_booster(tmp_path, knob):
    ours, _ = same_as_plain(tmp_path, **KNOBS[knob])
    assert len(logged(ours)) >= 6


def test_rows_of_several_lengths_are_grouped_padded_and_weighed_by_tokens_as_without_a_booster(tmp_path):
    import transformers

    grouped = {"train_sampling_strategy": "group_by_length"}
    if not hasattr(transformers.TrainingArguments, "train_sampling_strategy"):
        grouped = {"group_by_length": True}

    def pad(rows):
        length = max(len(row["labels"]) for row in rows)
        pads = {"input_ids": 0, "labels": -100}
        filled = {
            key: [torch.nn.functional.pad(row[key], (0, length - len(row[key])), value=value) for row in rows]
            for key, value in pads.items()
        }
        return {key: torch.stack(values) for key, values in filled.items()}

    same_as_plain(tmp_path, rows=Rows(lengths=(5, 9, 12)), then={"data_collator": pad}, **grouped)


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """`exact(knob)`: what transformers' own Trainer logs in float32, trained once for all precisions."""

    @functools.cache
    def losses(knob):
        return logged(trained(tmp_path_factory.mktemp("plain"), plain=True, **KNOBS[knob]))

    return losses


@pytest.mark.parametrize("precision", PRECISIONS[1:])
@pytest.mark.parametrize("knob", ["as it comes", "gradient checkpointing", "label smoothing"])
def test_half_precisions_learn_as_float32_does(tmp_path, exact, precision, knob):
    ours = trained(tmp_path, precision=precision, **KNOBS[knob])
    # Losses of about 4; each of twelve steps may add a rounding to 8 bits of bfloat16 or 11 of float16.
    unit = 2**-8 if precision.startswith("bf16") else 2**-11
    assert logged(ours) == pytest.approx(exact(knob), abs=12 * unit * 4)
    assert logged(ours, "skipped_steps")[12] <= 1  # of a float16 gradient at the first scale


@pytest.mark.parametrize("flag", ["bf16", "fp16"])
def test_flags_of_the_arguments_say_the_precision_where_nothing_else_does(tmp_path, flag):
    by_flag = trained(tmp_path / "a", max_steps=4, **{flag: True})
    by_name = trained(tmp_path / "b", precision=flag, max_steps=4)
    assert logged(by_flag) == logged(by_name)
    assert type(by_flag.booster.precision) is type(by_name.booster.precision)


# ---- checkpoints ----


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_run_resumed_in_mid_epoch_is_the_run_that_was_not_interrupted_to_the_bit(tmp_path, precision):
    whole = trained(tmp_path, precision=precision, save_strategy="steps", save_steps=5)
    resumed = trained(
        tmp_path, precision=precision, model=llama(seed=9), resume=str(tmp_path / "checkpoint-5"), save_strategy="no"
    )
    assert logged(resumed) == logged(whole)
    assert logged(resumed, "grad_norm") == logged(whole, "grad_norm")
    ours, theirs = resumed.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert resumed.optimizer.loss_scale == whole.optimizer.loss_scale


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_checkpoint_opens_by_from_pretrained_with_the_weights_that_the_forward_reads(tmp_path, precision):
    import transformers

    trainer = trained(tmp_path, precision=precision, save_strategy="steps", save_steps=12)
    assert (tmp_path / "checkpoint-12" / "config.json").exists()
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-12", dtype="auto").state_dict()
    trained_ones = trainer.model.state_dict()
    assert opened.keys() == trained_ones.keys()
    assert all(
        torch.equal(opened[name], value) and opened[name].dtype == value.dtype for name, value in trained_ones.items()
    )
    wanted = {"bf16_naive": torch.bfloat16, "fp16_naive": torch.float16}.get(precision, torch.float32)
    assert opened["model.layers.0.mlp.up_proj.weight"].dtype == wanted


OTHERS = {
    "tf32": lambda mixed: mixed.TF32MixedPrecision(emulate=True),
    "fp16_apex, O1": lambda mixed: mixed.FP16ApexMixedPrecision("O1"),
    "fp16_apex, O2": lambda mixed: mixed.FP16ApexMixedPrecision("O2"),
    "fp8": lambda mixed: mixed.FP8MixedPrecision(emulate=True),
    "fp8, delayed": lambda mixed: mixed.FP8MixedPrecision("tensorwise", emulate=True, delayed_scaling=True),
    "fp8, blocks": lambda mixed: mixed.FP8MixedPrecision("blocks", emulate=True),
    "mxfp8": lambda mixed: mixed.MXFP8MixedPrecision(emulate=True),
    "nvfp4": lambda mixed: mixed.NVFP4MixedPrecision(emulate=True),
    "int8": lambda mixed: mixed.Int8MixedPrecision(emulate=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_precision_trains_resumes_to_the_bit_and_leaves_a_checkpoint_that_opens(tmp_path, name):
    import transformers
    from safetensors.torch import load_file

    from booster import mixed_precision

    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = trained(tmp_path, precision=OTHERS[name](mixed_precision), model=llama(width=128), **options)
    checkpoint = str(tmp_path / "checkpoint-3")
    resumed = trained(
        tmp_path, precision=OTHERS[name](mixed_precision), model=llama(9, 128), resume=checkpoint, max_steps=6
    )
    assert logged(resumed) == logged(whole)
    exact = trained(tmp_path / "plain", plain=True, model=llama(width=128), max_steps=6)
    assert logged(whole) != logged(exact)
    assert logged(whole) == pytest.approx(logged(exact), abs=0.3 if name == "nvfp4" else 0.1)
    # O2 keeps float32 in files, as apex does, and config.json names the dtype that the forward computes in.
    half = torch.float16 if name == "fp16_apex, O2" else torch.float32
    file = load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6", dtype="auto").state_dict()
    for key, value in whole.model.state_dict().items():
        assert torch.equal(file[key], value)
        assert torch.equal(opened[key], value.to(half))
        assert opened[key].dtype == half


def low(**options):
    return NVFP4MixedPrecision(emulate=True, keep=(), **options)


CHANGING = {
    "a schedule": lambda: PrecisionSchedule({0: "fp32", 0.25: "bf16", 0.5: "fp16", 0.75: "bf16_naive"}, total_steps=8),
    "an autopilot": lambda: Autopilot(low(), every=2),
    "a schedule of autopilots": lambda: PrecisionSchedule(
        {0: Autopilot(low(), every=2), 4: Autopilot(low(forward="bf16"), every=2), 6: "bf16"}
    ),
}


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("made", [1, 3, 5, 7])
def test_a_precision_that_changes_is_where_it_was_when_a_run_is_resumed(tmp_path, name, made, whole_runs):
    whole, folder = whole_runs(name)
    checkpoint = str(folder / f"checkpoint-{made}")
    resumed = trained(tmp_path, precision=CHANGING[name](), model=llama(9), resume=checkpoint, max_steps=8)
    assert logged(resumed) == logged(whole)
    assert repr(resumed.booster.precision) == repr(whole.booster.precision)
    ours, theirs = resumed.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    assert piloted(resumed) == piloted(whole)


def piloted(trainer):
    pilot = extras_of(trainer.trained_by_booster.model).pins
    return pilot and pilot.state_dict()


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory):
    """By name of what changes, a run that was not interrupted, and where its checkpoints are."""

    @functools.cache
    def run(name):
        folder = tmp_path_factory.mktemp("whole")
        return trained(folder, precision=CHANGING[name](), max_steps=8, save_strategy="steps", save_steps=1), folder

    return run


def test_a_precision_that_changes_is_a_loop_of_ones_own(tmp_path, whole_runs):
    """Phases begin after those optimizer steps, evaluation between them changes nothing, and checkpoints open."""
    import transformers

    whole, folder = whole_runs("a schedule")
    evaluated = trained(
        tmp_path, precision=CHANGING["a schedule"](), max_steps=8, then={"eval_dataset": Rows(6)}, eval_strategy="steps",
        eval_steps=1,
    )  # fmt: skip
    assert logged(evaluated) == logged(whole)
    for made, dtype in ((6, torch.float32), (8, torch.bfloat16)):
        opened = transformers.AutoModelForCausalLM.from_pretrained(folder / f"checkpoint-{made}", dtype="auto")
        assert opened.dtype == dtype
    scales = logged(whole, "loss_scale")
    assert [step for step in sorted(scales) if scales[step] > 1] == [5, 6]


def test_a_checkpoint_of_the_plain_trainer_is_gone_on_with(tmp_path):
    whole = trained(tmp_path, plain=True, save_strategy="steps", save_steps=5)
    resumed = trained(tmp_path, model=llama(seed=9), resume=str(tmp_path / "checkpoint-5"))
    assert logged(resumed) == logged(whole)


@pytest.mark.parametrize("strategy", ["epoch", "best"])
def test_checkpoints_come_when_they_come_without_a_booster(tmp_path, strategy):
    options = {"save_strategy": strategy, "max_steps": -1, "num_train_epochs": 2}
    options |= {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss"}
    same_as_plain(tmp_path, then={"eval_dataset": Rows(8)}, **options)
    ours, theirs = (sorted(each.name for each in (tmp_path / side).glob("checkpoint-*")) for side in "ab")
    assert ours == theirs != []


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_the_best_model_is_loaded_at_the_end_and_what_trains_on_starts_from_it(tmp_path, precision):
    options = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "worst"}
    scores = iter([0.1, 3.0, 0.2, 3.0, 3.0])
    then = {"eval_dataset": Rows(8), "compute_metrics": lambda found: {"worst": next(scores)}}
    trainer = trained(tmp_path, precision=precision, then=then, **options)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-8")
    from safetensors.torch import load_file

    best = load_file(tmp_path / "checkpoint-8" / "model.safetensors")
    assert all(torch.equal(trainer.model.state_dict()[name], value) for name, value in best.items())
    trainer.args.max_steps = 1
    for group in trainer.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 0.0
    trainer.train()
    assert all(torch.equal(trainer.model.state_dict()[name], value) for name, value in best.items())


# ---- what runs in the precision ----


def test_the_users_own_model_computes_in_the_precision_once_it_trains(tmp_path):
    trainer = trained(tmp_path, precision="fp16", max_steps=2)
    words = torch.arange(1, 9)[None]
    with torch.no_grad():
        own, boosted = trainer.model(input_ids=words).logits, trainer.model_wrapped(input_ids=words).logits
        plain = llama()
        plain.load_state_dict(trainer.model.state_dict())
        exact = plain(input_ids=words).logits
    assert own.dtype == torch.float32
    assert torch.equal(own, boosted)
    assert not torch.equal(own, exact)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_evaluates_and_predicts_before_between_and_after_training(tmp_path, precision):
    seen = []

    def metrics(found):
        seen.append(found.predictions.dtype.name)
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    from booster.integrations.trainer import BoosterTrainer

    given = {"train_dataset": Rows(), "eval_dataset": Rows(8), "compute_metrics": metrics}
    trainer = BoosterTrainer(
        llama(), arguments(tmp_path, eval_strategy="steps", eval_steps=6), mixed_precision=precision, **given
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert sorted(logged(trainer, "eval_accuracy")) == [6, 12]
    assert trainer.predict(Rows(4)).predictions.shape == (4, 12, 64)
    assert set(seen) == {"float32"}


def test_callbacks_see_gradients_unscaled_and_averages_of_weights_follow(tmp_path):
    import transformers

    class Average(transformers.TrainerCallback):
        norms: list = []

        def on_train_begin(self, args, state, control, model=None, **kwargs):
            self.average = torch.optim.swa_utils.AveragedModel(model, use_buffers=False)

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            self.norms.append(math.hypot(*(param.grad.float().norm().item() for param in model.parameters())))

        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.average.update_parameters(model)

    average = Average()
    trainer = trained(tmp_path, precision="fp16", then={"callbacks": [average]})
    assert average.norms == pytest.approx([0.5] * 12, rel=1e-3)  # clipped, as without a booster
    assert average.average.n_averaged == 12
    words = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert not torch.equal(average.average(input_ids=words).logits, trainer.model(input_ids=words).logits)


def test_an_overflow_is_skipped_logged_with_its_culprit_and_the_schedule_waits(tmp_path):
    import transformers

    class Spoil(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 3:
                self.handle = model.lm_head.weight.register_hook(lambda grad: grad * math.inf)
            if state.global_step == 4:
                self.handle.remove()

    trainer = trained(tmp_path, precision="fp16", then={"callbacks": [Spoil()]}, lr_scheduler_type="linear")
    assert list(logged(trainer, "skipped_steps").values()) == [0] * 3 + [1] * 9
    assert logged(trainer, "culprit") == {4: "lm_head.weight"}
    assert logged(trainer, "loss_scale")[3] == 2 * logged(trainer, "loss_scale")[4]
    rates = logged(trainer, "learning_rate")
    assert rates[4] == rates[5]
    assert len(set(rates.values())) == 11


def test_it_trains_again_and_a_new_model_begins_anew(tmp_path):
    from booster.integrations.trainer import BoosterTrainer

    trainer = BoosterTrainer(
        args=arguments(tmp_path), train_dataset=Rows(), model_init=lambda: llama(), mixed_precision="bf16_naive"
    )
    trainer.train()
    first = logged(trainer)
    trainer.train()
    assert logged(trainer) == first
    going = trained(tmp_path, precision="bf16_naive")
    last = logged(going)[12]
    going.train()
    assert logged(going)[12] < last


def test_a_compiled_model_trains_to_the_same_losses(tmp_path):
    eager = trained(tmp_path / "a", precision="bf16", max_steps=3)
    compiled = trained(
        tmp_path / "b", precision="bf16", max_steps=3, torch_compile=True, torch_compile_backend="aot_eager"
    )
    assert logged(compiled) == pytest.approx(logged(eager), abs=2**-8 * 4)
    torch.compiler.reset()


def test_a_batch_too_large_is_halved_and_training_begins_again(tmp_path):
    import transformers

    class TooLarge(transformers.TrainerCallback):
        failed = False

        def on_substep_end(self, args, state, control, **kwargs):
            if not self.failed:
                self.failed = True
                raise RuntimeError("CUDA out of memory.")

    trainer = trained(
        tmp_path, precision="fp16", then={"callbacks": [TooLarge()]}, auto_find_batch_size=True, max_steps=4
    )
    assert sorted(logged(trainer)) == [1, 2, 3, 4]
    assert all(math.isfinite(loss) for loss in logged(trainer).values())


# ---- refusals ----

REFUSED = {
    "another precision than the flag": ({"bf16": True}, "fp16", "mixed_precision='fp16' and bf16=True"),
    "half weights with a flag": ({"bf16": True}, "bf16_naive", "mixed_precision='bf16_naive' and bf16=True"),
    "evaluation in bfloat16": ({"bf16_full_eval": True}, None, "bf16_full_eval"),
    "evaluation in float16": ({"fp16_full_eval": True}, None, "fp16_full_eval"),
    "an optimizer within backward": ({"optim": "lomo"}, None, "optim='lomo'"),
    "a layerwise optimizer": ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["q"]}, None, "layerwise"),
    "an unknown precision": ({}, "fp17", "mixed_precision='fp17' is unknown"),
    "a schedule with a flag": ({"bf16": True}, PrecisionSchedule({0: "fp32", 2: "bf16"}), "contradict each other"),
    "an autopilot with a flag": ({"fp16": True}, Autopilot(low="nvfp4", high="bf16"), "contradict each other"),
    "what one phase cannot": (
        {"tf32": False},
        PrecisionSchedule({0: "fp32", 2: "tf32"}),
        "and tf32=False contradict",
    ),
    "tf32 that is switched off": ({"tf32": False}, "tf32", "mixed_precision='tf32' and tf32=False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_or_cannot_be_honoured_is_refused_by_name_in_the_constructor(tmp_path, case):
    from booster.integrations.trainer import BoosterTrainer

    options, precision, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        BoosterTrainer(llama(), arguments(tmp_path, **options), train_dataset=Rows(), mixed_precision=precision)


def test_arguments_that_need_another_machine_are_refused_too(tmp_path):
    from booster.integrations.trainer import BoosterTrainer, check_arguments, plugin_of
    from booster.mixed_precision import FP16TorchMixedPrecision, make
    from booster.plugin import SingleDevice

    trainer = BoosterTrainer(llama(), arguments(tmp_path), train_dataset=Rows())
    for name, value in {
        "deepspeed": {"stage": 2},
        "fsdp": "full_shard",
        "parallelism_config": object(),
        "_n_gpu": 2,
        "half_precision_backend": "apex",
        "jit_mode_eval": True,
        "use_transformers_continuous_batching": True,
    }.items():
        args = copy.copy(trainer.args)
        setattr(args, name, value)
        with pytest.raises(ValueError, match="cannot honour"):
            check_arguments(args, [make("fp16")], trainer.accelerator, trainer.model)
    with pytest.raises(ValueError, match="keep_fp32='auto'"):
        check_arguments(trainer.args, [FP16TorchMixedPrecision(keep_fp32="auto")], trainer.accelerator, trainer.model)
    args = copy.copy(trainer.args)
    args.ddp_bucket_cap_mb = 5
    with pytest.raises(ValueError, match="ddp_bucket_cap_mb"):
        plugin_of(SingleDevice(), args, num_processes=1, checkpointed=False)
    with pytest.raises(ValueError, match="divides data among 1 ranks"):
        plugin_of(SingleDevice(), trainer.args, num_processes=2, checkpointed=False)


def test_what_each_rank_alone_carries_is_refused_since_checkpoints_would_lose_it():
    from booster import Booster
    from booster.integrations.trainer_job import TrainerJob
    from booster.plugin import SingleDevice

    class Carries(SingleDevice):
        def carried(self, module):
            return {}

    model = llama()
    with pytest.raises(ValueError, match="error_feedback=True of fp8_communication"):
        TrainerJob(Booster("cpu", "fp32", Carries())).prepare(model, torch.optim.SGD(model.parameters(), 0.1))


def test_all_that_checkpoints_hold_is_kept_by_those_of_a_trainer_or_refused():
    from booster.checkpoint.parts import PARTS

    by_transformers = {"Modules", "StatefulObjects", "Random"}
    by_booster = {"Optimizers", "ScaleHistory", "LayerChoices", "PinnedModules"}  # of integrations/trainer_job.py
    refused = {"ErrorFeedback"}
    assert {part.__name__ for part in PARTS} == by_transformers | by_booster | refused


def test_layers_that_were_chosen_by_measuring_are_chosen_so_in_a_run_that_goes_on(tmp_path):
    from booster.integrations.trainer_job import TrainerJob
    from booster.interface.model import extras_of
    from booster.mixed_precision.low_precision.conversion import ChosenLayers

    found = []
    for wide in (True, False):
        trainer = trained(tmp_path / str(wide), max_steps=1)
        extras_of(trainer.model_wrapped).choice = ChosenLayers({}, {(32, 64): wide})
        found.append(trainer.trained_by_booster)
    first, other = found
    assert isinstance(first, TrainerJob)
    first.save_optimizer(str(tmp_path / "checkpoint"))
    assert other.load_optimizer(str(tmp_path / "checkpoint"))
    assert extras_of(other.model).choice.state_dict() == {"low": [], "wide": [[32, 64]]}


def test_only_trainers_are_boosted_and_once():
    from booster.integrations.trainer import BoosterTrainer, boosted_trainer

    with pytest.raises(TypeError, match=r"transformers\.Trainer or a subclass"):
        boosted_trainer(dict)
    with pytest.raises(TypeError, match="boosted already"):
        boosted_trainer(BoosterTrainer)
    assert BoosterTrainer is boosted_trainer(BoosterTrainer.__mro__[1])


def test_the_accelerator_refuses_what_it_cannot_do(tmp_path):
    trainer = trained(tmp_path, precision="fp16", max_steps=1)
    accelerator = trainer.accelerator
    with pytest.raises(ValueError, match="not of the model that trains"):
        stranger = torch.nn.Parameter(torch.zeros(1))
        stranger.grad = torch.zeros(1)
        accelerator.clip_grad_norm_([stranger], 1.0)
    with pytest.raises(
        RuntimeError, match=r"adapter came into the model after training began.* load_adapter .* train\(\)"
    ):
        trainer.model.register_parameter("adapter", stranger)
        accelerator.clip_grad_norm_([stranger], 1.0)
    with pytest.raises(RuntimeError, match="save_state"):
        accelerator.save_state(tmp_path)
    with pytest.raises(ValueError, match="2 models"):
        accelerator.prepare(llama(), llama(), trainer.optimizer)
    with pytest.raises(ValueError, match="evaluation_mode=True"):
        accelerator.prepare_model(llama())
