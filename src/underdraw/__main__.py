"""`python -m underdraw` is `underdraw`."""

import sys

from underdraw.cli.app import main

sys.exit(main())
