"""A fuzzer of weight files: each is refused with the model as it was, or loads as the program that writes such files reads it.

A failure names its seed: `KINDS[kind](path, random.Random(seed))` makes the same file.
"""

import json
import os
import random
import resource
import shutil
import sys
import time

import pytest
import torch
from poisoned import memory_that_holds
from resealed import content_of, header_and_data, read_weights, seal, write_safetensors
from safetensors.torch import load_file, save_file
from test_hostile_checkpoints import edited
from test_load_weights import net, on_meta, saved

from booster import Booster, load_weights
from booster.checkpoint import CheckpointError, streaming, tensor_file, weight_files
from booster.cli import main


def one_file(path, draw):
    """A safetensors file, changed in its header or its bytes."""
    path = path / "model.safetensors"
    saved(net(), path)
    if draw.randrange(3):
        header, data = header_and_data(path)
        edited(header, draw)
        write_safetensors(path, header, data)
    else:
        spoil(path, draw)


def shards(path, draw):
    """Two safetensors files with an index, of which the index or one file is changed."""
    state = load_file(saved(net(), path / "all"))
    (path / "all").unlink()
    names = sorted(state)
    where = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: state[name] for name in names if where[name] == file}, path / file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in state.values())}, "weight_map": where}
    how, file = draw.randrange(4), path / draw.choice(sorted(set(where.values())))
    if how < 2:
        edited(index, draw)
    elif how == 2:
        header, data = header_and_data(file)
        edited(header, draw)
        write_safetensors(file, header, data)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    if how == 3:
        spoil(draw.choice([file, path / "model.safetensors.index.json"]), draw)


def changed(data, draw):
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 3])):
        start = draw.randrange(len(data) or 1)
        data[start : start + draw.choice([0, 1, 8])] = draw.randbytes(draw.choice([0, 1, 8]))
    return bytes(data)


def spoil(path, draw):
    path.write_bytes(changed(path.read_bytes(), draw))


KINDS = {"one": one_file, "shards": shards}


def said_by(path):
    """What the programs that write such files read from those in a folder."""
    indices = list(path.glob("*.index.json"))
    if indices:
        files = [path / name for name in sorted(set(json.loads(indices[0].read_bytes())["weight_map"].values()))]
    else:
        files = list(path.iterdir())
    said = {}
    for file in files:
        own = load_file(file)
        assert not own.keys() & said.keys()
        said |= own
    return said


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(a, b):
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(bits(a[name]), bits(b[name])) for name in a
    )


