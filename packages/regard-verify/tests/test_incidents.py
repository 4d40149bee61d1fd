"""Each incident is named by its law; the same code without the mistake breaks none."""

from pathlib import Path

import pytest
import torch

from incidents import INCIDENTS
from regard_verify import check

PAGE = Path(__file__).parents[3] / "docs" / "verify-incidents.md"


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.thread)
def test_an_incident_is_named(incident):
    torch.manual_seed(0)
    report = check(incident.make(True), incident.like, quick=True)
    assert incident.law in [each.law for each in report.causes], str(report)


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.thread)
def test_without_the_mistake_no_law_is_broken(incident):
    torch.manual_seed(0)
    subject = incident.make(False)
    if subject is None:
        pytest.skip("a module of torch as it is")
    report = check(subject, incident.like, quick=True)
    assert report.verdict == "kept", str(report)


def test_the_page_has_a_row_for_each():
    text = PAGE.read_text()
    for each in INCIDENTS:
        owner, number = each.thread.split("#")
        assert f"[{each.thread}](https://github.com/{owner}/" in text and f"/{number})" in text
        assert f"`{each.law}`" in text, each.law
