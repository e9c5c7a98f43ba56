"""Cut the class-balanced subset in this folder out of the full Fashion-MNIST files.

    python make_subset.py FOLDER    # FOLDER holds the four *-ubyte.gz files of the full set

The choice is deterministic: walk a split in file order and keep an image while its class still has room
(1,000 training and 400 test images per class). File order is already mixed, so the result is too.
Running it again gives the same pixels and labels.
"""

import argparse
import gzip
import lzma
import struct
from pathlib import Path

HERE = Path(__file__).resolve().parent
PER_CLASS = {"train": 1000, "t10k": 400}
CLASSES = 10


def select(labels: bytes, per_class: int) -> list[int]:
    """Indices of the first `per_class` items of every class, in file order."""
    room = [per_class] * CLASSES
    chosen = []
    for index, label in enumerate(labels):
        if room[label]:
            room[label] -= 1
            chosen.append(index)
    return chosen


def write(path: Path, content: bytes) -> None:
    path.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    print(f"{path.name}: {path.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description="cut the embedded Fashion-MNIST subset")
    parser.add_argument("source", type=Path, help="folder with the full set's four *-ubyte.gz files")
    source = parser.parse_args().source
    for split, per_class in PER_CLASS.items():
        labels = gzip.decompress((source / f"{split}-labels-idx1-ubyte.gz").read_bytes())[8:]
        images = gzip.decompress((source / f"{split}-images-idx3-ubyte.gz").read_bytes())
        _, _, rows, columns = struct.unpack(">4I", images[:16])
        pixels, size = images[16:], rows * columns
        chosen = select(labels, per_class)
        kept = b"".join(pixels[i * size : (i + 1) * size] for i in chosen)
        write(HERE / f"{split}-images-idx3-ubyte.xz", struct.pack(">4I", 0x803, len(chosen), rows, columns) + kept)
        write(
            HERE / f"{split}-labels-idx1-ubyte.xz",
            struct.pack(">2I", 0x801, len(chosen)) + bytes(labels[i] for i in chosen),
        )


if __name__ == "__main__":
    main()
