"""The code in the README runs as it stands there."""

import pathlib
import re

import keras
import pytest

from tests.models import dataset, dense_model

_README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
_BLOCKS = re.findall(r"```python\n(.*?)```", _README, re.DOTALL)


def test_there_is_code_in_the_readme():
    assert len(_BLOCKS) >= 3


@pytest.mark.filterwarnings("ignore:.shuffle=True. was passed")  # as every fit on a dataset says
@pytest.mark.parametrize("index", range(len(_BLOCKS)))
def test_a_block_of_code_runs(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the blocks write to run1
    names = {"make_model": dense_model, "dataset": dataset(3), "validation": dataset(2), "model": dense_model()}
    fit = keras.Model.fit
    # Data of three batches and two epochs show whether it runs.
    monkeypatch.setattr(keras.Model, "fit", lambda self, *a, epochs=1, **k: fit(self, *a, epochs=min(epochs, 2), **k))
    exec("import keras, keras_monitored as km\n" + _BLOCKS[index], names)
    assert index > 0 or (tmp_path / "run1" / "run.jsonl").exists()
