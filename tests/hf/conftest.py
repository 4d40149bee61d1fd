"""transformers without warnings, which for tiny random models are about nothing."""

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
    """The folder for copies of GGUF files: not the user's."""
    root = tmp_path_factory.mktemp("copies") / "gguf"
    monkeypatch.setattr(gguf_copies, "_root", lambda: root)
    return root
