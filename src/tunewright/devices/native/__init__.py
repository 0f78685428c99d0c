"""The CPU device: C kernels compiled by clang, loaded into the process, and run by a thread pool of our own.

`compiler` finds clang and runs it, `isa` knows instruction sets, `objects` loads what was compiled, `programs` keeps
it, `pool` runs it on the cores that `cores` found, and `device` is the device itself.
"""
