"""Names that go warn until they are gone."""

import inspect

import pytest

from regard.deprecating import deprecated


def test_an_old_name_warns_where_it_is_called():
    @deprecated(since="0.9", until="1.1", use="attend")
    def look(x):
        return x + 1

    with pytest.warns(FutureWarning, match=r"look\(\) is deprecated since regard 0.9") as caught:
        assert look(1) == 2
    assert caught[0].filename == __file__
    assert "goes in 1.1; use attend" in str(caught[0].message)
    assert inspect.signature(look) == inspect.signature(look.__wrapped__)
