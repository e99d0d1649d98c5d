"""Every key: its type, default, documentation and check."""

from verl_mt.config import schema as _schema  # noqa: F401 - extensions add keys to classes of all modules here
