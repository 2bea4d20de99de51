"""A release has the traits of the newest row that is not newer; a newer one is named as assumed."""

from __future__ import annotations

import pytest
from packaging.version import Version

from backends.skyrl.release import RELEASES, SENDERS, assumed, of


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


def test_a_tree_that_has_the_next_releases_code_before_its_version_has_its_traits(tmp_path):
    assert of(Version("0.3.0"), tmp_path).since == of(Version("0.3.0"), None).since == "0.3.0"
    (tmp_path / SENDERS).parent.mkdir(parents=True)
    (tmp_path / SENDERS).touch()
    assert of(Version("0.3.0"), tmp_path).since == "0.4.0"
