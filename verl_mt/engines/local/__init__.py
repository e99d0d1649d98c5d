"""The local engine: transformers in this process with continuous batching.

`engine.py` is the face towards event loops, `scheduler.py` decides what a step computes, `admission.py` who gets a
row and what is shared, `slots.py` and `kv_cache.py` hold the rows, `attention.py` and `forward.py` run the model,
`sampling.py` and `stop_strings.py` pick and end.
"""

from verl_mt.engines.local.engine import LocalEngine
from verl_mt.engines.local.scheduler import LocalOptions

__all__ = ["LocalEngine", "LocalOptions"]
