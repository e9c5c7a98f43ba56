"""A description says of each module what it is stored in, was loaded from, computes in and gets gradients in."""

import pytest
from lora import adapted, base, loaded
from safetensors.torch import save_file
from torch import nn

from booster import Booster, describe
from booster.mixed_precision import FP32, BF16MixedPrecision, Int8MixedPrecision, NaiveAMPModel, TF32MixedPrecision


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 8)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.last(self.body(self.norm(self.embed(tokens)))))


def rows(precision, **options):
    model, *_ = Booster("cpu", precision).boost(Net(), **options)
    description = describe(model)
    return {row.name: (row.stored, row.computes, row.gradient) for row in description.rows}


def test_a_raw_model_computes_in_what_it_is_stored_in():
    model = Net()
    model.body.half().requires_grad_(False)
    description = describe(model)
    assert [(row.name, row.kind, row.stored, row.loaded, row.computes, row.gradient) for row in description.rows] == [
        ("embed", "Embedding", "float32", "", "float32", "float32"),
        ("norm", "BatchNorm1d", "float32, int64", "", "float32", "float32"),
        ("body", "Linear", "float16", "", "float16", ""),
        ("last", "Linear", "float32", "", "float32", "float32"),
        ("head", "Linear", "float32", "", "float32", "float32"),
    ]
    assert [row.bytes for row in description.rows] == [96, 4 * 32 + 8, 144, 288, 0], "a shared tensor counts once"
    assert description.numbers == 24 + 16 + 72 + 72
    assert description.bytes == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


F32 = "float32"
SAME = (F32, F32, F32)
CASES = {
    "fp32": ("fp32", SAME, SAME),
    "tf32": (TF32MixedPrecision(emulate=True), (F32, "tf32", F32), SAME),
    "bf16": ("bf16", (F32, "bfloat16", F32), (F32, "as its input", F32)),
    "bf16, last kept": (BF16MixedPrecision(keep_fp32="last"), (F32, "bfloat16", F32), (F32, "as its input", F32)),
    "fp16_naive": ("fp16_naive", ("float16", "float16", "float16"), ("float16", "float16", "float16")),
    "int8": (Int8MixedPrecision(keep=()), (F32, "int8", F32), (F32, "as its input", F32)),
}


@pytest.mark.parametrize("case", CASES)
def test_under_a_precision_products_and_the_rest_are_told_apart(case):
    precision, product, rest = CASES[case]
    found = rows(precision)
    assert found["body"] == product
    assert found["embed"] == rest
    if case == "bf16, last kept":
        assert found["last"] == SAME
    if case == "fp16_naive":
        assert found["norm"] == ("float32, int64", F32, F32), "it is kept in float32"


def test_options_of_float32_and_models_without_a_booster_are_described_too(monkeypatch):
    monkeypatch.setattr("booster.mixed_precision.fp32.missing_on_cpu", lambda name, device: "")
    assert rows(FP32(products="bfloat16"))["body"] == (F32, "bfloat16", F32)
    naive = describe(NaiveAMPModel(Net()))
    assert {row.name: row.computes for row in naive.rows}["body"] == "float16"
    compiled = nn.Module()
    compiled._orig_mod = Net()  # as torch.compile wraps a model
    assert [row.name for row in describe(compiled).rows] == [row.name for row in describe(Net()).rows]


def test_frozen_bases_with_adapters_show_form_file_and_bytes(tmp_path):
    save_file({name: tensor.bfloat16() for name, tensor in base().state_dict().items()}, tmp_path / "w")
    model = adapted(loaded(tmp_path / "w", storage_dtype="nf4"))
    raw = {row.name: row for row in describe(model).rows}
    assert raw["blocks.0.up.base_layer"].computes == "as its input"
    model, *_ = Booster("cpu", "bf16").boost(model)
    description = describe(model)
    found = {row.name: row for row in description.rows}
    row = found["blocks.0.up.base_layer"]
    assert (row.stored, row.loaded, row.computes, row.gradient) == ("nf4, float32", "bfloat16", "bfloat16", "")
    assert (row.bytes, row.numbers) == (64 * (16 + 4) + 64 * 4, 64 * 32 + 64)
    row = found["blocks.0.up.lora_A.default"]
    assert (row.stored, row.loaded, row.computes, row.gradient) == ("float32", "", "bfloat16", "float32")
    lines = str(description).splitlines()
    assert lines[0] == (
        f"Base under BF16MixedPrecision: {description.bytes:,} bytes, "
        f"{description.bytes / description.numbers:.2f} bytes a parameter"
    )
    assert lines[1].split() == [
        "module",
        "kind",
        "stored",
        "in",
        "loaded",
        "from",
        "computes",
        "in",
        "gradient",
        "in",
        "bytes",
    ]
    assert lines[2].split() == ["embed", "Embedding", "float32", "bfloat16", "as", "its", "input", "2,048"]
