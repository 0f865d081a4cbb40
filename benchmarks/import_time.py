"""What `import keras_monitored` adds to importing Keras and TensorFlow, in new processes."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.measuring import alternate, check, show

_CODE = """
import time, keras, tensorflow
start = time.perf_counter()
{statement}
print((time.perf_counter() - start) * 1000)
"""


def milliseconds(statement: str) -> float:
    """Returns what a statement takes in a process that has imported Keras and TensorFlow."""
    command = [sys.executable, "-c", _CODE.format(statement=statement)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    return float(output.split()[-1])


def main() -> bool:
    """Measures and prints; returns whether the bound is kept."""
    measured = alternate({"import keras_monitored": lambda: milliseconds("import keras_monitored")}, rounds=5)
    medians = show("Importing", "milliseconds", measured)
    return check("milliseconds added", medians["import keras_monitored"], 100)
