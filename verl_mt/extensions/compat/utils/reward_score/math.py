"""The older name of `verl_mt.utils.reward_score.math_reward`: the same module."""

import sys

from verl_mt.extensions.compat.utils.reward_score import math_reward

sys.modules[__name__] = math_reward
