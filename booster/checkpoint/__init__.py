"""Checkpoints: a run saved in a folder that appears whole or not at all, and loaded to the bit, on any layout of ranks.

The idea: a checkpoint knows names and whole shapes, never ranks. Which rank held which shard when it was saved is written as
boxes of the whole, and a rank that loads reads the boxes that it needs. A load compares everything before it changes
anything.

An example: two ranks under FSDP save step 100 of one model with a weight "0.weight" of 16 rows.

    step-0000000100/
        tensors-00000.safetensors   rows 0 to 7, under the key "models/0/0.weight@0,0", the rows' states and masters
        tensors-00001.safetensors   rows 8 to 15, likewise, and what only the second rank has
        state.json                  {"models": {"0": {"0.weight": {"__booster__": "tensor", "name": "models/0/0.weight"}}},
                                     "optimizers": ..., "random": [rank 0's, rank 1's], "lr_schedulers": ..., "extra": ...}
        manifest.json               size and hash of each file; "models/0/0.weight" is float32, (16, 8), of these two boxes

One process loads it: the manifest and the tree are checked for their form, `compare` finds that the job has a weight of this
name and shape and requests it, each file is read once and hashed meanwhile, and both boxes are read straight into the weight.

The files, in the order of a save and then of a load:

    run_checkpoints.py   `RunCheckpoints`, what saves of one `Booster` share: a thread that writes, signals to stop.
    objects.py           what the user gave, by kind and name; what a load returns; snapshots for when one refuses.
    parts/               what a checkpoint says of models, optimizers, loaders and the rest: one class each, for both ways.
    saving.py            collects tensors and tree of all ranks, decides which rank writes what, writes and publishes.
    folder.py            names and renames of folders; `Lock`, the right to write one, among several jobs.
    manifest.py          the manifest, its form and its hash; `CheckpointError`, which all ranks raise together; hashes.
    state_tree.py        values to JSON with references for tensors, and back; tensors as ranks hold them and as files do.
    dcp_storage.py       a storage for `torch.distributed.checkpoint`, whose planner divides writes among ranks.
    tensor_file.py       safetensors files: read in parts or whole, verified, and written.
    tensor_reader.py     which parts of which files a rank reads, and which files it verifies.
    loading.py           finds the newest valid folder; compares, reads, prepares, applies.
    saved_checkpoint.py  `SavedCheckpoint`: what a load requests of a checkpoint, and gets.

Weights alone, for other programs:

    weight_files.py      files of weights found and fitted to a model, and written, one tensor at a time.
    streaming.py         weights read before `boost`, in any dtype.
    serving.py           what `save_model` writes: in half or 8 bits, adapters merged. adapters.py: adapters of peft alone.

What holds: a save or load that fails does so on every rank, and leaves what was there. Numbers go to files and back to the
bit. No pickle is written; of what others wrote none is run. To put one more thing into a checkpoint, write a part
(`parts/part.py`) and list it in `parts.PARTS`; a fact of the run that is only shown goes into `RunCheckpoints.run`; a field of
one optimizer goes into `OptimizerWrapper._states`, and `update/state_loading.py` reads it. Forms of files are public: a change
of them needs a new `manifest.VERSION`, an optional key that is added does not. The facade and `booster checkpoint` call in
here; nothing below the facade imports this room.
"""

from booster.checkpoint.folder import damage, latest
from booster.checkpoint.manifest import CheckpointError
from booster.checkpoint.objects import Loaded

__all__ = ["CheckpointError", "Loaded", "damage", "latest"]
