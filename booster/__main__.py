"""`python -m booster`: the command line, for environments without the console script."""

import sys

from booster.cli import main

sys.exit(main())
