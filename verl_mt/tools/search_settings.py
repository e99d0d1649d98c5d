"""Deprecated: another place of `SearchSettings`, for generate functions that import it from here."""

from __future__ import annotations

import warnings

from verl_mt.tools.search_client import SearchSettings as SearchSettings

warnings.warn(
    "verl_mt.tools.search_settings: import SearchSettings from verl_mt.tools.search_client",
    DeprecationWarning,
    stacklevel=2,
)
