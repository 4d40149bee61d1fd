"""`python -m regard.hf` fetches the default model into the user's cache, and says where it lies."""

import sys

from regard.hf.loading.default_model import fetch_smollm2
from regard.hf.loading.loading import quiet

if __name__ == "__main__":
    try:
        with quiet():
            sys.stdout.write(f"{fetch_smollm2()}\n")
    except (OSError, ValueError, ImportError) as error:
        sys.exit(str(error))
