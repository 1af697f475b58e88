"""`python -m outlast`: the command line."""

import sys

from outlast.cli import main

if __name__ == "__main__":
    sys.exit(main())
