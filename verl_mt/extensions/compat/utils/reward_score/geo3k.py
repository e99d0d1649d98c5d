"""verl's name of `verl_mt.rewards.geo3k`: the same module."""

import sys

from verl_mt.extensions.compat.rewards import geo3k

sys.modules[__name__] = geo3k
