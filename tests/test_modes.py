from keras_monitored.modes import Mode


def test_there_is_a_mode_for_each_way_to_use_a_model():
    assert [mode.name for mode in Mode] == ["TRAINING", "EVALUATION", "INFERENCE"]
    assert Mode("evaluation") is Mode.EVALUATION
