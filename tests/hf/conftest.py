"""transformers, quiet: what it says about tiny random models is not about us."""

import pytest
import transformers

from regard.hf.loading import gguf_copies


@pytest.fixture(autouse=True)
def _quiet():
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


@pytest.fixture(autouse=True)
def copies(tmp_path_factory, monkeypatch):
    """Where copies of GGUF files go: not where the user's are."""
    root = tmp_path_factory.mktemp("copies") / "gguf"
    monkeypatch.setattr(gguf_copies, "_root", lambda: root)
    return root
