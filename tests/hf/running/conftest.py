"""What tests of installed models share."""

import pytest

from regard.hf.running import installing


@pytest.fixture
def layers_alone(monkeypatch):
    """Installed decoders run a step layer by layer, not all layers in one call."""
    monkeypatch.setattr(installing, "bind_models", lambda model: 0)
