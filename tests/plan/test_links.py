"""Links between ranks: their sources and their times."""

import pytest

from regard.plan.links import LINKS, Link, link_of, link_seconds

TOY = Link("toy", 100.0, 0.5, "invented")


@pytest.mark.parametrize("key", LINKS)
def test_every_link_has_a_source_and_positive_rates(key):
    link = link_of(key)
    assert link.source
    assert 1e10 < link.bytes_per_second < 1e12
    assert 1e-6 < link.latency < 1e-4


def test_links_by_hand():
    assert link_of("nvlink-4").bytes_per_second == 900e9 / 2  # both directions together
    assert link_of("infiniband-ndr").bytes_per_second == 400e9 / 8  # bits
    assert link_of("pcie-5").bytes_per_second == pytest.approx(63.015e9, rel=1e-4)


def test_seconds_are_latencies_and_bytes():
    assert link_seconds(200, 3, TOY) == 3 * 0.5 + 200 / 100
    assert link_seconds(0, 0, TOY) == 0


def test_an_unknown_link_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"link='tin' is not one of nvlink-4, .*ethernet-100"):
        link_of("tin")
