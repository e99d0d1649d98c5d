"""`python -m verl_mt.migrate`."""

import sys

from verl_mt.migrate import main

sys.exit(main())
