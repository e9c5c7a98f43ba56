"""Hashes of files, by which damage is found: XXH3-128, and SHA-256 in checkpoints of format 1.

XXH3 reads memory as fast as it comes, 10 GB/s and more on one core, where SHA-256 takes as long as writing to a fast disk, and
longer than reading from memory. It is no protection against people, and neither was SHA-256 here: who can write into a
checkpoint can write its hashes too. Source: Y. Collet, xxHash, https://xxhash.com.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

from booster.common.untrusted_files import open_regular

HASH = "xxh3_128"
BLOCK = 1 << 19  # bytes hashed and copied at a time: they are still in the processor's cache for the second of the two


class Hash(Protocol):
    """What takes bytes in order and says their hash."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def new_hash(kind: str = HASH) -> Hash:
    """Return an empty hash of that kind. Raises ValueError for an unknown kind, ImportError where xxhash is missing."""
    if kind == "sha256":
        return hashlib.sha256()
    if kind != HASH:
        raise ValueError(f"{kind!r} is no hash of a checkpoint; known are {HASH!r} and 'sha256'")
    try:
        from xxhash import xxh3_128
    except ImportError as error:
        raise ImportError("the hashes of a checkpoint need xxhash: pip install xxhash") from error
    return xxh3_128()


def hash_of(data: bytes, kind: str = HASH) -> str:
    """Return the hexadecimal hash of `data`."""
    digest = new_hash(kind)
    digest.update(memoryview(data))
    return digest.hexdigest()


def hash_of_file(path: Path, kind: str = HASH) -> str:
    """Return the hexadecimal hash of the file at `path`, of which a block is in memory at a time."""
    digest = new_hash(kind)
    block = memoryview(bytearray(BLOCK))
    with open_regular(path, buffered=False) as file:
        while num := file.readinto(block):  # type: ignore[attr-defined]
            digest.update(block[:num])
    return digest.hexdigest()
