"""Files from somebody who means harm: what they claim is compared with what is there before memory is taken or objects change.

Hashes are no signature, so every checkpoint here is sealed again after it was changed.
"""

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import socket
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch
from comparing import same
from programs import run
from resealed import change, content_of, header_and_data, read_weights, seal, write_safetensors
from safetensors import SafetensorError, safe_open
from test_checkpoint import job
from torch import nn

from booster import load_weights
from booster.checkpoint import CheckpointError, damage, latest
from booster.checkpoint.folder import Lock, lock_of
from booster.checkpoint.manifest import Chunk, File, Manifest, Tensor, _are_the_whole, hash_of, room_of
from booster.checkpoint.tensor_file import entries_of
from booster.cli import main
from booster.cli.hosts import read_hostfile
from booster.common.untrusted_files import json_cost, parse_json

TENSORS = "tensors-00000.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint as it was saved."""
    first = job()
    first.train(1)
    return first.booster.save(tmp_path_factory.mktemp("saved"), *first.parts, step=1)


@pytest.fixture(scope="module")
def target():
    """What every refused load leaves as it was."""
    return job(seed=1)


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "step-0000000001")


def refused(target, folder, match):
    """Assert that `folder` does not load, and changed nothing."""
    before = {key: value.clone() for key, value in target.state().items()}
    with pytest.raises(CheckpointError, match=match):
        target.booster.load(folder, *target.parts)
    assert same(target.state(), before)


def status(argv):
    """What `booster` ends with."""
    try:
        return main(argv)
    except SystemExit as ended:
        return ended.code


# ---- what the manifest claims ----

WEIGHT = "models/0/0.weight"  # of shape (16, 8), bfloat16


def chunks(*boxes):
    """Make an edit that lays chunks of 0.weight so, each taken from a whole tensor of that shape in the file."""

    def edit(content, tree):
        keys = [name for name in content["tensors"] if name != WEIGHT]
        made = [
            {"file": TENSORS, "key": key, "offsets": list(o), "sizes": list(s)}
            for key, (o, s) in zip(keys, boxes, strict=False)
        ]
        content["tensors"] = {WEIGHT: content["tensors"][WEIGHT] | {"chunks": made}}

    return edit


def claim(**changes):
    def edit(content, tree):
        content["tensors"][WEIGHT] |= changes

    return edit


def claim_of_chunk(**changes):
    def edit(content, tree):
        content["tensors"][WEIGHT]["chunks"][0] |= changes

    return edit


def one_key_twice(content, tree):
    content["tensors"]["extra/0"] = content["tensors"][WEIGHT]


def other_width(content, tree):
    content["tensors"]["models/0/1.weight"]["dtype"] = "bfloat16"


HUGE = [2**20, 2**20]
CLAIMS = {
    "a chunk twice and one part never": (chunks(((0, 0), (8, 8)), ((0, 0), (8, 8))), "each element once"),
    "chunks that overlap by a row": (chunks(((0, 0), (9, 8)), ((8, 0), (7, 8))), "each element once"),
    "chunks of equal volume next to each other": (chunks(((0, 0), (4, 8)), ((4, 0), (12, 8))), "."),
    "a gap": (chunks(((0, 0), (8, 8))), "each element once"),
    "no chunk": (chunks(), "each element once"),
    "a chunk outside": (chunks(((0, 0), (8, 8)), ((9, 0), (8, 8))), "each element once"),
    "another rank": (chunks(((0,), (128,))), "each element once"),
    "one number for all of a shape": (claim_of_chunk(key="models/0/1.num_batches_tracked"), "."),
    "another tensor of the file": (claim_of_chunk(key="models/0/1.bias"), "."),
    "a terabyte": (
        claim(shape=HUGE, chunks=[{"file": TENSORS, "key": WEIGHT, "offsets": [0, 0], "sizes": HUGE}]),
        "bytes",
    ),
    "more than addresses": (claim(shape=[2**40, 2**40]), "."),
    "a negative shape": (claim(shape=[-16, -8]), "not a list of sizes"),
    "a shape of floats": (claim(shape=[16.0, 8]), "not a list of sizes"),
    "a shape of truths": (claim(shape=[True, True]), "not a list of sizes"),
    "negative offsets": (claim_of_chunk(offsets=[-1, 0]), "not a list of sizes"),
    "a dtype of another width": (other_width, "."),
    "no dtype of numbers": (claim(dtype="nn"), "dtype"),
    "bytes of two tensors": (one_key_twice, "part of two tensors"),
    "a name that is no text": (claim_of_chunk(key=7), "key is 7, and not a text"),
    "a file outside": (claim_of_chunk(file="../../x"), "does not list"),
}


