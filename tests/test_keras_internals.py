"""Each reach into Keras or TensorFlow fails here when what it relies on moves."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.epoch_iterator import EpochIterator

from keras_monitored import keras_internals
from tests.models import BATCH, arrays, dataset, dense_model


class Calls(keras.callbacks.Callback):
    """Calls a function at an event of Keras, and remembers what it returned."""

    def __init__(self, event, function):
        super().__init__()
        self.seen = []
        setattr(self, event, lambda *args, **kwargs: self.seen.append(function()))


# The running fit --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_the_driver_is_found(method):
    event = {"fit": "on_train_begin", "evaluate": "on_test_begin", "predict": "on_predict_begin"}[method]
    callback = Calls(event, keras_internals.find_driver)
    data = dataset(2) if method != "predict" else dataset(2).map(lambda x, y: x)
    with warnings.catch_warnings(action="ignore"):  # of a `shuffle` that is nobody's doing
        getattr(dense_model(), method)(data, verbose=0, callbacks=[callback])
    (driver,) = callback.seen
    assert callback in driver.callbacks.callbacks
    assert isinstance(driver.epoch_iterator, EpochIterator)
    assert keras_internals.element_spec(driver.epoch_iterator) == data.element_spec
    assert driver.frame.f_code.co_name == method


def test_without_a_driver_there_is_none():
    assert keras_internals.find_driver() is None


@pytest.mark.parametrize("way", ["given", "split"])
def test_validation_data_is_found(way):
    callback = Calls("on_train_begin", lambda: keras_internals.find_driver().validation_data)
    x, y = arrays(4)
    options = {"validation_data": (x[:4], y[:4])} if way == "given" else {"validation_split": 0.25}
    dense_model().fit(x, y, verbose=0, callbacks=[callback], **options)
    (data,) = callback.seen
    np.testing.assert_array_equal(data[0], x[:4] if way == "given" else x[-4:])


def test_evaluations_inside_a_fit_keep_their_iterator():
    model = dense_model()
    callback = Calls("on_test_end", lambda: keras_internals.evaluation_iterator(model))
    model.fit(dataset(2), validation_data=dataset(1), shuffle=False, epochs=2, verbose=0, callbacks=[callback])
    first, second = callback.seen
    assert isinstance(first, EpochIterator) and first is second
    assert keras_internals.evaluation_iterator(model) is None


def test_the_frame_tells_a_fit_from_a_later_one():
    model, frames = dense_model(), []

    def is_ours():
        frames.append(keras_internals.find_driver().frame)
        return keras_internals.called_from(frames[0])

    callback = Calls("on_train_begin", is_ours)
    batch = Calls("on_train_batch_end", lambda: keras_internals.called_from(frames[0]))
    for _ in range(2):
        model.fit(dataset(1), shuffle=False, verbose=0, callbacks=[callback, batch])
    assert callback.seen == [True, False] and batch.seen == [True, False]


# The iterators of a fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"steps_per_epoch": 2}, {"steps_per_epoch": 3}], ids=str)
@pytest.mark.parametrize("repeats", [1, None])
def test_iterators_are_counted_as_keras_makes_them(options, repeats, monkeypatch):
    made, counts = [], []
    data = dataset(4) if repeats == 1 and not options else dataset(4).repeat(repeats or 9)
    make = type(data).__iter__
    monkeypatch.setattr(type(data), "__iter__", lambda self: made.append(self) or make(self))

    def begin():
        made.clear()
        counts.append(keras_internals.IteratorCount(keras_internals.find_driver().epoch_iterator))

    at_epoch_end = Calls("on_epoch_end", lambda: (counts[0].made, len(made), counts[0].renews))
    callbacks = [Calls("on_train_begin", begin), at_epoch_end]
    dense_model().fit(data, epochs=3, verbose=0, shuffle=False, callbacks=callbacks, **options)
    assert [ours for ours, _, _ in at_epoch_end.seen] == [theirs for _, theirs, _ in at_epoch_end.seen]
    assert at_epoch_end.seen[0][0] >= 1
    if options:
        assert not any(renews for _, _, renews in at_epoch_end.seen[:2])
    else:
        assert all(renews for _, _, renews in at_epoch_end.seen)


@pytest.mark.parametrize("earlier", [0, 3])
def test_keras_renews_an_iterator_by_the_number_of_batches_it_has_seen(earlier):
    counts = []

    def begin():
        counts.append(keras_internals.IteratorCount(keras_internals.find_driver().epoch_iterator))

    def first_batch():
        if len(batches.seen) == 0:
            counts[0].count_earlier_batches(earlier)

    at_epoch_end, batches = Calls("on_epoch_end", lambda: counts[0].made), Calls("on_train_batch_begin", first_batch)
    callbacks = [Calls("on_train_begin", begin), batches, at_epoch_end]
    dense_model().fit(dataset(6), epochs=3, steps_per_epoch=3, verbose=0, shuffle=False, callbacks=callbacks)
    assert at_epoch_end.seen == ([1, 2, 2] if earlier == 0 else [2, 2, 3])


class PyData(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.ends = 0

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return tuple(part[:BATCH] for part in arrays(1))

    def on_epoch_end(self):
        self.ends += 1


def test_ends_of_epochs_reach_a_py_dataset_and_are_counted():
    counts, before = [], []  # Keras itself has told it of an end before training begins

    def begin():
        counts.append(keras_internals.IteratorCount(keras_internals.find_driver().epoch_iterator))
        before.append(data.ends)
        counts[0].reach_epoch_ends(5)

    data = PyData()
    dense_model().fit(data, epochs=2, shuffle=False, verbose=0, callbacks=[Calls("on_train_begin", begin)])
    assert data.ends - before[0] == counts[0].epoch_ends == 7


def test_the_warning_at_the_end_of_data_can_be_silenced():
    def begin():
        keras_internals.silence_end_of_data(keras_internals.find_driver().epoch_iterator)

    with pytest.warns(UserWarning, match="ran out of data"):
        dense_model().fit(dataset(2), steps_per_epoch=3, epochs=1, shuffle=False, verbose=0)
    dense_model().fit(
        dataset(2), steps_per_epoch=3, shuffle=False, verbose=0, callbacks=[Calls("on_train_begin", begin)]
    )


def test_the_epoch_to_start_from_is_honoured():
    model = dense_model()
    assert keras_internals.set_initial_epoch(model, None) is None

    def begin():
        assert keras_internals.set_initial_epoch(model, 2) is None

    history = model.fit(dataset(1), epochs=4, shuffle=False, verbose=0, callbacks=[Calls("on_train_begin", begin)])
    assert history.epoch == [2, 3]
    assert keras_internals.set_initial_epoch(model, None) == 2


@pytest.mark.parametrize("name", ["train_function", "test_function", "predict_function"])
def test_functions_are_looked_up_at_every_step(name):
    model, calls = dense_model(), []

    def put():
        def function(iterator):
            calls.append(iterator)
            return original(iterator)

        original = keras_internals.put_train_function(model, name, function)
        assert callable(original)

    method = {"train_function": "fit", "test_function": "evaluate", "predict_function": "predict"}[name]
    event = {"fit": "on_train_begin", "evaluate": "on_test_begin", "predict": "on_predict_begin"}[method]
    data = dataset(3) if method != "predict" else dataset(3).map(lambda x, y: x)
    with warnings.catch_warnings(action="ignore"):
        getattr(model, method)(data, verbose=0, callbacks=[Calls(event, put)])
    assert len(calls) >= 3


# Callbacks --------------------------------------------------------------------------------------------------------

PER_EPOCH = [
    lambda path: keras.callbacks.EarlyStopping("loss"),
    lambda path: keras.callbacks.ReduceLROnPlateau("loss"),
    lambda path: keras.callbacks.ModelCheckpoint(f"{path}/model.keras"),
    lambda path: keras.callbacks.BackupAndRestore(path),
    lambda path: keras.callbacks.CSVLogger(f"{path}/log.csv"),
    lambda path: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
    lambda path: keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    lambda path: keras.callbacks.History(),
]
PER_BATCH = [
    lambda path: keras.callbacks.ModelCheckpoint(f"{path}/model.keras", save_freq=10),
    lambda path: keras.callbacks.BackupAndRestore(path, save_freq=10),
    lambda path: keras.callbacks.TerminateOnNaN(),
    lambda path: keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None),
]


@pytest.mark.parametrize("make", PER_EPOCH, ids=lambda make: type(make("x")).__name__)
def test_callbacks_that_work_per_epoch(make, tmp_path):
    assert not keras_internals.works_per_batch(make(str(tmp_path)))


@pytest.mark.parametrize("make", PER_BATCH, ids=lambda make: type(make("x")).__name__)
def test_callbacks_that_work_per_batch(make, tmp_path):
    assert keras_internals.works_per_batch(make(str(tmp_path)))
    assert keras_internals.works_per_batch(make(str(tmp_path)), but_for_display=True)


def test_the_progress_bar_works_per_batch_for_display():
    bar = keras.callbacks.ProgbarLogger()
    assert keras_internals.works_per_batch(bar)
    assert not keras_internals.works_per_batch(bar, but_for_display=True)


# Building, iterators and generators -------------------------------------------------------------------------------


def test_a_symbolic_build_makes_everything_and_runs_nothing():
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    keras_internals.symbolic_build(model, dataset(1).element_spec)
    assert model.built and model.optimizer.built and len(model.metrics_variables) == 4
    assert int(model.optimizer.iterations) == 0 and not any(np.any(v) for v in model.metrics_variables)


def test_empty_optionals_of_a_batch_become_none():
    optional = tf.experimental.Optional.empty(tf.TensorSpec(()))
    batch = ({"a": tf.constant(1), "b": optional}, optional)
    assert keras_internals.without_optionals(batch) == ({"a": 1, "b": None}, None)
    spec = tf.nest.map_structure(tf.type_spec_from_value, batch)
    assert keras_internals.without_optionals(spec) == ({"a": tf.TensorSpec((), tf.int32), "b": None}, None)


def test_keras_puts_optionals_where_arrays_are_none():
    seen = []

    class Model(keras.Model):
        def train_step(self, data):
            seen.append(data)
            return {"loss": tf.reduce_sum(data["a"])}

    model = Model()
    model.compile()
    model.fit({"a": np.ones((4, 1)), "b": None}, verbose=0)
    assert all(data["b"] is None for data in seen)


def test_an_iterator_is_saved_and_restored_with_its_shuffle():
    iterator = iter(dataset(8).shuffle(40, seed=3).repeat(2))
    for _ in range(3):
        next(iterator)
    state = keras_internals.serialize_iterator(iterator)
    expected = [next(iterator)[0].numpy() for _ in range(9)]
    keras_internals.restore_iterator(iterator, state)
    again = [next(iterator)[0].numpy() for _ in range(9)]
    np.testing.assert_array_equal(expected, again)


@pytest.mark.parametrize("kind", ["generator", "python object"])
def test_an_iterator_that_can_not_be_saved(kind):
    data = tf.data.Dataset.from_generator(lambda: iter([1.0]), output_signature=tf.TensorSpec(()))
    assert keras_internals.serialize_iterator(iter(data) if kind == "generator" else iter([1])) is None


def test_a_shuffle_leaves_the_state_of_an_iterator_that_has_read_it_to_its_end():
    iterator = iter(tf.data.Dataset.range(12).shuffle(20, seed=3).batch(4))
    assert keras_internals.shuffles_in(keras_internals.serialize_iterator(iterator)) == 1
    assert len(list(iterator)) == 3
    assert keras_internals.shuffles_in(keras_internals.serialize_iterator(iterator)) == 0


def test_repeats_within_an_iterator_are_seen():
    data = tf.data.Dataset.range(12).shuffle(20, seed=3)
    repeating = [data.repeat(2).batch(4), data.batch(4).repeat(2), data.batch(4).repeat()]
    seen = [keras_internals.repeats_in(keras_internals.serialize_iterator(iter(d))) for d in [data, *repeating]]
    assert seen == [False, True, True, True]


def test_keras_takes_an_unknown_number_of_batches_from_the_first_epoch():
    data = tf.data.Dataset.range(12).filter(lambda x: True).batch(4)
    epochs = EpochIterator(data)
    count = keras_internals.IteratorCount(epochs)
    assert count.num_batches is None
    count.num_batches = 2
    assert len(list(epochs)) == 2


def test_global_generators_are_found_and_not_made():
    assert keras_internals.global_seed_generator() is None
    keras.random.uniform((1,))
    found = keras_internals.global_seed_generator()
    before = found.state.numpy().copy()
    keras.random.uniform((1,))
    assert not np.array_equal(found.state.numpy(), before)
    assert keras_internals.global_generator() in (None, tf.random.get_global_generator())
    assert keras_internals.global_generator() is tf.random.get_global_generator()
