"""Ways of reading some tokens only: what they choose by, against the scores themselves."""

import torch

from eval.shared import deciding


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_pages_are_bounded_by_what_they_hold() -> None:
    query, keys = random(1, 2, 5, 16), random(1, 2, 37, 16, seed=1)
    bound, true = deciding.estimate("pages of 8", query, keys), deciding.estimate("true", query, keys)
    assert bound.shape == true.shape
    assert (bound >= true - 1e-5).all()
    one = deciding.estimate("pages of 1", query, keys)
    torch.testing.assert_close(one, true)


def test_a_group_chooses_together() -> None:
    """Two heads of a group want a token each: with room for two, both are read, by both."""
    scores = torch.zeros(1, 1, 2, 20)  # two heads, a query
    scores[0, 0, 0, 3] = scores[0, 0, 1, 11] = 9.0
    chosen = deciding.choose(scores, 2, 0.1)
    assert chosen.nonzero()[:, 2:].tolist() == [[0, 3], [0, 11], [1, 3], [1, 11]]


def test_bytes() -> None:
    assert deciding.find_sketch_share("true") == 0
    assert deciding.find_sketch_share("pages of 16") == 1 / 16
    assert deciding.split("pages of 16, 0.05") == ("pages of 16", 0.05)
    assert deciding.split("") == ("", 1.0)
