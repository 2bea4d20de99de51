"""A release has the traits of the newest row that is not newer; a newer one is named as assumed."""

from __future__ import annotations

import pytest
from packaging.version import Version

from backends.skyrl.release import RELEASES, assumed


def test_rows_are_in_order():
    since = [Version(release.since) for release in RELEASES]
    assert since == sorted(set(since))


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0.dev3", "0.3.1", RELEASES[-1].since])
def test_a_described_release_needs_no_word(version):
    assert assumed(version) is None


@pytest.mark.parametrize("version", ["0.99.0", "7.0", "without a version"])
def test_a_release_that_nobody_described_is_named(version):
    said = assumed(version)
    assert said is not None
    assert version in said
    assert RELEASES[-1].since in said
