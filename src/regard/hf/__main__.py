"""`python -m regard.hf` fetches the default model into the user's cache, and says where it lies."""

import sys

from regard.hf.smollm2 import fetch_smollm2

if __name__ == "__main__":
    try:
        sys.stdout.write(f"{fetch_smollm2()}\n")
    except (OSError, ValueError) as error:
        sys.exit(str(error))
