"""transformers, quiet: what it says about tiny random models is not about us."""

import pytest
import transformers


@pytest.fixture(autouse=True)
def _quiet():
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)
