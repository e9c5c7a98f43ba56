"""Adapters train on a frozen base in 4 to 16 bits as on plain frozen layers with the same numbers, in every precision."""

import pytest
import torch
from lora import (
    TOLERANCES,
    adapted,
    base,
    boosted,
    differs,
    loaded,
    quantised_by_others,
    steps,
    trained,
    widened,
)
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint

from booster.checkpoint import CheckpointError
from booster.checkpoint.manifest import read_manifest
from booster.frozen import FrozenLinear
from booster.mixed_precision import (
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    Int8MixedPrecision,
    TF32MixedPrecision,
)

PRECISIONS = {
    "fp32": lambda: "fp32",
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=2.0**10),
    "bf16": lambda: "bf16",
    "fp16_apex O1": lambda: FP16ApexMixedPrecision("O1", loss_scale=2.0**10, verbosity=0),
    "fp16_apex O2": lambda: FP16ApexMixedPrecision("O2", loss_scale=2.0**10, verbosity=0),
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2.0**10),
    "bf16_naive": lambda: "bf16_naive",
    "tf32": lambda: TF32MixedPrecision(emulate=True),
}
BITS = {name: torch.bfloat16 if "bf16" in name else torch.float16 for name in PRECISIONS if name not in ("fp32",)}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    save_file(base().state_dict(), path)
    return path


def packed(model):
    return {name: param.clone() for name, param in model.named_parameters() if param.dtype == torch.uint8}


@pytest.mark.slow_cases("tf32-nf4", "fp16_apex O1-nf4", "fp16-nf4")
@pytest.mark.parametrize(
    ("precision", "form"), [*((name, "nf4") for name in PRECISIONS), *(("bf16", form) for form in ("int8", "fp8"))]
)
def test_adapters_train_as_on_plain_layers_with_the_same_numbers(path, precision, form):
    model = adapted(loaded(path, storage_dtype=form))
    before = packed(model)
    assert len(before) == 5
    tolerance = TOLERANCES[BITS.get(precision, torch.float32)]
    job = boosted(model, PRECISIONS[precision]())
    plain = boosted(adapted(widened(loaded(path, storage_dtype=form))), PRECISIONS[precision]())
    start = trained(plain)
    losses, applied = steps(job, 4)
    assert losses == pytest.approx(steps(plain, 4)[0], rel=tolerance)
    assert all(applied)
    assert losses[-1] < losses[0]
    assert differs(trained(job), trained(plain), start, tolerance) == []
    assert all(torch.equal(value, model.get_parameter(name)) for name, value in before.items())


@pytest.mark.parametrize(
    ("precision", "compute"), [("fp32", torch.float16), ("fp16", torch.bfloat16), ("bf16", torch.float16)]
)
def test_frozen_layers_compute_in_the_dtype_said_under_any_precision(path, precision, compute):
    job = boosted(
        adapted(loaded(path, storage_dtype="nf4", compute_dtype=compute, keep="head")), PRECISIONS[precision]()
    )
    losses, _ = steps(job, 4)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("precision", "skips"), [("fp16", [2]), ("fp16_naive", [2])])
@pytest.mark.parametrize("storage", [("nf4", None), (torch.float16, None), (torch.bfloat16, torch.float16)], ids=str)
def test_a_frozen_base_in_half_or_less_trains_under_a_loss_scale_and_skips(path, storage, precision, skips):
    model = loaded(path, storage_dtype=storage[0], compute_dtype=storage[1])
    job = boosted(adapted(model), PRECISIONS[precision]())
    losses, applied = steps(job, 5, overflow=skips)
    assert [step for step, done in enumerate(applied) if not done] == skips
    assert losses[-1] < losses[0]
    assert {tensor.dtype for tensor in trained(job).values()} == {
        torch.float32 if precision == "fp16" else torch.float16
    }


