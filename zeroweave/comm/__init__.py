"""Collectives: how gathers and reductions reach the other ranks' devices, and the ledger of what was sent.

`transport` is the interface and `process_group` what communicates. The others stand around that: `wire` puts them there
where an engine is timed (`timed`) or skips communication (`skip`).
"""
