"""What tests of comparisons share: a folder for their converted layers, and one comparison."""

from contextlib import nullcontext

import pytest
import torch

from regard.cache_folder import FOLDER
from regard.compare import CANDIDATES, Texts, chosen, compare
from regard.compare.candidates import ALL
from session import LONG
from tiny import tiny, tokens

CONTEXT = 40


@pytest.fixture(autouse=True, scope="module")
def _temporary_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("cache")))
        patch.setattr("regard.compare.ahead.kernels_ahead", lambda *given, **named: nullcontext())
        yield


@pytest.fixture(scope="session")
def texts():
    return Texts(tokens(2, CONTEXT), tokens(21, 50), "random tokens")


@pytest.fixture(scope="session")
def result(texts, tmp_path_factory):
    """The usual rows of a tiny model; in a long run, all rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("cache")))
        torch.set_num_threads(1)  # before the fixture that does so for every test
        rows = CANDIDATES if LONG else chosen([ALL])
        return compare(tiny("llama"), texts, name="tiny", memory=1 << 20, candidates=rows)
