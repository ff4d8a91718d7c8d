"""How ranks reach each other: collectives on devices, agreement on the host, and the news of a failure.

`transport` and `process_group` move parameters and gradients; `ledger` counts what they issued; `control`
compares it once per step over the host; `alarm` ends the ranks that wait for one that has failed; `board` is
the store in which both write down where each rank is.
"""
