"""`python -m verl_mt.migrate`."""

import sys

from verl_mt.extensions.compat.migrate import main

sys.exit(main())
