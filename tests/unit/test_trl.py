"""Trainers of TRL under a Booster: SFT, DPO and GRPO log what they log without one.

Slow, and with the real packages: `make integrations` installs them.
"""

import functools
import math

import pytest
import torch
from language_models import rows, tokenizer
from trainers import llama, logged, needed

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PRECISIONS = ["bf16", "fp16", "bf16_naive", "fp16_naive"]


packages = needed("transformers", "accelerate", "datasets", "trl", "peft")


def even_words(completion_ids, **kwargs):
    """The toy reward: the share of tokens with an even number."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def trained(kind, folder, *, precision=None, plain=False, resume=None, adapters=None, **options):
    """A trainer of `kind` that has trained for six steps: of TRL with `plain`, otherwise boosted."""
    import transformers
    import trl

    from booster.integrations.trainer import boosted_trainer

    usual = {"max_steps": 6, "logging_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    usual |= {"save_strategy": "no", "report_to": [], "learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True}
    usual |= {"output_dir": str(folder), "bf16": False, "seed": 1}
    if kind == "grpo":
        usual |= {"num_generations": 4, "max_completion_length": 6, "beta": 0.1, "temperature": 1.0}
    name = kind.upper()
    llama().save_pretrained(folder / "start")  # of which the reference is made, too
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "start")
    given = {"model": model, "args": getattr(trl, f"{name}Config")(**{**usual, **options})}
    given |= {"train_dataset": rows(kind), "processing_class": tokenizer(), "peft_config": adapters}
    if kind == "grpo":
        given["reward_funcs"] = even_words
    base = getattr(trl, f"{name}Trainer")
    trainer = base(**given) if plain else boosted_trainer(base)(**given, mixed_precision=precision)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """`exact(kind)`: a trainer of TRL's own that has trained in float32, once for all precisions."""
    return functools.cache(lambda kind: trained(kind, tmp_path_factory.mktemp(kind), plain=True))


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_losses_in_float32_are_those_without_a_booster(tmp_path, exact, kind):
    ours, theirs = trained(kind, tmp_path), exact(kind)
    assert logged(ours) == pytest.approx(logged(theirs), rel=1e-5, abs=1e-6)
    assert logged(ours, "grad_norm") == pytest.approx(logged(theirs, "grad_norm"), rel=1e-4)
    assert len(logged(ours)) == 6
    if kind == "grpo":
        assert logged(ours, "reward") == logged(theirs, "reward")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_losses_in_half_precisions_follow_those_in_float32(tmp_path, exact, kind, precision):
    ours, theirs = trained(kind, tmp_path, precision=precision), exact(kind)
    # Losses of at most 5; each of six steps may add a rounding to 8 bits of bfloat16 or 11 of float16, and DPO sums
    # log-probabilities of four tokens.
    unit = 2**-8 if precision.startswith("bf16") else 2**-11
    assert logged(ours) == pytest.approx(logged(theirs), abs=6 * 5 * unit * (2 if kind == "dpo" else 1))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_grpo_samples_and_trains_in_the_same_precision_so_that_the_policy_begins_beside_its_reference(
    tmp_path, precision
):
    trainer = trained("grpo", tmp_path, precision=precision)
    # Policy and reference compute the same before the first step, but for attention, which trains in float32 on a CPU.
    assert logged(trainer, "kl")[1] < 1e-6
    assert all(math.isfinite(value) for value in logged(trainer).values())
    assert logged(trainer, "reward")[1] > 0


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_a_run_resumes_to_the_bit(tmp_path, kind):
    whole = trained(kind, tmp_path, precision="fp16_naive", save_strategy="steps", save_steps=2)
    resumed = trained(kind, tmp_path, precision="fp16_naive", resume=str(tmp_path / "checkpoint-4"), save_strategy="no")
    assert logged(resumed) == logged(whole)
    assert all(torch.equal(resumed.model.state_dict()[n], value) for n, value in whole.model.state_dict().items())


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive"])
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_adapters_of_peft_train_alone_and_are_all_that_is_saved(tmp_path, kind, precision):
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    options = {"adapters": lora, "save_strategy": "steps", "save_steps": 3}
    ours = trained(kind, tmp_path / "a", precision=precision, **options)
    checkpoint = tmp_path / "a" / "checkpoint-3"
    assert (checkpoint / "adapter_model.safetensors").exists()
    assert not (checkpoint / "model.safetensors").exists()
    assert all("lora_" in name for name, p in ours.model.named_parameters() if p.requires_grad)
    resumed = trained(kind, tmp_path / "a", precision=precision, adapters=lora, resume=str(checkpoint))
    assert logged(resumed) == logged(ours)
    if precision == "fp32":
        theirs = trained(kind, tmp_path / "b", plain=True, **options)
        assert logged(ours) == pytest.approx(logged(theirs), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "precision", "options", "says"),
    [
        ("sft", "fp16", {"bf16": None}, "mixed_precision='fp16' and bf16=True of SFTConfig"),  # TRL's default
        ("grpo", "bf16_naive", {"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32"),
        ("dpo", "bf16_naive", {"precompute_ref_log_probs": True}, ": .* BF16NaiveMixedPrecision has not converted yet"),
    ],
)
def test_an_option_of_trl_that_contradicts_the_precision_is_named(tmp_path, kind, precision, options, says):
    with pytest.raises(ValueError, match=says):
        trained(kind, tmp_path, precision=precision, **options)


def test_a_reference_computed_before_training_is_that_of_the_model_as_it_begins(tmp_path):
    ours = trained("dpo", tmp_path, precision="bf16", precompute_ref_log_probs=True)
    assert logged(ours)[1] == pytest.approx(math.log(2), abs=1e-3)
