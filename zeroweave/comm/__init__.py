"""How data crosses ranks: collectives on devices, and the wrappers around them.

`transport` is the interface, `process_group` and `copy_engine` communicate, and `registered_buffers` is the memory in
which copy engines gather. An engine issues collectives through `wrappers.Wire`, which puts the wrappers around the
transport that are on. Side streams are in `pending`. `ledger` counts what was issued.
"""
