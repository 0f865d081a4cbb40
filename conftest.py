"""Set-up shared by the tests and by the doctests of the package."""

from collections.abc import Iterator

import hypothesis
import keras
import pytest
import tensorflow as tf

# Two replicas in every run, so that code for one device only shows itself. Has to come before TensorFlow starts.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)

hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("tests")


@pytest.fixture(autouse=True)
def clean_keras() -> Iterator[None]:
    """Starts every test from the same seeds, and leaves no Keras state to the next one."""
    keras.utils.set_random_seed(1234)
    yield
    # Collecting garbage after each of hundreds of tests would take longer than they do.
    keras.utils.clear_session(free_memory=False)