@pytest.mark.slow_cases("one-20")
@pytest.mark.skipif(sys.platform != "linux", reason="counts memory in the units of Linux")
@pytest.mark.crossed
@pytest.mark.parametrize("number", [20, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_changed_weights_are_refused_with_nothing_touched_or_load_as_others_read_them(tmp_path, kind, number):
    path, booster = tmp_path / "weights", Booster("cpu")
    readers = {
        "load_weights": lambda model: load_weights(model, path),
        "packed": lambda model: load_weights(model, path, storage_dtype="int8"),
        "load_model": lambda model: booster.load_model(booster.boost(model)[0], path),
    }
    outcomes = {"refused": 0, "loaded": 0}
    for seed in range(number):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        KINDS[kind](path, random.Random(seed))
        for name, read in readers.items():
            model = net(seed=1)
            before, peak, began = state(model), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
            what = f"seed {seed}: {name}"
            try:
                with memory_that_holds(0x5A):
                    read(model)
            except CheckpointError as error:
                outcomes["refused"] += 1
                refusal = str(error)
                assert same_bits(state(model), before), f"{what} raised and changed something"
            except Exception as error:
                raise AssertionError(f"{what} raised {type(error).__name__}: {error}") from error
            else:
                refusal = ""
                outcomes["loaded"] += 1
                with memory_that_holds(0xA5):
                    says = said_by(path)
                now = {key: tensor for key, tensor in state(model).items() if key in says}
                if name != "packed":
                    for key, tensor in now.items():
                        wide = says[key].to(tensor.dtype)
                        assert torch.equal(bits(tensor), bits(wide)), f"{what} {key}"
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 64 * 2**10, what
            assert all(line.isprintable() for line in refusal.split("\n")), what
            assert time.process_time() - began < 60, what
    assert min(outcomes.values()) > number // 20, outcomes


def test_a_warning_that_names_what_a_file_holds_is_printable(tmp_path, caplog):
    path, booster = tmp_path / "w.safetensors", Booster("cpu")
    save_file({**load_file(saved(net(), path)), "\x1b[31m": torch.zeros(1)}, path)
    booster.load_model(booster.boost(net())[0], path, strict=False)
    assert "\\x1b[31m" in caplog.text
    assert "\x1b" not in caplog.text


# ---- two names of one tensor of the model ----

DIFFER = r"head.weight and embed.weight are one tensor in the model, and differ in the"


def untied(precision="fp32"):
    """A model with numbers of their own in embedding and head, boosted."""
    return Booster("cpu", precision).boost(net(tied=False))[0]


def written(kind, path):
    booster, model = Booster("cpu"), untied()
    if kind == "checkpoint":
        return booster.save(path, model, step=1)
    if kind == "bin":
        torch.save(dict(model.state_dict()), path)
        return path
    booster.save_model(model, path, shard=kind == "shards")
    return path


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive", "fp16"])
@pytest.mark.parametrize("kind", ["checkpoint", "bin", "file", "shards"])
def test_names_of_one_tensor_whose_numbers_differ_in_a_file_are_refused(tmp_path, kind, precision):
    path = written(kind, tmp_path / "weights")
    booster = Booster("cpu", precision)
    model, *_ = booster.boost(net(seed=1))
    before = state(model)
    readers = [lambda: booster.load_model(model, path)]
    if kind == "checkpoint":
        readers.append(lambda: booster.load(path.parent, model))
    elif kind != "bin":
        readers.append(lambda: load_weights(model.unwrap(), path, storage_dtype=model.unwrap().embed.weight.dtype))
    for read in readers:
        with pytest.raises(CheckpointError, match=DIFFER):
            read()
        assert same_bits(state(model), before)


# ---- a file that another process changes while it is read ----


def cut_while_read(monkeypatch, module, path, entries):
    """Have the file at `path` end in its middle once `entries` of its tensors were read through `module`."""
    read, left = module.read_entry, [entries]

    def reading(opened, entry, *more):
        if not left[0]:
            os.truncate(path, 8 + entry.start)
        left[0] -= 1
        return read(opened, entry, *more)

    monkeypatch.setattr(module, "read_entry", reading)


@pytest.mark.parametrize("storage", [None, "int8", torch.bfloat16])
@pytest.mark.parametrize("make", [lambda: net(seed=1, width=64), lambda: on_meta(width=64)], ids=["real", "meta"])
def test_a_file_that_is_cut_short_while_it_is_read_leaves_the_model_as_it_was(tmp_path, monkeypatch, make, storage):
    path, model = saved(net(width=64), tmp_path / "w.safetensors"), make()
    before = state(model)
    modules = {name: (type(module), vars(module).keys()) for name, module in model.named_modules()}
    tensors = {name: (p, p.dtype, p.device) for name, p in model.named_parameters()}
    new = storage == "int8" or next(model.parameters()).is_meta
    cut_while_read(monkeypatch, streaming, path, 1 if new else 3)
    with pytest.raises(
        CheckpointError, match="ended while" + ("" if new else r".*weights of this model hold parts of it")
    ):
        load_weights(model, path, storage_dtype=storage, device="cpu")
    if not new:
        return
    assert {name: (type(module), vars(module).keys()) for name, module in model.named_modules()} == modules
    assert {name: (p, p.dtype, p.device) for name, p in model.named_parameters()} == tensors
    assert any(p.is_meta for p in model.parameters()) or same_bits(state(model), before)


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_a_boosted_model_is_as_it_was_or_told_where_its_file_is_cut_short_while_it_is_read(
    tmp_path, monkeypatch, precision
):
    path, booster = saved(net(width=64), tmp_path / "w.safetensors"), Booster("cpu", precision)
    raw = net(seed=1, width=64)
    model, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    before = state(model)
    new = precision == "bf16_naive"  # what masters take over is read before anything is touched
    cut_while_read(monkeypatch, tensor_file, path, 1 if new else 3)
    with pytest.raises(
        CheckpointError, match="ended while" if new else "ended while.*weights of this model hold parts"
    ):
        booster.load_model(model, path)
    assert same_bits(state(model), before) == new


@pytest.mark.parametrize("when", ["compared", "read"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["load_model", "load_weights"])
def test_a_file_that_is_replaced_by_another_of_its_form_is_told(tmp_path, monkeypatch, when, by_hand):
    path, model = saved(net(width=64), tmp_path / "w.safetensors"), net(seed=1, width=64)
    booster, module = Booster("cpu"), streaming if by_hand else tensor_file
    boosted = None if by_hand else booster.boost(model)[0]
    before, left = state(model), [1 if when == "read" else 0]

    def replacing(real):
        def call(*args):
            found = real(*args)
            if not left[0]:
                saved(net(seed=2, width=64), tmp_path / "other").replace(path)
            left[0] -= 1
            return found

        return call

    if when == "read":
        monkeypatch.setattr(module, "read_entry", replacing(module.read_entry))
    else:
        place = streaming if by_hand else weight_files
        monkeypatch.setattr(place, "entries_of", replacing(place.entries_of))
    with pytest.raises(CheckpointError, match="replaced or written to" + ".*hold parts of it" * (when == "read")):
        load_weights(model, path) if by_hand else booster.load_model(boosted, path)
    assert same_bits(state(model), before) == (when == "compared")


# ---- what a checkpoint is converted to ----


class Wide(torch.nn.Module):
    """A model of many small tensors."""

    def __init__(self, number):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.full((3,), float(n))) for n in range(number)])


