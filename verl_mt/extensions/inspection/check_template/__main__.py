"""`python -m verl_mt.check_template`: what a chat template does to conversations."""

import sys

from verl_mt.extensions.inspection.check_template import main

sys.exit(main())
