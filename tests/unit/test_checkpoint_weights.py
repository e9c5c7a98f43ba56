"""Weights alone move to other programs and back, and a run that gets a signal to stop ends in good order."""

import json
import os
import signal

import pytest
import torch
from comparing import same
from torch import nn

from booster import Booster
from booster.checkpoint import CheckpointError
from booster.checkpoint.run_checkpoints import StopRequests


def boosted(precision="bf16", seed=0, width=4):
    torch.manual_seed(seed)
    booster = Booster("cpu", precision)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    return booster, *booster.boost(model, torch.optim.AdamW(model.parameters()))[:2]


FORMS = [
    {"use_safetensors": True},
    {"use_safetensors": False},
    {"shard": True},
    {"shard": True, "use_safetensors": False, "prefix": "ema"},
]


@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_weights_come_back_as_they_were(tmp_path, precision, options):
    booster, model, _ = boosted(precision)
    booster.save_model(model, tmp_path / "weights", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    other, loaded, optimizer = boosted(precision, seed=1)
    other.load_model(loaded, tmp_path / "weights")
    assert same(model.state_dict(), loaded.state_dict())
    other.backward(loaded(torch.ones(2, 3)).float().sum() * 0, optimizer)
    optimizer.param_groups[0].update(weight_decay=0.0)
    optimizer.step()
    for name, weight in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight), "masters follow"


def test_shards_are_of_the_size_asked_for_and_the_index_names_them(tmp_path):
    booster = Booster("cpu")
    model, *_ = booster.boost(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(5))))  # 1 MB each
    booster.save_model(model, tmp_path, shard=True, size_per_shard=2, prefix="my")
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [f"my.model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)] + ["my.model.safetensors.index.json"]
    index = json.loads((tmp_path / files[-1]).read_text())
    assert index["metadata"] == {"total_size": 5 * 2**20}
    assert index["weight_map"]["4.weight"] == files[2]


def test_torch_and_safetensors_read_the_files(tmp_path):
    from safetensors.torch import load_file

    booster, model, _ = boosted()
    booster.save_model(model, tmp_path / "a.safetensors")
    booster.save_model(model, tmp_path / "b.pt", use_safetensors=False)
    assert same(load_file(tmp_path / "a.safetensors"), dict(model.state_dict()))
    assert same(torch.load(tmp_path / "b.pt", weights_only=True), dict(model.state_dict()))


def test_all_that_differs_is_listed_and_nothing_loaded(tmp_path):
    booster, model, _ = boosted(width=5)
    booster.save_model(model, tmp_path / "w")
    other, loaded, _ = boosted()
    before = {key: value.clone() for key, value in loaded.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"(?s)0.weight has shape \(5, 3\) in the file and \(4, 3\).*2.weight has shape"
    ):
        other.load_model(loaded, tmp_path / "w")
    torch.save({"0.weight": torch.zeros(4, 3), "9.weight": torch.zeros(1)}, tmp_path / "part.pt")
    with pytest.raises(CheckpointError, match=r"(?s)0.bias is not in the file.*9.weight is not in the model"):
        other.load_model(loaded, tmp_path / "part.pt")
    assert same(before, loaded.state_dict())
    other.load_model(loaded, tmp_path / "part.pt", strict=False)
    assert not loaded[0].weight.any()


@pytest.mark.parametrize(
    "content", [b"", b"no weights", b"cos\nsystem\n(S'touch pwned'\ntR."], ids=["empty", "text", "pickle"]
)
@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_what_is_no_file_of_weights_is_refused(tmp_path, name, content):
    booster, model, _ = boosted()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        booster.load_model(model, tmp_path / name)
    with pytest.raises(CheckpointError, match="neither a file of weights nor a folder"):
        booster.load_model(model, tmp_path)


def test_transformers_opens_a_saved_model(tmp_path, transformers):
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)
    booster = Booster("cpu", "bf16")
    model, *_ = booster.boost(transformers.GPT2LMHeadModel(config))
    booster.save_model(model, tmp_path, shard=True)
    opened = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    tokens = torch.arange(5)[None]
    assert torch.equal(opened.eval()(tokens).logits, booster.unwrap(model).eval()(tokens).logits)
    other, *_ = booster.boost(transformers.GPT2LMHeadModel(config))
    opened.save_pretrained(tmp_path / "theirs")  # which holds the tied head once
    booster.load_model(other, tmp_path / "theirs")
    assert torch.equal(booster.unwrap(other).eval()(tokens).logits, booster.unwrap(model).eval()(tokens).logits)


