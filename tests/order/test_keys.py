import numpy as np

from headrace.order.keys import derive


def test_every_combination_of_numbers_has_a_key_of_its_own() -> None:
    keys = derive(7, np.arange(300)[:, None], np.arange(300)[None, :])
    assert keys.shape == (300, 300)
    assert len(np.unique(keys)) == 90_000
    assert keys[3, 5] == derive(7, 3, 5)[0] != derive(7, 5, 3)[0]


def test_the_documented_keys_hold() -> None:
    assert (int(derive(7, 0)[0]), int(derive(7, 1)[0])) == (8409816773569330625, 4369894418777901244)