@pytest.mark.parametrize("claimed", CLAIMS)
def test_a_manifest_that_claims_what_is_not_there_is_refused_by_every_reader(claimed, folder, target, tmp_path, capsys):
    edit, match = CLAIMS[claimed]
    change(folder, edit)
    refused(target, folder, match)
    for made in (tmp_path / "one", tmp_path / "two"):
        assert (
            status(["checkpoint", "convert", str(folder), str(made), *(["--torch"] if made.name == "two" else [])]) == 1
        )
        assert not made.exists()
    assert capsys.readouterr().err.startswith("booster checkpoint: ")


def test_chunks_are_the_whole_just_if_they_cover_each_element_once():
    """All ways to lay up to three boxes into small shapes, compared with counting."""
    tried = 0
    for shape in ((5,), (3, 2), (2, 2, 2)):
        places = [range(size + 1) for size in shape]
        boxes = [
            Chunk("", "", low, tuple(h - a for a, h in zip(low, high, strict=True)))
            for low in itertools.product(*places)
            for high in itertools.product(*places)
            if all(a < h for a, h in zip(low, high, strict=True))
        ]
        ways = [way for number in (1, 2, 3) for way in itertools.combinations_with_replacement(boxes, number)]
        for way in random.Random(0).sample(ways, min(len(ways), 500)) + [(box,) for box in boxes]:
            count = torch.zeros(shape, dtype=torch.int64)
            for box in way:
                count[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
            assert _are_the_whole(shape, way) == bool((count == 1).all()), way
            tried += 1
    assert tried > 1000


def test_a_manifest_of_more_text_than_tensors_is_not_written(tmp_path):
    tensor = Tensor("float32", (1,), (Chunk(TENSORS, "x", (0,), (1,)),))
    tensors = {f"models/0/layers.{number}.weight": tensor for number in range(20_000)}
    with pytest.raises(CheckpointError, match=r"manifest.json would take \d+ bytes of memory.*keep numbers in tensors"):
        Manifest(1, 1, {}, {TENSORS: File(10**6, "0")}, tensors).dumps()
    Manifest(1, 1, {}, {TENSORS: File(10**9, "0")}, tensors).dumps()


def test_a_checkpoint_whose_lists_no_load_would_take_is_not_written(tmp_path):
    first = job()
    first.booster.save(tmp_path, *first.parts, step=1)
    with pytest.raises(CheckpointError, match=r"state.json would take \d+ bytes of memory.*keep numbers in tensors"):
        first.booster.save(tmp_path, *first.parts, step=2, extra=list(range(700_000)))
    assert first.booster.load(tmp_path, *first.parts).step == 1


# ---- sizes of the texts themselves ----


def sparse(path):
    with path.open("wb") as file:
        file.truncate(2**31)


def of_lists(path):
    path.write_bytes(b'{"content":[' + b"[]," * 1_500_000 + b"0]}")


def of_objects(path):
    path.write_bytes(b'{"content":[' + b'{"a":0},' * 400_000 + b"0]}")


def of_keys(path):
    path.write_bytes(b"{" + b",".join(b'"%d":%d' % (n, n + 10**6) for n in range(900_000)) + b"}")


def of_wide_characters(path):
    path.write_bytes(b'["\\ud83d\\ude00' + b"a" * 2 * 10**7 + b'"]')


def of_text(path):
    path.write_bytes(b'["' + b"a" * 3 * 10**7 + b'"]')


FILLS = (sparse, of_lists, of_objects, of_keys, of_wide_characters, of_text)

READ_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from booster.checkpoint import CheckpointError
from booster.checkpoint.tensor_file import entries_of
from booster.checkpoint.manifest import read_manifest
from booster.checkpoint.state_tree import read_tree
from booster.checkpoint.weight_files import weight_files
folder, size = Path(sys.argv[1]), int(sys.argv[2])
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + min(size, 2**27) + 64 * 2**20,) * 2)
try:
    if (folder / "manifest.json").exists():
        read_tree(folder, read_manifest(folder))
    elif (folder / "x.safetensors").exists():
        entries_of(folder / "x.safetensors")
    else:
        weight_files(folder)