def test_timm_opens_a_saved_model(tmp_path, timm):
    make = lambda: timm.create_model("vit_tiny_patch16_224", num_classes=3, depth=1)  # noqa: E731
    booster = Booster("cpu", "bf16_naive")
    model, *_ = booster.boost(make())
    booster.save_model(model, tmp_path / "vit.safetensors")
    opened = timm.create_model(
        "vit_tiny_patch16_224", num_classes=3, depth=1, checkpoint_path=str(tmp_path / "vit.safetensors")
    )
    for name, weight in model.state_dict().items():
        assert torch.equal(opened.state_dict()[name], weight.float())


class Views(nn.Module):
    """Buffers that are views of others, with the sign or the imaginary part turned round, and of dtypes of few bits."""

    def __init__(self, seed):
        super().__init__()
        codes = torch.arange(seed, seed + 12, dtype=torch.uint8).view(3, 4)
        self.weight = nn.Parameter(torch.ones(2))
        conjugated = torch.complex(torch.full((2,), 1.0 + seed), torch.full((2,), 3.0)).conj()
        self.register_buffer("conjugated", conjugated)
        self.register_buffer("negated", conjugated.imag)
        for dtype in ("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"):
            self.register_buffer(dtype, codes.view(getattr(torch, dtype)))


def bits(tensor):
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(torch.uint8).tolist()


@pytest.mark.parametrize("form", ["run", "asynchronous", "extra", "safetensors", "torch"])
def test_conjugated_and_negated_views_and_dtypes_of_few_bits_come_back_as_they_are_read(tmp_path, form):
    booster, other = Booster("cpu"), Booster("cpu")
    (model, *_), (loaded, *_) = booster.boost(Views(0)), other.boost(Views(5))
    if form == "run":
        other.load(booster.save(tmp_path, model), loaded)
    elif form == "asynchronous":
        booster.save(tmp_path, model, async_save=True)
        booster.wait_for_save()
        other.load(tmp_path, loaded)
    elif form == "extra":
        booster.save(tmp_path, model, extra={"own": dict(model.named_buffers())})
        found = other.load(tmp_path, loaded).extra["own"]
        assert {key: bits(value) for key, value in found.items()} == {k: bits(v) for k, v in model.named_buffers()}
    else:
        booster.save_model(model, tmp_path / "weights", use_safetensors=form == "safetensors")
        other.load_model(loaded, tmp_path / "weights")
    assert {k: bits(v) for k, v in loaded.named_buffers()} == {k: bits(v) for k, v in model.named_buffers()}


def test_rows_of_numbers_of_4_bits_are_counted_in_numbers_as_the_format_does(tmp_path):
    booster = Booster("cpu")
    model, *_ = booster.boost(Views(0))
    booster.save_model(model, tmp_path / "weights")
    data = (tmp_path / "weights").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert (header["float4_e2m1fn_x2"]["dtype"], header["float4_e2m1fn_x2"]["shape"]) == ("F4", [3, 8])


