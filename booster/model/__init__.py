"""What is known of a user's modules, parameters and optimizers; nothing here trains.

The rooms above ask here instead of looking for themselves, so a fact is stated once. The two axes of the library, precisions
and plugins, meet in these facts: a plugin replaces parameters, and the optimizer is rebound to them by name.

An example, an optimizer that was built before the model was sharded:

    old = named_parameters(model)                       # {"fc.weight": <Parameter 1>, "fc.bias": <Parameter 2>}
    plugin.place(model, policy, device)                 # fully_shard puts DTensors into the places of both
    rebind(optimizer, old, placed_parameters(model))    # groups hold the DTensors now, in place, and states moved along

In reading order:

    modules.py           the model inside plugin and `torch.compile` wrappers (`bare`), `PlacedModule`, names and patterns
                         for them, all places of a tied tensor, the repeated blocks of a model, torch's fused inference path,
                         the order in which a forward uses its children
    params.py            parameters by name; `rebind`; this rank's shard of a DTensor, and DTensors made around one
    optimizers.py        one row for each optimizer of torch, and what users register: who may be stepped in flat buckets;
                         states compared, loaded without rounding, and restored after trial steps

Every room above imports from here. A new optimizer is a row of `OPTIMIZERS` in `optimizers.py`. `PlacedModule`,
`register_elementwise` and the names of `OPTIMIZERS`'s states are public; everything else may change.
"""