def test_a_conversion_reads_the_header_of_a_file_once(tmp_path, monkeypatch):
    booster, looked = Booster("cpu"), []
    model, *_ = booster.boost(Wide(50))
    folder = booster.save(tmp_path, model, step=1)
    real = tensor_file.entries_of
    monkeypatch.setattr(tensor_file, "entries_of", lambda file: looked.append(file.name) or real(file))
    for options in ([], ["--torch"], ["--shard", "1"]):
        out = tmp_path / f"out{len(options)}{''.join(options[:1])}"
        assert main(["checkpoint", "convert", *options, str(folder), str(out)]) == 0
        assert looked == ["tensors-00000.safetensors"]
        looked.clear()
        read = dict(read_weights(out))
        looked.clear()
        assert read["weights.7"].tolist() == [7.0] * 3
        assert len(read) == 50


def test_a_checkpoint_that_is_cut_short_while_it_is_converted_is_an_error_and_writes_nothing(
    tmp_path, monkeypatch, capsys
):
    booster = Booster("cpu")
    model, *_ = booster.boost(net(width=64))
    folder = booster.save(tmp_path, model, step=1)
    cut_while_read(monkeypatch, tensor_file, folder / "tensors-00000.safetensors", 2)
    assert main(["checkpoint", "convert", str(folder), str(tmp_path / "out")]) == 1
    assert "ended while" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def load_model(model, path):
    booster = Booster("cpu")
    booster.load_model(booster.boost(model)[0], path)


@pytest.mark.parametrize("read", [load_weights, load_model])
def test_an_error_names_what_a_file_holds_as_a_terminal_may_show_it(tmp_path, read):
    path = tmp_path / "w.safetensors"
    save_file({"\x1b]0;pwned\x07": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError) as raised:
        read(net(), path)
    assert all(line.isprintable() for line in str(raised.value).split("\n"))
    assert "\\x1b]0;pwned\\x07" in str(raised.value)


# ---- a checkpoint of parts, which another process cuts short while they are read ----


def in_columns(folder):
    """Lay the weight of the checkpoint's linear layer out in two chunks of columns, as ranks of tensor parallelism have it."""
    (path,), name, content = folder.glob("*.safetensors"), "models/0/weight", content_of(folder)
    tensors = load_file(path)
    whole = tensors.pop(name)
    parts = {f"{name}@0,{start}": whole[:, start : start + 3].contiguous() for start in range(0, whole.shape[1], 3)}
    save_file({**tensors, **parts}, path)
    content["tensors"][name]["chunks"] = [
        {"file": path.name, "key": key, "offsets": [0, int(key.rpartition(",")[2])], "sizes": list(part.shape)}
        for key, part in parts.items()
    ]
    seal(folder, content)


def test_chunks_of_columns_are_put_together_and_one_that_is_cut_short_is_an_error_and_ends_no_process(
    tmp_path, monkeypatch
):
    booster = Booster("cpu")
    (source, *_), (model, *_) = (booster.boost(torch.nn.Linear(8, 1000)) for _ in "ab")
    folder = booster.save(tmp_path, source, step=1)
    in_columns(folder)
    booster.load(folder, model)
    assert same_bits(state(model), state(source))
    (path,), real = folder.glob("*.safetensors"), tensor_file.pieces

    def cut(*args):
        os.truncate(path, 4096)
        return real(*args)

    monkeypatch.setattr(tensor_file, "pieces", cut)
    with pytest.raises(CheckpointError, match="safetensors ended while models/0/weight"):
        booster.load(folder, booster.boost(torch.nn.Linear(8, 1000))[0])