class MadeOfTensors(torch.Tensor):
    """A weight without its own memory, as torchao's are."""

    @staticmethod
    def __new__(cls, inside):
        return torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)

    def __init__(self, inside):
        self.inside = inside

    def __tensor_flatten__(self):
        return ["inside"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return MadeOfTensors(inner["inside"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [arg.inside if isinstance(arg, cls) else arg for arg in args]
        result = func(*plain, **(kwargs or {}))
        return cls(result) if func is torch.ops.aten.detach.default else result


def test_a_tensor_made_of_others_is_refused_by_name_and_left_out_where_it_does_not_train(tmp_path):
    def job():
        booster, model = Booster("cpu"), nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
        model[0].weight = nn.Parameter(MadeOfTensors(torch.ones(2, 2)), requires_grad=False)
        return booster, *booster.boost(model, torch.optim.AdamW(model[1].parameters()))[:2]

    booster, model, optimizer = job()
    with pytest.raises(TypeError, match=r"0\.weight is a MadeOfTensors, .*frozen=False"):
        booster.save(tmp_path, model, optimizer)
    with pytest.raises(TypeError, match=r"0\.weight is a MadeOfTensors"):
        booster.save_model(model, tmp_path / "weights")
    assert not [*tmp_path.iterdir()]
    booster.save(tmp_path, model, optimizer, frozen=False)
    other, loaded, its_optimizer = job()
    other.load(tmp_path, loaded, its_optimizer)
    assert torch.equal(loaded[1].weight, model[1].weight)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
def test_a_sparse_buffer_is_refused_by_name_and_left_out_where_it_is_made_anew(tmp_path, layout):
    def job(persistent):
        booster, model = Booster("cpu"), nn.Linear(6, 6)
        matrix = torch.eye(6).to_sparse(layout=getattr(torch, layout))
        model.register_buffer("adjacency", matrix, persistent=persistent)
        return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]

    booster, model, optimizer = job(persistent=True)
    with pytest.raises(TypeError, match=rf"adjacency is a tensor of layout {layout}, .*persistent=False"):
        booster.save(tmp_path, model, optimizer)
    with pytest.raises(TypeError, match=rf"adjacency is a tensor of layout {layout}, .*persistent=False"):
        booster.save_model(model, tmp_path / "weights")
    assert not [*tmp_path.iterdir()]
    booster, model, optimizer = job(persistent=False)
    booster.save(tmp_path, model, optimizer)
    booster.load(tmp_path, model, optimizer)


def test_an_optimizer_and_a_scheduler_alone_come_back(tmp_path):
    booster, model, optimizer = boosted("fp16_naive")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    booster.backward(model(torch.ones(2, 3)).float().sum(), optimizer)
    optimizer.step()
    schedule.step()
    booster.save_optimizer(optimizer, tmp_path / "optimizer")
    booster.save_lr_scheduler(schedule, tmp_path / "schedule")
    other, _, loaded = boosted("fp16_naive", seed=1)
    other_schedule = torch.optim.lr_scheduler.StepLR(loaded, 1)
    other.load_optimizer(loaded, tmp_path / "optimizer")
    other.load_lr_scheduler(other_schedule, tmp_path / "schedule")
    assert other_schedule.last_epoch == 1
    assert loaded.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    first, second = (o.state_dict()["booster"]["masters"]["weights"] for o in (optimizer, loaded))
    assert same(first, second)


def test_a_signal_reaches_each_booster_that_is_there_and_none_of_the_thousands_before_them():
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)}
    theirs: list[int] = []
    try:
        signal.signal(signal.SIGUSR1, lambda number, frame: theirs.append(number))
        kept = [StopRequests(), StopRequests()]
        kept[0].listen()
        for _ in range(3000):
            StopRequests().listen()
        kept[1].listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [each.requested(None) for each in kept] == [True, True]
        assert theirs == [signal.SIGUSR1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_the_loop_to_stop(tmp_path, number):
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)}
    heard = []
    signal.signal(number, lambda *args: heard.append(args[0]))
    try:
        booster, model, optimizer = boosted()
        run = booster.resume_or_start(tmp_path, model, optimizer)
        assert (run.step, run.path) == (0, None)
        assert not booster.stop_requested()
        os.kill(os.getpid(), number)
        assert booster.stop_requested()
        assert heard == [number], "the user's own handler is called too"
        booster.save(tmp_path, model, optimizer, step=12)
        other, model, optimizer = boosted(seed=1)
        assert other.resume_or_start(tmp_path, model, optimizer).step == 12
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def test_a_folder_of_damaged_checkpoints_is_no_start(tmp_path):
    booster, model, optimizer = boosted()
    path = booster.save(tmp_path, model, optimizer, step=3)
    (path / "state.json").write_text("{}")
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        with pytest.raises(CheckpointError, match="no valid checkpoint"):
            booster.resume_or_start(tmp_path, model, optimizer)
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
