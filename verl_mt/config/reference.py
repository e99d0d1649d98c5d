"""Deprecated: another name of `verl_mt.config.write_reference`, for commands that have it."""

from __future__ import annotations

import warnings

from verl_mt.config.write_reference import reference as reference

warnings.warn("verl_mt.config.reference: use verl_mt.config.write_reference", DeprecationWarning, stacklevel=2)

if __name__ == "__main__":
    print(reference(), end="")
