"""Files of torch.save whose pickles or archives mean harm: time and memory go by the file, and all readers see one archive."""

import io
import pickletools
import resource
import struct
import sys
import time
import zipfile

import pytest
import torch
from test_hostile_files import BIN, pickled, rewritten

from booster.checkpoint import CheckpointError
from booster.checkpoint.weights import read_weights


def legacy(path, ahead):
    """A file of the form before archives, of which the pickle of tensors begins with the instructions `ahead`."""
    torch.save({"w": torch.ones(4)}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    path.write_bytes(data[: end_of_head(data)] + b"\x80\x02" + ahead + data[end_of_head(data) + 2 :])


def archive(path, ahead):
    torch.save({"w": torch.ones(4)}, path)
    with zipfile.ZipFile(path) as opened:
        (own,) = (opened.read(name) for name in opened.namelist() if name.endswith("data.pkl"))
    rewritten(path, b"\x80\x02" + ahead + own[2:])


def end_of_head(data):
    """Where the pickle of tensors begins in a file of the form before archives."""
    stream = io.BytesIO(data)
    for _ in range(3):
        list(pickletools.genops(stream))
    return stream.tell()


INSTRUCTIONS = {
    "entries of the memo": (archive, b"".join(b"Nr" + struct.pack("<I", number) for number in range(500_000))),
    "dicts": (legacy, b"}" * 1_000_000),
    "tuples over a deep stack": (archive, b"N" * 500_000 + b"(t0" * 200_000),
    "ordered dicts": (legacy, b"ccollections\nOrderedDict\nq\x00" + b"h\x00)R" * 500_000),
}


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory in the units of Linux")
@pytest.mark.parametrize("kind", INSTRUCTIONS)
def test_what_a_pickle_makes_takes_the_file_and_64_mib_at_most_and_seconds(kind, tmp_path):
    write, instructions = INSTRUCTIONS[kind]
    write(tmp_path / BIN, instructions)
    size, peak = (tmp_path / BIN).stat().st_size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with pytest.raises(CheckpointError, match=r"would take over|takes more than there is|Weights only load"):
        list(read_weights(tmp_path))
    assert time.process_time() - began < 5
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) < size + 64 * 2**20


@pytest.mark.parametrize("old", [False, True])
def test_many_small_tensors_are_within_what_a_pickle_may_take(old, tmp_path):
    state = {f"model.layers.{number}.weight": torch.full((4,), float(number)) for number in range(3000)}
    torch.save(state, tmp_path / BIN, _use_new_zipfile_serialization=not old)
    assert {name: value.tolist() for name, value in read_weights(tmp_path)} == {
        name: value.tolist() for name, value in state.items()
    }


@pytest.mark.parametrize("asks", [pickled("builtins bytearray", 2**28), pickled("torch FloatTensor", 1000)])
def test_an_archive_at_the_end_of_an_older_file_does_not_hide_its_pickle(asks, tmp_path):
    torch.save({"w": torch.ones(4)}, tmp_path / "good")
    torch.save({"w": torch.ones(4)}, tmp_path / BIN, _use_new_zipfile_serialization=False)
    data = (tmp_path / BIN).read_bytes()
    (tmp_path / BIN).write_bytes(data[: end_of_head(data)] + asks + b"\x80\x02]." + (tmp_path / "good").read_bytes())
    assert zipfile.is_zipfile(tmp_path / BIN)
    assert "w" in torch.load(tmp_path / BIN, weights_only=True), "torch takes it for an older one"
    with pytest.raises(CheckpointError, match="weights need no such thing"):
        list(read_weights(tmp_path / BIN))


def two_directories(path, *, large):
    """An archive whose end names the directory of one, while the one that lies before its end is another's."""
    evil, good = path.with_name("evil"), path.with_name("good")
    for each in (evil, good):
        torch.save({"w": torch.ones(4)}, each)
    with zipfile.ZipFile(good) as opened:
        (own,) = (opened.read(name) for name in opened.namelist() if name.endswith("data.pkl"))
    rewritten(evil, pickled("torch FloatTensor", 1000).ljust(len(own), b"\0"))
    rewritten(good, own)
    good.write_bytes(good.read_bytes().replace(b"good/", b"evil/"))
    data, tail = evil.read_bytes(), good.read_bytes()
    length, start = struct.unpack("<LL", data[-10:-2])  # where torch looks
    if not large:
        path.write_bytes(data[:-22] + tail[:-22] + tail[-22:-10] + struct.pack("<LL", length, start) + b"\0\0")
        return
    entries = struct.unpack("<H", tail[-12:-10])[0]
    ends = [
        struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, entries, entries, length, at)
        for at in (start, struct.unpack("<L", tail[-6:-2])[0])
    ]
    told = len(data) - 22  # the place of the first of them, and not of the one that lies before the locator
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, told, 1)
    path.write_bytes(data[:-22] + ends[0] + tail[:-22] + ends[1] + locator + tail[-22:])


@pytest.mark.parametrize("large", [False, True])
def test_an_archive_with_two_directories_is_refused(large, tmp_path):
    two_directories(tmp_path / BIN, large=large)
    with zipfile.ZipFile(tmp_path / BIN) as opened:
        names = [name for name in opened.namelist() if name.endswith("data.pkl")]
        assert b"FloatTensor" not in b"".join(map(opened.read, names)), "python looks at the good one"
    assert torch.load(tmp_path / BIN, weights_only=True)["w"].shape == (1000,), "torch at the other"
    with pytest.raises(CheckpointError, match="two ends|does not end with its directory"):
        list(read_weights(tmp_path / BIN))


@pytest.mark.parametrize("more", ["before", "behind", "a comment"])
def test_an_archive_that_is_not_the_whole_file_is_refused(more, tmp_path):
    torch.save({"w": torch.ones(4)}, tmp_path / BIN)
    data = (tmp_path / BIN).read_bytes()
    other = {"before": data * 2, "behind": data + b"x", "a comment": data[:-2] + b"\x01\x00x"}[more]
    (tmp_path / BIN).write_bytes(other)
    with pytest.raises(CheckpointError, match="two ends|does not end with its directory"):
        list(read_weights(tmp_path / BIN))
