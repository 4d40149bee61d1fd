"""`python -m regard.hf` downloads the default model to the user's cache, and prints its folder."""

import sys

from regard.hf.loading.default_model import fetch_smollm2
from regard.hf.packages import quiet

if __name__ == "__main__":
    try:
        with quiet():
            sys.stdout.write(f"{fetch_smollm2()}\n")
    except (OSError, ValueError, ImportError) as error:
        sys.exit(str(error))
