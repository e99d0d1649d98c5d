"""`python -m verl_mt.check_template`."""

import sys

from verl_mt.check_template import main

sys.exit(main())
