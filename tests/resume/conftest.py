"""The processes that all tests of resuming share."""

import pathlib
from collections.abc import Iterator

import pytest

from tests.resume.runs import Case, Runs


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Starts at once with the cases of all tests that were chosen, so that two processes are always busy."""
    directory: pathlib.Path = tmp_path_factory.mktemp("runs")
    shared = Runs(directory)
    try:
        chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
        shared.start(params["case"] for params in chosen if isinstance(params.get("case"), Case))
        yield shared
    finally:
        shared.close()
