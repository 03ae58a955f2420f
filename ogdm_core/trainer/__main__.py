"""`python -m ogdm_core.trainer`."""

import sys

from .train import main

sys.exit(main())
