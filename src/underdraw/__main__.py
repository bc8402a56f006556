"""`python -m underdraw` runs the command `underdraw`."""

import sys

from underdraw.cli.app import main

sys.exit(main())
