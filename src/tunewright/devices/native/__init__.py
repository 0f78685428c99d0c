"""The CPU device: clang compiles C kernels, and a thread pool of our own runs them in this process.

`compiler` finds and runs clang, `isa` knows instruction sets, `objects` loads compiled programs, and `programs` keeps
them. `pool` runs them on the cores that `usable_cores` found, and `device` is the device itself.
"""