except CheckpointError as error:
    print("refused", error)
else:
    print("read")
"""


@pytest.mark.crossed
@pytest.mark.skipif(sys.platform != "linux", reason="counts memory by /proc")
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "index.json", "header"])
def test_a_text_takes_the_size_of_the_files_and_64_mib_at_most_or_is_refused(saved, tmp_path, fill, name):
    folder = tmp_path / "folder"
    if name in ("manifest.json", "state.json"):
        shutil.copytree(saved, folder)
        fill(folder / name)
    else:
        folder.mkdir()
        path = folder / ("model.safetensors.index.json" if name == "index.json" else "x.safetensors")
        fill(path)
    if name == "header" and fill is not sparse:
        text = path.read_bytes()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
    if name == "state.json":
        content = content_of(folder)
        seal(folder, content | {"files": {}, "tensors": {}})
        sealed = content_of(folder)
        said = {"bytes": (folder / name).stat().st_size}
        said |= {"digest": hash_of((folder / name).read_bytes())} if fill is not sparse else {}
        sealed["files"] = {name: content["files"][name] | said}
        seal_without_reading(folder, sealed)
    size = sum(path.stat().st_size for path in folder.iterdir())
    ran = run("-c", READ_IN_LITTLE_MEMORY, folder, str(size))
    assert ran.returncode == 0, ran.stderr[-500:]
    assert ran.stdout.startswith("refused"), ran.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts memory by /proc")
def test_the_largest_texts_that_are_read_take_no_more(saved, tmp_path):
    """Manifest and state as large as they may be, together."""
    folder = shutil.copytree(saved, tmp_path / "folder")
    content, tree = content_of(folder), json.loads((folder / "state.json").read_bytes())
    content["tensors"] |= {
        f"x{n}": {
            "dtype": "uint8",
            "shape": [0],
            "chunks": [{"file": TENSORS, "key": f"x{n}", "offsets": [0], "sizes": [0]}],
        }
        for n in range(11_000)
    }
    tree["extra"] = [[n] for n in range(185_000)]
    (folder / "state.json").write_text(json.dumps(tree, separators=(",", ":")))
    seal(folder, content)
    for name in ("manifest.json", "state.json"):
        assert json_cost((folder / name).read_bytes()) > 0.8 * room_of(folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    ran = run("-c", READ_IN_LITTLE_MEMORY, folder, str(size))
    assert ran.returncode == 0, ran.stderr[-500:]
    assert ran.stdout.startswith("read")


def seal_without_reading(folder, content):
    text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    (folder / "manifest.json").write_bytes(
        b'{"format": "booster checkpoint", "version": 2, "sha256": "%b", "content": %b}\n'
        % (hashlib.sha256(text).hexdigest().encode(), text)
    )


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":1,"a":2}', '{"a":NaN}', "[1e999]", "[-1E999]", "\ufeff{}", '{"a":1' + "0" * 5000 + "}"],
)
def test_json_that_readers_take_differently_or_that_ends_them_is_refused(text):
    with pytest.raises(ValueError):
        parse_json(text.encode())


# ---- what is no regular file ----


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def sock(path):
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's whole path must be short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def as_folder(path):
    path.mkdir()


@pytest.mark.parametrize("kind", [pipe, device, sock, as_folder])
@pytest.mark.parametrize("name", ["manifest.json", "state.json", TENSORS])
def test_what_is_no_file_is_refused_at_once(kind, name, folder, target, capsys):
    (folder / name).unlink()
    kind(folder / name)
    done = threading.Event()

    def all_readers():
        refused(target, folder, "cannot be read|bytes|not a checkpoint|no valid|damaged")
        assert damage(folder)
        for action in ("verify", "convert"):
            with pytest.raises(SystemExit):
                raise SystemExit(
                    main(["checkpoint", action, str(folder), *([str(folder / "out")] * (action == "convert"))])
                )
        done.set()

    thread = threading.Thread(target=all_readers, daemon=True)
    thread.start()
    thread.join(240)
    assert done.is_set(), "a reader waits, or did not refuse"


@pytest.mark.parametrize("kind", [pipe, device, sock, as_folder])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
def test_weights_that_are_no_file_are_refused_at_once(kind, name, tmp_path):
    kind(tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises((CheckpointError, OSError)):
            list(read_weights(path))
        with pytest.raises((CheckpointError, OSError)):
            load_weights(nn.Linear(2, 2), path)


@pytest.mark.parametrize("kind", [pipe, device, sock, as_folder])
def test_a_hostfile_that_is_no_file_is_refused_at_once(kind, tmp_path):
    kind(tmp_path / "hosts")
    with pytest.raises(ValueError, match=r"cannot be read: .* no regular file"):
        read_hostfile(str(tmp_path / "hosts"))


# ---- headers of safetensors files ----

PLAIN = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "I64", "shape": [], "data_offsets": [16, 24]},
    "c": {"dtype": "BF16", "shape": [3, 0], "data_offsets": [24, 24]},
}
LEGAL = {"__metadata__": {"format": "pt"}, **PLAIN}


def entry(**changes):
    return json.dumps(PLAIN | {"a": PLAIN["a"] | changes}).encode()


HEADERS = {
    "offsets that are floats": entry(data_offsets=[0.0, 16.0]),
    "offsets that are truths": entry(data_offsets=[False, 16]),
    "offsets that are texts": entry(data_offsets=["0", "16"]),
    "a zero with a sign": entry(data_offsets=[0, 16]).replace(b"[0, 16]", b"[-0, 16]"),
    "negative offsets": entry(data_offsets=[-16, 0]),
    "two tensors of the same bytes": entry(data_offsets=[8, 24]),
    "a gap": json.dumps(PLAIN | {"b": PLAIN["b"] | {"data_offsets": [17, 25]}}).encode(),
    "a tail that nothing names": json.dumps({"a": PLAIN["a"]}).encode(),
    "a shape of floats": entry(shape=[2.0, 2]),
    "a negative shape": entry(shape=[-2, -2]),
    "a shape beyond all numbers": entry(shape=[2**63, 2**63]),
    "another shape": entry(shape=[2, 3]),
    "no offsets": json.dumps({"a": {"dtype": "F32", "shape": [2, 2]}}).encode(),
    "a name twice": json.dumps(PLAIN).encode()[:-1] + b"," + json.dumps(PLAIN).encode()[1:],
    "a key of an entry twice": json.dumps(PLAIN).encode().replace(b'"dtype": "I64"', b'"dtype": "I32", "dtype": "I64"'),
    "no dtype of numbers": entry(dtype="F33"),
    "a dtype that is no text": entry(dtype=["F32"]),
    "metadata of numbers": json.dumps({"__metadata__": {"a": 1}, **PLAIN}).encode(),
    "a list": b"[]",
    "two objects": json.dumps(PLAIN).encode() + b"{}",
    "NaN": entry(shape=[float("nan"), 2]),
    "no text": b"{\xff\xfe}",
    "one entry that is a list": json.dumps(PLAIN | {"a": [1]}).encode(),
}


@pytest.mark.parametrize("wrong", HEADERS)
def test_a_header_that_safetensors_refuses_is_refused_and_nothing_is_loaded(wrong, tmp_path):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, HEADERS[wrong], bytes(24))
    if wrong not in ("a name twice",):  # of which the package takes the last
        with pytest.raises(SafetensorError), safe_open(str(path), "pt"):
            pass
    with pytest.raises(CheckpointError):
        entries_of(path)
    model = nn.Module()
    model.register_parameter("a", nn.Parameter(torch.ones(2, 2)))
    for read in (lambda: load_weights(model, path), lambda: list(read_weights(path))):
        with pytest.raises(CheckpointError):
            read()
    assert torch.equal(model.a, torch.ones(2, 2))


def mutated(draw):
    """A legal header with a few changes, as text."""
    text = bytearray(json.dumps(draw.choice([PLAIN, LEGAL])).encode())
    for _ in range(draw.choice([0, 1, 1, 2])):
        place = draw.randrange(len(text))
        piece = draw.choice(
            [b"0", b"-", b".", b"1e1", b'"', b",", b"[", b"]", b"{}", b" ", b"null", b"true", b"24", b""]
        )
        text[place : place + draw.choice([0, 1, 1, 2])] = piece
    return bytes(text)


@pytest.mark.parametrize("number", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_headers_are_read_as_strictly_as_safetensors_reads_them(tmp_path, number):
    path = tmp_path / "model.safetensors"
    taken = 0
    for seed in range(number):
        header = mutated(random.Random(seed))
        write_safetensors(path, header, bytes(24))
        try:
            ours = {name: (list(e.shape), e.start) for name, e in entries_of(path).items()}
        except CheckpointError:
            continue
        taken += 1
        with safe_open(str(path), "pt") as file:  # raises where it is stricter
            assert ours.keys() == set(file.keys()), f"seed {seed}: {header!r}"
            assert all(file.get_slice(name).get_shape() == ours[name][0] for name in ours), f"seed {seed}: {header!r}"
    assert taken > number // 20


# ---- files of torch.save ----


def rewritten(path, replace=None, compression=zipfile.ZIP_STORED):
    """Pack a file of torch.save anew; replace: the pickle in it."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, replace if replace is not None and name.endswith("data.pkl") else data)


