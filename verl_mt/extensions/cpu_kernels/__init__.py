"""Compiled kernels of the local engine on a CPU, and of the update of the model that it samples from.

`kernels.cpp` is the source, behind a plain C interface. `build.py` compiles it once. `bindings.py` calls it with
tensors. `forward.py` runs a step of the engine with it, `update.py` the forward and backward pass of the update.
`choice.py` decides whether an engine uses it, by the key that `config.py` declares. `step_hook.py` keeps a
deterministic run from resuming with other kernels.
"""
