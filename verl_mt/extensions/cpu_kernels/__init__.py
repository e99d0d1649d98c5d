"""Compiled kernels of the local engine on a CPU.

`kernels.cpp` is the source, behind a plain C interface. `build.py` compiles it once. `bindings.py` calls it with
tensors. `forward.py` runs a step with it. `choice.py` decides whether an engine uses it, by the key that `config.py`
declares. `step_hook.py` keeps a deterministic run from resuming with other kernels.
"""
