"""Files of torch.save whose pickles or archives mean harm: time and memory go by the file, and all readers see one archive."""

import io
import pickletools
import resource
import struct
import sys
import time
import zipfile
from collections import OrderedDict

import pytest
import torch
from resealed import read_weights
from test_hostile_files import BIN, pickled, rewritten

from booster.checkpoint import CheckpointError


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
    "tuples over a deep stack": (archive, b"N" * 500_000 + b"(t" * 300_000),
    "ordered dicts": (legacy, b"ccollections\nOrderedDict\nq\x00" + b"h\x00)R" * 500_000),
    "dicts of one list of pairs": (
        archive,
        b"]("
        + b"".join(b"](X\x05\0\0\0%05xNe" % n for n in range(20_000))
        + b"e\x85q\x01ccollections\nOrderedDict\nq\x02"
        b"h\x01R" + b"h\x02h\x01R" * 3000,
    ),
    "a long text": (legacy, b"X" + struct.pack("<I", 10**8) + b"\xf0\x9f\x98\x80" + b"a" * 10**8),
}


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory in the units of Linux")
@pytest.mark.parametrize("kind", INSTRUCTIONS)
def test_what_a_pickle_makes_takes_the_file_and_64_mib_at_most_and_seconds(kind, tmp_path):
    write, instructions = INSTRUCTIONS[kind]
    write(tmp_path / BIN, instructions)
    size, peak = (tmp_path / BIN).stat().st_size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with pytest.raises(CheckpointError, match=r"would take over|a text of \d+ bytes"):
        list(read_weights(tmp_path))
    assert time.process_time() - began < 5
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) < size + 64 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory in the units of Linux")
def test_an_archive_of_many_empty_records_is_refused_before_its_directory_is_read(tmp_path):
    with zipfile.ZipFile(tmp_path / BIN, "w") as made:
        made.writestr("x/version", "3")
        start = made.start_dir
    data = (tmp_path / BIN).read_bytes()
    directory = data[start:-22] + b"".join(
        struct.pack("<4s6B14H2L", b"PK\1\2", *[0] * 6, *[0] * 9, 8, *[0] * 4, 0, 0) + b"x/%06x" % n
        for n in range(400_000)
    )
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(directory), start, 0)
    (tmp_path / BIN).write_bytes(data[:start] + directory + end)
    size, peak = (tmp_path / BIN).stat().st_size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with pytest.raises(CheckpointError, match="would take over"):
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


# ---- what a file has less of than it says, for which torch would give what was in memory ----


def of_pickle(*edits):
    """Change the pickle of an archive, of a tensor of 64 numbers."""

    def change(path):
        torch.save({"w": torch.ones(64)}, path)
        with zipfile.ZipFile(path) as opened:
            (own,) = (opened.read(name) for name in opened.namelist() if name.endswith("data.pkl"))
        rewritten(path, replaced(own, *edits))

    return change


def of_record(change_data):
    def change(path):
        torch.save({"w": torch.ones(64)}, path)
        with zipfile.ZipFile(path) as opened:
            records = {name: opened.read(name) for name in opened.namelist()}
        with zipfile.ZipFile(path, "w") as made:
            for name, data in records.items():
                made.writestr(name, change_data(data) if "/data/" in name else data)

    return change


def of_old_form(*edits):
    def change(path):
        torch.save({"w": torch.ones(64)}, path, _use_new_zipfile_serialization=False)
        path.write_bytes(replaced(path.read_bytes(), *edits))

    return change


def replaced(data, *edits):
    for old, new in edits:
        assert old in data
        data = data.replace(old, new)
    return data


SIZE, COUNT, VALUES = b"K@\x85", (64).to_bytes(8, "little"), b"\0\0\x80?" * 64
LESS = {
    "a tensor larger than its storage": (of_pickle((SIZE, b"K\xf0\x85")), "up to byte 960 of the 256"),
    "a tensor that begins within and ends behind": (
        of_pickle((b"K\0K@\x85", b"K\x01K@\x85")),
        "up to byte 260 of the 256",
    ),
    "strides beyond": (of_pickle((b"K\x01\x85", b"K\x02\x85")), "up to byte 508 of the 256"),
    "a storage larger than its record": (of_pickle((b"K@t", b"K\x80t")), "256 of the 512 bytes"),
    "a record cut short": (of_record(lambda data: data[:-4]), "252 of the 256 bytes"),
    "a record with more": (of_record(lambda data: data + b"x"), "257 of the 256 bytes"),
    "no record": (of_pickle((b"X\x01\0\0\x000", b"X\x01\0\0\x001")), "none of the 256 bytes"),
    "an old form: a tensor larger than its storage": (of_old_form((SIZE, b"K\xf0\x85")), "up to byte 960 of the 256"),
    "an old form: a storage larger than its count": (of_old_form((b"K@N", b"K\x80N")), "64 of the 128 numbers"),
    "an old form: a count larger than the storage": (
        of_old_form((COUNT, bytes([65]) + COUNT[1:])),
        "65 of the 64 numbers",
    ),
    "an old form: cut short": (of_old_form((VALUES, VALUES[:-1])), "end at byte"),
    "an old form: more behind it": (of_old_form((VALUES, VALUES + b"x")), "end at byte"),
    "an old form: no count": (of_old_form((COUNT + VALUES, b"")), "0 of the 64 numbers"),
    "an old form: another list on top of that of its storages": (
        of_old_form((b"q\x01a.", b"q\x01].")),
        "no values of 1 of its 1",
    ),
    "an old form: a storage twice in the list": (of_old_form((b"q\x01a.", b"q\x01ah\x01a.")), "a storage twice"),
    "an old form: a view of a storage": (of_old_form((b"K@Ntq", b"K@(h\x04K\0K@ttq")), "no storage"),
}


@pytest.mark.parametrize("less", LESS)
def test_what_a_file_has_not_just_the_bytes_of_is_refused(less, tmp_path):
    write, match = LESS[less]
    write(tmp_path / BIN)
    with pytest.raises(CheckpointError, match=match):
        list(read_weights(tmp_path))


def test_attributes_that_a_pickle_gives_its_dict_are_no_part_of_the_weights(tmp_path):
    state = OrderedDict(w=torch.ones(2))
    state.items_ = "not callable"
    torch.save(state, tmp_path / BIN)
    with zipfile.ZipFile(tmp_path / BIN) as opened:
        (own,) = (opened.read(name) for name in opened.namelist() if name.endswith("data.pkl"))
    rewritten(tmp_path / BIN, replaced(own, (b"\x06\0\0\0items_", b"\x05\0\0\0items")))
    assert {name: value.tolist() for name, value in read_weights(tmp_path)} == {"w": [1.0, 1.0]}
