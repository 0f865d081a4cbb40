import ast
import pathlib
import subprocess
import sys

import pytest

import keras_monitored

PACKAGE = pathlib.Path(keras_monitored.__file__).parent

LOOK = """
import atexit, logging, signal, sys, threading, warnings
import keras, tensorflow as tf
from tensorflow.python.eager import context

def state():
    return {
        "signals": [signal.getsignal(s) for s in signal.valid_signals()],
        "handlers": [list(logging.getLogger(name).handlers) for name in ("", "keras_monitored", "tensorflow", "absl")],
        "levels": [logging.getLogger(name).level for name in ("", "keras_monitored", "tensorflow", "absl")],
        "threads": [thread.name for thread in threading.enumerate()],
        "devices": context.context()._initialized,
        "filters": list(warnings.filters),
        "excepthook": sys.excepthook,
        "eager": tf.executing_eagerly(),
        "dtype": keras.config.floatx(),
    }

before = state()
assert not before["devices"], "importing Keras itself starts devices: this test shows nothing"
import keras_monitored
after = state()
differing = [name for name in before if before[name] != after[name]]
assert not differing, differing
"""


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_importing_does_nothing():
    done = python(LOOK)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == ""


def test_another_backend_is_a_clear_error():
    # Asked for in the environment it needs packages that the tests do not.
    done = python("import keras; keras.config.backend = lambda: 'jax'; import keras_monitored")
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ImportError")]
    assert "needs the TensorFlow backend of Keras. Received: backend 'jax'" in line
    assert "KERAS_BACKEND=tensorflow" in line


def test_every_public_name_is_there_and_documented():
    assert sorted(keras_monitored.__all__) == keras_monitored.__all__
    for name in keras_monitored.__all__:
        assert getattr(keras_monitored, name).__doc__, name


def imported_by(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_pickles_or_reaches_into_keras(path):
    modules = set(imported_by(path))
    for pickling in ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"):
        assert not any(module.split(".")[0] == pickling for module in modules)
    calls = {ast.unparse(n.func) for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)}
    assert not calls & {"eval", "exec", "np.save", "pickle.dumps", "__import__"}
    if path.name != "keras_internals.py":
        assert not [m for m in modules if m.startswith(("keras.src", "tensorflow.python"))]
