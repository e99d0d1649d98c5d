"""`python -m verl_mt.check_template`: deprecated, use `verl-mt doctor --only template`."""

import sys

from verl_mt.extensions.inspection.check_template import main

sys.exit(main())
