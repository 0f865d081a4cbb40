import pytest
import tensorflow as tf

import keras_monitored as km


def test_it_counts_from_where_it_is_told():
    counter = km.Counter("global_step", 5)
    assert int(counter) == 5
    assert counter.increment() == 6 and counter.increment(tf.constant(4)) == 10
    counter.assign(2)
    assert int(counter) == 2
    assert repr(counter) == "Counter('global_step', 2)"
    assert counter.variable.dtype == tf.int64 and not counter.variable.trainable
    assert counter.variable.name == "global_step:0"


def test_it_counts_in_a_graph_beyond_32_bits():
    counter = km.Counter("global_step", 2**40)

    @tf.function(autograph=False)
    def three():
        for _ in range(3):
            after = counter.increment()
        return after

    assert int(three()) == int(counter) == 2**40 + 3


@pytest.mark.parametrize("value", [-1, 1.0, True, "1", None])
def test_wrong_starts(value):
    with pytest.raises(ValueError, match=r"`initial_value` must be an integer of at least 0\. Received: "):
        km.Counter("global_step", value)


def test_replicas_count_once():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        counter = km.Counter("global_step")

    @tf.function(autograph=False)
    def step():
        strategy.run(counter.increment)

    step()
    step()
    assert int(counter) == 2
    assert [int(part) for part in strategy.experimental_local_results(counter.variable)] == [2, 2]
