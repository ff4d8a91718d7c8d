"""The private names of PyTorch that zeroweave uses: one file for each subsystem of PyTorch.

Each is a small function or alias with its reason, so that a release that moves a name breaks one file here and
one test in `tests/torch_private/`, which run on the oldest and the newest supported version. No module outside
touches a name that starts with an underscore or lives under `torch._*`. Supported: 2.11 to 2.13.
Imports that are slow (Inductor) or that pull in the compiler stay inside the functions.
"""
