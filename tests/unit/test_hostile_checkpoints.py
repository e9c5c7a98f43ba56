"""A fuzzer of checkpoint folders: changed, sealed again, given to every reader. An error, or the state that they say.

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
from checkpoint_oracle import SavedContent, different, snapshot, wrong_after
from poisoned import memory_that_holds
from resealed import change, content_of, header_and_data, read_weights, seal, write_safetensors
from test_checkpoint import job

from booster.checkpoint import CheckpointError
from booster.checkpoint.manifest import MANIFEST, STATE
from booster.cli import main
from booster.common.snapshot import random_state, set_random_state
from booster.interface.scheduler import known_state

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


JOBS = ("bf16_naive", "fp16", "fp16_naive")


WRITTEN = {"out": [], "wide": ["--masters"], "out.bin": ["--torch"], "shards": ["--shard", "1"]}


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def converted(saved, masters):
    """What `convert` should write of the model."""
    names = [name for name in saved.tensors if name.startswith("models/0/")]
    behind = saved.behind() if masters else {}
    return {name[9:]: saved.tensor(behind.get(name[9:], name)) for name in names}


def converts(folder, around):
    """Convert a checkpoint in each way, and return what was written by those that did not refuse it."""
    found = []
    for name, options in WRITTEN.items():
        target = around / name
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        ended = status("convert", *options, folder, target)
        assert ended in (0, 1), options
        assert ended == 0 or not target.exists() or not list(target.iterdir()), options
        if ended == 0:
            found.append(("--masters" in options, dict(read_weights(target))))
    return found


class Readers:
    """Jobs of some precisions, each with a clean checkpoint, and all readers of a folder that was spoiled."""

    def __init__(self, around):
        self.around, self.root = around, around / "bad"
        self.clean, self.targets = {}, {}
        self.refused = self.loaded = 0
        for precision in JOBS:
            first = job(precision)
            first.train(2)
            self.clean[precision] = first.booster.save(around / precision, *first.parts, step=1)
            self.make(precision)
            converts(self.clean[precision], around)

    def make(self, precision):
        """Make a job that has loaded the clean checkpoint."""
        self.targets[precision] = target = job(precision, seed=1)
        target.train(1)
        target.booster.load(self.clean[precision], *target.parts)

    def faults(self, seed):
        """Spoil a checkpoint by `seed`, give it to every reader, and yield what went wrong."""
        precision = JOBS[seed % len(JOBS)]
        folder = self.root / self.clean[precision].name
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.clean[precision], folder)
        spoiled(folder, random.Random(seed))
        size = sum(path.stat().st_size for path in folder.iterdir())
        peak = memory()
        for name in ("load", "load_model", "load_optimizer", "resume", "show", "show --json", "verify", "convert"):
            began = time.process_time()
            read = self.command if name.startswith(("show", "verify", "convert")) else self.load
            with memory_that_holds(0x5A):  # of which nothing is in what loads
                found = list(read(name, precision, folder))
            yield from (f"{name}: {fault}" for fault in found)
            if time.process_time() - began > 60:
                yield f"{name} took {time.process_time() - began} s"
        if memory() - peak > size + 64 * 2**20:
            yield f"{memory() - peak} bytes for {size}"
        if outside := {path.name for path in self.around.iterdir()} - {*JOBS, "bad", *WRITTEN}:
            yield f"wrote {outside}"

    def load(self, name, precision, folder):
        target = self.targets[precision]
        booster, (model, optimizer, *_) = target.booster, target.parts
        before, loaded = snapshot(target), None
        try:
            if name == "load":
                loaded = booster.load(folder, *target.parts)
            elif name == "resume":
                loaded = booster.resume_or_start(folder.parent, *target.parts)
            elif name == "load_model":
                booster.load_model(model, folder)
            else:
                booster.load_optimizer(optimizer, folder)
        except CheckpointError as error:
            self.refused += 1
            if not all(line.isprintable() for line in str(error).split("\n")):
                yield f"raised what is not printable: {error!r}"
            yield from (f"raised, and {fault}" for fault in different(snapshot(target), before))
            return
        except Exception as error:
            yield f"raised {error!r}"
            return
        self.loaded += 1
        saved = SavedContent(folder)
        yield from wrong_after(name.replace("resume", "load"), saved, before, snapshot(target))
        if loaded is not None:
            given = {"step": loaded.step, "path": loaded.path, "extra": loaded.extra}
            yield from different(given, {"step": saved.step, "path": folder, "extra": saved.extra})
        try:
            target.train(1)
        except Exception as error:
            yield f"loaded what no step can be taken with: {error!r}"
        self.make(precision)  # nothing of what was loaded is left

    def command(self, name, precision, folder):
        if name == "convert":
            for masters, written in converts(folder, self.around):
                yield from different(written, converted(SavedContent(folder), masters))
        elif (ended := status(*name.split(), folder)) not in (0, 1):
            yield f"ended with {ended}"


# A part of the seeds runs in seconds; all of them together are the 5,000 that the readers are held to.
PARTS = [(*range(11), 4052), *(pytest.param(range(n, n + 250), marks=pytest.mark.slow) for n in range(0, 5000, 250))]


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory in the units of Linux")
@pytest.mark.parametrize("seeds", PARTS, ids=str)
def test_a_changed_and_sealed_checkpoint_is_an_error_or_loads_as_it_says_and_nothing_between(tmp_path, capsys, seeds):
    readers, faults = Readers(tmp_path), []
    for seed in seeds:
        faults += [f"seed {seed}: {fault}" for fault in readers.faults(seed)]
        said = capsys.readouterr()
        if "\x1b" in said.out + said.err:
            faults.append(f"seed {seed} wrote to the terminal what is not printable")
    assert not faults, "\n".join(faults)
    assert min(readers.refused, readers.loaded) > len(seeds) // 20


# ---- what loaded without a word, and was not what the checkpoint says ----

MASTER = {"__booster__": "tensor", "name": "optimizers/0/booster/masters/weights/0.weight"}


def own(tree):
    return tree["optimizers"]["0"]


def in_masters(**entries):
    return lambda tree: own(tree)["booster"]["masters"]["weights"].update({"0.weight": MASTER} | entries)


def without_master(tree):
    del own(tree)["booster"]["masters"]["weights"]["0.weight"]


def in_random(kind, key, tensor):
    def edit(tree):
        tree["random"][0][kind][key] = {"__booster__": "tensor", "name": tensor}

    return edit


def in_schedule(*lost, **entries):
    def edit(tree):
        schedule = tree["lr_schedulers"]["0"]
        schedule.update(entries)
        for name in lost:
            del schedule[name]

    return edit


def of_step(value):
    return lambda tree: own(tree)["state"]["0.bias"].update(step=value)


SAID_WRONG = {
    "a master that is no reference": (in_masters(**{"0.weight": None}), "master of 0.weight"),
    "a master that refers to no name": (in_masters(**{"0.weight": {"__booster__": "tensor"}}), "no name"),
    "a master that is not there": (in_masters(**{"0.weight": MASTER | {"name": "x"}}), "."),
    "a master of another parameter": (in_masters(**{"0.bias": MASTER}), "."),
    "a master of no parameter": (in_masters(x=MASTER), r"\['x'\], and none of its groups"),
    "a master that is listed and not kept": (without_master, "it has a master"),
    "a master behind no weight": (lambda tree: tree["masters"].update(x=MASTER["name"]), "it has a master"),
    "states of no parameter": (lambda tree: own(tree)["state"].update(x=own(tree)["state"].pop("0.bias")), r"\['x'\]"),
    "a step of a whole parameter's shape": (
        of_step({"__booster__": "tensor", "name": "models/0/0.bias"}),
        "one finite",
    ),
    "a step that is text": (of_step("x"), "one finite number"),
    "a step below zero": (of_step(-1), "one finite number"),
    "a step that never ends": (of_step({"__booster__": "float", "value": "inf"}), "one finite number"),
    "a schedule without its place": (in_schedule("last_epoch"), "lacks .'last_epoch'.*where it is"),
    "a schedule without its rates": (in_schedule("_last_lr"), "lacks .'_last_lr'.*where it is"),
    "half an epoch": (lambda tree: tree["dataloaders"]["0"].update(epoch=0.5), "whole numbers"),
    "an epoch in words": (lambda tree: tree["dataloaders"]["0"].update(epoch="1"), "whole numbers"),
    "words of python that are cut": (in_random("python", "words", "models/0/1.num_batches_tracked"), "."),
    "bytes of torch that are cut": (
        lambda tree: tree["random"][0].update(torch=tree["random"][0]["python"]["words"]),
        "bytes",
    ),
}


@pytest.mark.parametrize("wrong", SAID_WRONG)
def test_what_would_load_as_something_else_than_is_said_is_refused(tmp_path, wrong):
    first, target = job("bf16_naive"), job("bf16_naive", seed=1)
    first.train(2)
    folder = first.booster.save(tmp_path, *first.parts, step=1)
    edit, match = SAID_WRONG[wrong]
    change(folder, lambda content, tree: edit(tree))
    before = snapshot(target)
    with pytest.raises(CheckpointError, match=match):
        target.booster.load(folder, *target.parts)
    assert not list(different(snapshot(target), before))


@pytest.mark.parametrize("kind", ["python", "numpy"])
@pytest.mark.parametrize("word", [-1, 2**32])
def test_words_of_generators_that_would_be_cut_to_their_width_are_refused(kind, word):
    pytest.importorskip("numpy")
    state = random_state()
    state[kind]["words"][3] = word
    with pytest.raises(ValueError, match="not all of 32 bits"):
        set_random_state(state)


def test_what_a_schedule_does_not_know_is_left_out_with_a_warning(tmp_path, caplog):
    first, target = job("fp32"), job("fp32", seed=1)
    first.train(2)
    folder = first.booster.save(tmp_path, *first.parts, step=1)
    change(folder, lambda content, tree: tree["lr_schedulers"]["0"].update(verbose=False, _of_later=[1]))
    target.booster.load(folder, *target.parts)
    assert target.parts[4].state_dict() == first.parts[4].state_dict()
    assert "['_of_later', 'verbose'], which this one does not know" in caplog.text
    caplog.clear()
    target.parts[4].load_state_dict(first.parts[4].state_dict() | {"verbose": True})
    assert target.parts[4].state_dict() == first.parts[4].state_dict()
    assert "['verbose'], which this one does not know" in caplog.text


class Warmup(torch.optim.lr_scheduler.LambdaLR):
    """A schedule of the user's that keeps more as it goes on."""

    def step(self, *args):
        super().step(*args)
        self.seen = self.last_epoch


def test_a_schedule_of_the_users_keeps_what_it_alone_knows():
    schedules = [Warmup(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), lambda step: 1.0) for _ in "ab"]
    del schedules[1].seen
    state, left_out = known_state(schedules[1], schedules[0].state_dict())
    assert "seen" in state
    assert not left_out
