"""``python -m g4debug``."""

import sys

from g4debug.cli import main

if __name__ == "__main__":
    sys.exit(main())
