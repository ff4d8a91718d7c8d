"""How data crosses ranks: collectives on devices, and the wrappers around them.

`transport` is the interface, `process_group` and `copy_engine` communicate, `grouped` hands each sharding group's
collectives to its own. `choose` says which gathers copy engines run, and `places` is the memory in which they do.
`wire` is what an engine issues them through: it puts `timed` and `skip` around the transport while they are on. `fence`
and `paired` stay around it where they are asked for. The common part of wrappers is in `around`, side streams in
`pending`. `ledger` counts what was issued.
"""