BIN = "pytorch_model.bin"


def pickled(callable_of, *arguments):
    """A pickle of {"w": callable_of(*arguments)}, of whole numbers below 2**31."""
    module, name = callable_of.split(" ")
    parts = b"".join(b"J" + number.to_bytes(4, "little") for number in arguments)
    return b"\x80\x02}X\x01\x00\x00\x00w" + f"c{module}\n{name}\n".encode() + b"(" + parts + b"tRs."


@pytest.mark.parametrize("asks", ["posix system", "builtins exec", "builtins eval"])
def test_a_file_that_asks_for_anything_but_its_tensors_is_refused(asks, tmp_path):
    torch.save({"w": torch.ones(4)}, tmp_path / BIN)
    rewritten(tmp_path / BIN, pickled(asks, 1))
    with pytest.raises(CheckpointError, match=f"is not a file of weights: .*{asks.split(' ')[1]}.*safetensors"):
        list(read_weights(tmp_path))


def test_a_compressed_file_of_weights_is_refused_before_it_is_unpacked(tmp_path):
    torch.save({"w": torch.zeros(2**20)}, tmp_path / BIN)
    rewritten(tmp_path / BIN, compression=zipfile.ZIP_DEFLATED)
    assert (tmp_path / BIN).stat().st_size < 10_000
    with pytest.raises(CheckpointError, match="compressed"):
        list(read_weights(tmp_path))


