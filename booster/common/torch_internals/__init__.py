"""Every private name of torch that booster uses and that has no public twin: an upgrade of torch is this room.

The idea: the rest of the library asks a question in its own words, and one function here knows by which private name torch
answers it. An example, how often a tensor was written in place:

    version = attrgetter("_version")                      in tensor_internals.py: the only place with `_version`
    if version(param) != seen: ...                        in masters/: knows nothing of torch's name

Files, each of them about one part of torch:

    autograd_internals.py    the engine of backward passes, torch function modes, the compiler.
    tensor_internals.py      tensors and kernels, DTensors, fake tensors, process groups, workers of loaders.
    optimizer_internals.py   hooks around `step`, what fused optimizers and GradScaler note.
    fsdp_internals.py        the records of `fully_shard`, and DistributedDataParallel's hooks.
    fsdp_lifetimes.py        makes these records refer to modules weakly, so that a model is freed with its last reference.
    pipeline_internals.py    torch's pipeline stages.

What may be touched: everything, when torch renames something. `tests/unit/test_torch_internals.py` looks for each name and says
which are missing; a branch for an older torch says which one needs it, and goes with that version. Checked on torch 2.11
to 2.15. Not here: `torch._foreach_*`, which torch documents in its optimizers, and the dictionaries of a module (`_parameters`,
`_modules`, `_buffers`, hooks), which are as old as modules.

Every room depends on this one; it depends on `booster.common.misuse` alone. What would make `import booster` slow is imported
where it is used.
"""
