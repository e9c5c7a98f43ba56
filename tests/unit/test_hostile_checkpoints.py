"""A fuzzer of checkpoint folders: changed, sealed again, given to every reader. An error, or the right state; never between.

A failure names its seed: `spoiled(folder, random.Random(seed))` makes the same folder.
"""

import hashlib
import json
import random
import resource
import shutil
import sys
import time

import pytest
import torch
from resealed import content_of, header_and_data, seal, write_safetensors
from test_checkpoint import job, same

from booster.checkpoint import CheckpointError
from booster.checkpoint.manifest import MANIFEST, STATE
from booster.checkpoint.weights import read_weights
from booster.cli import main

ODD = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        7,
        2**31,
        2**63,
        -(2**70),
        1e308,
        0.5,
        float("1e999"),
        "",
        "x",
        "\x1b[31m",
        "\ud800",
    ),
    *(
        "float32",
        "int64",
        "../x",
        "/etc/passwd",
        "manifest.json",
        "state.json",
        [],
        {},
        [0],
        [[]],
        {"a": 1},
        [2**40, 2**40],
    ),
    *({"__booster__": "tensor", "name": "x"}, {"__booster__": "tuple", "items": [1]}, {"__booster__": "x"}),
    *({"__booster__": "dict", "items": [[[], 1]]}, {"__booster__": "dtype", "value": "nn"}, {"__booster__": "device"}),
]


def places(value, found=None):
    """All (container, key) of a JSON value."""
    found = [] if found is None else found
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], (dict, list)):
            places(value[key], found)
    return found


def edited(value, draw):
    """Change a JSON object in one to three places."""
    for _ in range(draw.choice([1, 1, 2, 3])):
        found = places(value)
        if not found:
            return
        holder, key = draw.choice(found)
        how = draw.randrange(6)
        other, other_key = draw.choice(found)
        if how == 0:
            holder[key] = json.loads(json.dumps(draw.choice(ODD)))
        elif how == 1:
            del holder[key]
        elif how == 2:
            holder[key] = json.loads(json.dumps(other[other_key]))
        elif how == 3 and isinstance(holder[key], int):
            holder[key] = holder[key] + draw.choice([-1, 1, 2**20, 2**40])
        elif how == 4 and isinstance(holder, dict):
            holder[str(draw.choice(ODD))] = holder.pop(key)
        elif isinstance(holder[key], list):
            holder[key] = holder[key] * 2


def spoiled(folder, draw):
    """Change the checkpoint in `folder` and seal it again; returns what was changed, in a word."""
    what = draw.choice(["manifest", "manifest", "state", "state", "header", "data", "swap"])
    content = content_of(folder)
    tensors = next(folder.glob("*.safetensors"))
    if what == "manifest":
        edited(content, draw)
        seal_raw(folder, content)
        return what
    if what == "state":
        tree = json.loads((folder / STATE).read_bytes())
        edited(tree, draw)
        (folder / STATE).write_text(json.dumps(tree))
    elif what == "header":
        header, data = header_and_data(tensors)
        edited(header, draw)
        write_safetensors(tensors, header, data)
    elif what == "data":
        path = folder / draw.choice([STATE, tensors.name])
        data = bytearray(path.read_bytes())
        start = draw.randrange(len(data))
        data[start : start + draw.choice([0, 1, 100])] = draw.randbytes(draw.choice([0, 1, 8]))
        path.write_bytes(data)
    else:
        tensors.write_bytes((folder / STATE).read_bytes())
    seal(folder, content)
    return what


def seal_raw(folder, content):
    """Seal what the manifest says without a look at the files."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    outer = b'{"format": "booster checkpoint", "version": 2, "sha256": "%b", "content": %b}\n'
    (folder / MANIFEST).write_bytes(outer % (hashlib.sha256(canonical).hexdigest().encode(), canonical))


def status(*argv):
    try:
        return main(["checkpoint", *map(str, argv)])
    except SystemExit as ended:
        return ended.code


def whole_state(target):
    """Copies of all that a load may change."""
    model, optimizer, _, loader, schedule = target.parts
    numbers = {f"o{i}/{k}": v for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()}
    rest = json.dumps([schedule.state_dict(), loader.state_dict(), optimizer.state_dict()["param_groups"]], default=str)
    random_states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(list(random.getstate()[1]), dtype=torch.int64),
    }
    tensors = {**target.state(), **numbers, **random_states}
    return {k: torch.as_tensor(v).clone() for k, v in tensors.items()}, rest


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory in the units of Linux")
@pytest.mark.parametrize("number", [25, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_changed_and_sealed_checkpoint_is_an_error_or_loads_and_nothing_between(tmp_path, capsys, number):
    first = job()
    first.train(2)
    clean = first.booster.save(tmp_path / "clean", *first.parts, step=1)
    root = tmp_path / "bad"
    folder = root / clean.name
    around = sorted(path.name for path in tmp_path.iterdir()) + ["bad", "out"]
    target = job(seed=1)
    target.train(1)
    target.booster.load(clean, *target.parts)  # what is imported and kept by the first load
    status("convert", clean, tmp_path / "out")
    outcomes = {"refused": 0, "loaded": 0}
    for seed in range(number):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(clean, folder)
        what = f"seed {seed}, {spoiled(folder, random.Random(seed))}"
        size = sum(path.stat().st_size for path in folder.iterdir())
        peak = memory()
        readers = {
            "load": lambda: target.booster.load(folder, *target.parts),
            "load_model": lambda: target.booster.load_model(target.parts[0], folder),
            "load_optimizer": lambda: target.booster.load_optimizer(target.parts[1], folder),
            "resume": lambda: target.booster.resume_or_start(root, *target.parts),
            "weights": lambda: list(read_weights(folder / "tensors-00000.safetensors")),
        }
        for name, read in readers.items():
            before = whole_state(target)
            began = time.process_time()
            try:
                read()
            except CheckpointError:
                outcomes["refused"] += 1
                after = whole_state(target)
                assert same(after[0], before[0]), f"{what}: {name} raised and changed something"
                assert after[1] == before[1], f"{what}: {name} raised and changed something"
            except Exception as error:
                raise AssertionError(f"{what}: {name} raised {type(error).__name__}: {error}") from error
            else:
                outcomes["loaded"] += 1
            assert time.process_time() - began < 5, f"{what}: {name}"
        for argv in (
            ["show", folder],
            ["show", "--json", folder],
            ["verify", folder],
            ["convert", folder, tmp_path / "out"],
        ):
            began = time.process_time()
            assert status(*argv) in (0, 1), f"{what}: {argv[0]}"
            assert time.process_time() - began < 5, f"{what}: {argv[0]}"
        said = capsys.readouterr()
        assert "\x1b" not in said.out + said.err, what
        assert memory() - peak <= size + 64 * 2**20, f"{what}: {memory() - peak} bytes for {size}"
        assert {path.name for path in tmp_path.iterdir()} <= {*around}, what
    assert min(outcomes.values()) > number // 20, outcomes
