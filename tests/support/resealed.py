"""Checkpoint folders that were changed and sealed again: every hash in them is right, so the checks behind must hold."""

import dataclasses
import hashlib
import json

from booster.checkpoint.manifest import MANIFEST, STATE, File, hash_of, read_manifest
from booster.checkpoint.tensor_file import Entry, read_entry
from booster.checkpoint.weight_files import named_in
from booster.common.untrusted_files import open_regular


def content_of(folder):
    """What the manifest says."""
    return json.loads((folder / MANIFEST).read_bytes())["content"]


def seal(folder, content):
    """Write a manifest of `content`, with the sizes and hashes that the files have now."""
    for name, entry in content["files"].items():
        path = folder / name
        if isinstance(entry, dict) and path.is_file():
            data = path.read_bytes()
            entry |= {"bytes": len(data), "digest": hash_of(data)}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    outer = b'{"format": "booster checkpoint", "version": 2, "sha256": "%b", "content": %b}\n'
    (folder / MANIFEST).write_bytes(outer % (hashlib.sha256(text).hexdigest().encode(), text))


def change(folder, edit):
    """Have `edit` change what manifest and state say, both given as objects, and seal the folder again."""
    content, tree = content_of(folder), json.loads((folder / STATE).read_bytes())
    edit(content, tree)
    (folder / STATE).write_text(json.dumps(tree, separators=(",", ":")))
    seal(folder, content)


def read_weights(path):
    """Yield (name, tensor) of files of weights, as loads find and read them."""
    for name, value in named_in(path):
        if isinstance(value, Entry):
            with open_regular(value.file) as opened:
                value = read_entry(opened, value)
        yield name, value


def header_and_data(path):
    """The header of a safetensors file, as an object, and what follows it."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def write_safetensors(path, header, data):
    """Write a file with that header, an object or its text, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def reseal(folder, tree):
    """Make `tree` the state of the checkpoint in `folder`, with a manifest that fits."""
    data = json.dumps(tree).encode()
    (folder / "state.json").write_bytes(data)
    manifest = read_manifest(folder)
    files = {**manifest.files, "state.json": File(len(data), hash_of(data))}
    (folder / MANIFEST).write_bytes(dataclasses.replace(manifest, files=files).dumps())
