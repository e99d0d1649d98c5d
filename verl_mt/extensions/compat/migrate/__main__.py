"""`python -m verl_mt.migrate`: translate a launch command of verl, ms-swift or slime."""

import sys

from verl_mt.extensions.compat.migrate import main

sys.exit(main())
