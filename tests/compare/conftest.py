"""Comparisons under test write their converted layers to a temporary folder."""

import pytest

from regard.compare.converted_cache import FOLDER


@pytest.fixture(autouse=True, scope="module")
def _temporary_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("cache")))
        yield
