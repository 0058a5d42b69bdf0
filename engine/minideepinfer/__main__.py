"""`python -m minideepinfer` is the command `mini-deepinfer`."""

import sys

from minideepinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
