"""Rates of a test's own: an empty folder of stored ones, and the same rates in use afterwards."""

import pytest

from regard import rates
from regard.rates import SPEED


@pytest.fixture
def own_rates(monkeypatch, tmp_path):
    """No rate is in use or stored; what is stored is read, as it is for users."""
    monkeypatch.delenv("REGARD_SPEED", raising=False)
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    monkeypatch.setattr(rates, "_known", {})
    before = dict(vars(SPEED))
    vars(SPEED).clear()
    yield tmp_path
    vars(SPEED).clear()
    vars(SPEED).update(before)
