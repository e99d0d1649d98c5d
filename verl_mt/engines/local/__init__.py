"""The local engine: transformers in this process with continuous batching.

`engine.py` is the face towards event loops; `batching.py` decides who gets a row and what a step computes; `slots.py`
holds requests and rows; `model_runner.py` runs the model over the key-value cache; `sampling.py` picks the tokens.
`vision.py` is the engine of models that see.
"""

from verl_mt.engines.local.batching import LocalOptions
from verl_mt.engines.local.engine import LocalEngine

__all__ = ["LocalEngine", "LocalOptions"]
