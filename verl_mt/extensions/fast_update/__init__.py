"""Options that make the update faster on a GPU. None is on by default: none was measured on a GPU yet.

`config.py` declares the keys, and `tune.py` applies them to the workers of a process. `layers.py` compiles decoder
layers. `head.py` computes log-probs with fused kernels. `attention.py` attends in one call per layer. `recompute.py`
chooses what gradient checkpointing recomputes.
"""
