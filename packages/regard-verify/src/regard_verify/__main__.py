"""`python -m regard_verify` is the command `regard-verify`."""

import sys

from regard_verify.start import main

sys.exit(main())