@pytest.mark.parametrize("old", [False, True])
def test_every_dtype_and_tie_of_a_file_of_torch_save_is_read(old, tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    state = {f"{dtype}": weight.to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.bool)}
    state |= {"a": nn.Parameter(weight), "b": weight.T, "c": weight[1:], "d": torch.zeros(0), "e": torch.tensor(1.0)}
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    ordered = module.state_dict()  # has an attribute, _metadata
    ordered.update(state)
    torch.save(ordered, tmp_path / BIN, _use_new_zipfile_serialization=not old)
    read = dict(read_weights(tmp_path))
    assert read.keys() == ordered.keys()
    assert all(torch.equal(read[name], value) for name, value in ordered.items())


@pytest.mark.parametrize(
    "held",
    [
        {"w": 3},
        {3: torch.ones(1)},
        [torch.ones(1)],
        {"w": torch.ones(2, 2).to_sparse()},
        {"w": torch.ones(2, device="meta")},
        7,
    ],
)
def test_a_file_of_something_else_than_tensors_by_name_is_refused(held, tmp_path):
    torch.save(held, tmp_path / BIN)
    with pytest.raises(CheckpointError):
        list(read_weights(tmp_path))


def test_the_header_of_a_whole_file_is_what_was_written(saved):
    header, _ = header_and_data(Path(saved) / TENSORS)
    header.pop("__metadata__")
    assert {name: list(e.shape) for name, e in entries_of(Path(saved) / TENSORS).items()} == {
        name: given["shape"] for name, given in header.items()
    }


# ---- names that no save gives ----

