"""Where the real tokenizers, templates and data sets lie, on machines that have them."""

from __future__ import annotations

import os
from pathlib import Path

SHARED_DATA = Path(os.environ.get("VERL_MT_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
