"""A fuzzer of weight files: each is refused with the model as it was, or loads as the package safetensors reads it.

A failure names its seed: `spoiled(path, random.Random(seed))` makes the same file.
"""

import random
import resource
import sys
import time

import pytest
import torch
from resealed import header_and_data, write_safetensors
from safetensors.torch import load_file, save_file
from test_hostile_checkpoints import edited
from test_load_weights import net, saved

from booster import Booster, load_weights
from booster.checkpoint import CheckpointError


def spoiled(path, draw):
    """Change a file of clean weights: its header, or bytes of it."""
    saved(net(), path)
    if draw.randrange(3):
        header, data = header_and_data(path)
        edited(header, draw)
        write_safetensors(path, header, data)
        return
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data))
    data[start : start + draw.choice([0, 1, 8])] = draw.randbytes(draw.choice([0, 1, 8]))
    path.write_bytes(data)


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(a, b):
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(bits(a[name]), bits(b[name])) for name in a
    )


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory in the units of Linux")
@pytest.mark.parametrize("number", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_changed_weights_are_refused_with_nothing_touched_or_load_as_safetensors_reads_them(tmp_path, number):
    path, booster = tmp_path / "w.safetensors", Booster("cpu")
    readers = {
        "load_weights": lambda model: load_weights(model, path),
        "packed": lambda model: load_weights(model, path, storage_dtype="int8"),
        "load_model": lambda model: booster.load_model(booster.boost(model)[0], path),
    }
    outcomes = {"refused": 0, "loaded": 0}
    for seed in range(number):
        spoiled(path, random.Random(seed))
        for name, read in readers.items():
            model = net(seed=1)
            before, peak, began = state(model), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
            what = f"seed {seed}: {name}"
            try:
                read(model)
            except CheckpointError:
                outcomes["refused"] += 1
                assert same_bits(state(model), before), f"{what} raised and changed something"
            except Exception as error:
                raise AssertionError(f"{what} raised {type(error).__name__}: {error}") from error
            else:
                outcomes["loaded"] += 1
                says = load_file(path)
                now = {key: tensor for key, tensor in state(model).items() if key in says}
                if name != "packed":
                    for key, tensor in now.items():
                        wide = says[key].to(tensor.dtype)
                        assert torch.equal(bits(tensor), bits(wide)), f"{what} {key}"
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 64 * 2**10, what
            assert time.process_time() - began < 5, what
    assert min(outcomes.values()) > number // 10, outcomes


def test_a_warning_that_names_what_a_file_holds_is_printable(tmp_path, caplog):
    path, booster = tmp_path / "w.safetensors", Booster("cpu")
    save_file({**load_file(saved(net(), path)), "\x1b[31m": torch.zeros(1)}, path)
    booster.load_model(booster.boost(net())[0], path, strict=False)
    assert "\\x1b[31m" in caplog.text
    assert "\x1b" not in caplog.text