HIGHEST = 2**63 - 1
NO_STEPS = (
    f"step-{10**30}",
    f"step-{2**63}",
    "step-" + "9" * 200,
    "step-" + "\u0669" * 10,  # digits, of another script
    "step-000000000\u0661",
    "step--000000001",
    "step-1",
    "step-00000000001",
    "step-+000000001",
    "step-0000000001 ",
    "step-0000000001\n",
    "step-0000000001.replaced.replaced",
    f"step-{10**30}.replaced",
    f".step-{10**30}.writing.lock",
)


@pytest.mark.crossed
@pytest.mark.parametrize("make", ["a folder", "a checkpoint", "a file", "a link", "a link to nothing"])
@pytest.mark.parametrize("name", NO_STEPS, ids=ascii)
def test_a_name_that_no_save_gives_is_no_checkpoints(tmp_path, name, make):
    first, root = job(), tmp_path / "root"
    other = first.booster.save(tmp_path / "other", *first.parts, step=5)
    root.mkdir()
    if make == "a checkpoint":
        shutil.copytree(other, root / name)
    elif make == "a folder":
        (root / name).mkdir()
    elif make == "a file":
        (root / name).touch()
    else:
        (root / name).symlink_to(other if make == "a link" else tmp_path / "nowhere")
    if name.endswith(".lock") and make != "a folder":
        os.utime(root / name, (0, 0), follow_symlinks=False)
    assert first.booster.resume_or_start(root, *first.parts).step == 0
    for number in (0, 1):
        assert first.booster.save(root, *first.parts, keep_last=2).name == f"step-{number:010d}"
    assert latest(root).name == "step-0000000001"
    assert first.booster.load(root, *first.parts).step == 1
    assert damage(other) == []


@pytest.mark.parametrize("name", [f"step-{HIGHEST}", f".step-{HIGHEST}.writing.lock"])
def test_where_no_number_follows_the_newest_a_save_that_counts_says_so(tmp_path, name):
    first = job()
    (tmp_path / name).mkdir() if not name.endswith("lock") else (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=f"step {HIGHEST}, which no number follows; name the step"):
        first.booster.save(tmp_path, *first.parts)
    assert first.booster.save(tmp_path, *first.parts, step=3).name == "step-0000000003"


def test_a_step_that_no_manifest_holds_is_refused_at_the_call(tmp_path):
    first = job()
    with pytest.raises(ValueError, match=f"step={2**63} is not legal; it must be a whole number from 0 to {HIGHEST}"):
        first.booster.save(tmp_path, *first.parts, step=2**63)
    assert not list(tmp_path.iterdir())


# ---- links that somebody planted where a save writes ----


def planted(link, tmp_path):
    """A file of the user's that `link` leads to; returns a function that says whether it is as it was."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    os.utime(precious, (10**9, 10**9))
    link.unlink(missing_ok=True)
    link.symlink_to(precious)
    return lambda: (precious.read_text(), precious.stat().st_mtime) == ("mine", 10**9)


@pytest.mark.parametrize("when", ["check", "release", "_beat"])
def test_a_link_in_place_of_a_lock_changes_no_time_of_what_it_leads_to(tmp_path, monkeypatch, when):
    first, kept, real = job(), [], getattr(Lock, when)

    def plant(lock):
        kept.append(planted(lock_of(lock._final), tmp_path))
        return real(lock)

    monkeypatch.setattr("booster.checkpoint.folder.BEAT", 0.01)
    monkeypatch.setattr(Lock, when, plant)
    with contextlib.suppress(CheckpointError):
        first.booster.save(tmp_path / "root", *first.parts, step=1)
        time.sleep(0.1)
    assert kept[0]()


class Config:
    """As that of a model of transformers."""

    def save_pretrained(self, folder):
        (Path(folder) / "config.json").write_text("{}")


def test_a_config_is_not_written_through_a_link(tmp_path):
    model, folder = nn.Linear(2, 2), tmp_path / "folder"
    model.config = Config()
    folder.mkdir()
    kept = planted(folder / "config.json", tmp_path)
    booster = job().booster
    booster.save_model(booster.boost(model)[0], folder, shard=True)
    assert kept()
    assert (folder / "config.json").read_text() == "{}"
    assert not (folder / "config.json").is_symlink()
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