def test_products_in_8_bits_leave_frozen_layers_as_they_are(path):
    job = boosted(adapted(loaded(path, storage_dtype="nf4")), Int8MixedPrecision(keep=()))
    assert sum(isinstance(module, FrozenLinear) for module in job.model.modules()) == 5
    losses, _ = steps(job, 4)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_adapters_in_bfloat16_train_where_half_weights_do(path, precision):
    job = boosted(adapted(loaded(path, storage_dtype="nf4"), torch.bfloat16), precision)
    losses, _ = steps(job, 4)
    assert losses[-1] < losses[0]
    assert {tensor.dtype for tensor in trained(job).values()} == {torch.bfloat16}


def test_adapters_in_bfloat16_are_refused_under_autocast_which_keeps_no_masters(path):
    model = adapted(loaded(path, storage_dtype="nf4"), torch.bfloat16)
    with pytest.raises(ValueError, match=r"blocks.0.up.lora_A.default.weight.*use mixed_precision='bf16_naive'"):
        boosted(model, "bf16")


def test_weights_are_unpacked_again_where_activations_are_recomputed(path):
    plain = boosted(adapted(loaded(path, storage_dtype="nf4")), "bf16")
    again = adapted(loaded(path, storage_dtype="nf4"))
    for block in again.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    assert steps(plain, 4) == steps(boosted(again, "bf16"), 4)


def test_a_run_is_saved_and_goes_on_to_the_bit(path, tmp_path):
    job = boosted(adapted(loaded(path, storage_dtype="nf4")), "bf16")
    steps(job, 3)
    job.booster.save(tmp_path / "run", job.model, job.optimizer)
    expected, _ = steps(job, 3, first=3)
    other = adapted(loaded(path, storage_dtype="nf4"))
    for param in packed(other):
        other.get_parameter(param).zero_()
    other = boosted(other, "bf16")
    other.booster.load(tmp_path / "run", other.model, other.optimizer)
    assert steps(other, 3, first=3)[0] == expected
    job.booster.save_model(job.model, tmp_path / "model.safetensors")
    third = boosted(adapted(loaded(path, storage_dtype="nf4")), "bf16")
    third.booster.load_model(third.model, tmp_path / "model.safetensors")
    assert all(torch.equal(value, third.model.state_dict()[name]) for name, value in job.model.state_dict().items())


@pytest.mark.parametrize("precision", ["bf16", "bf16_naive"])
def test_a_checkpoint_leaves_out_what_is_frozen_where_it_is_told_to(path, tmp_path, precision):
    job = boosted(adapted(loaded(path, storage_dtype="nf4")), precision)
    steps(job, 3)
    job.booster.save(tmp_path / "all", job.model, job.optimizer)
    job.booster.save(tmp_path / "trained", job.model, job.optimizer, frozen=False)
    held = {}
    for name in ("all", "trained"):
        tensors = read_manifest(next((tmp_path / name).glob("step-*"))).tensors
        held[name] = {key.removeprefix("models/0/") for key in tensors if key.startswith("models/0/")}
    assert held["all"] == set(job.model.state_dict())
    assert held["trained"] == set(trained(job))
    expected, _ = steps(job, 3, first=3)
    other = boosted(adapted(loaded(path, storage_dtype="nf4")), precision)
    other.booster.load(tmp_path / "trained", other.model, other.optimizer)
    assert steps(other, 3, first=3)[0] == expected
    whole = boosted(loaded(path), precision)  # of which all is to train
    with pytest.raises(CheckpointError, match="are not in the checkpoint"):
        whole.booster.load(tmp_path / "trained", whole.model)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive"])
def test_models_that_arrive_quantised_by_others_keep_their_integers_and_train(precision):
    model = quantised_by_others()
    codes = [block.up.qweight.clone() for block in model.blocks]
    job = boosted(model, PRECISIONS[precision]())
    losses, _ = steps(job, 4)
    assert losses[-1] < losses[0]
    assert all(torch.equal(block.up.qweight, code) for block, code in zip(model.blocks, codes, strict=True))
    assert model.blocks[0].up.qweight.dtype == torch.int32
