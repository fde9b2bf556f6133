"""`python -m theodolite`."""

import sys

from theodolite.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
