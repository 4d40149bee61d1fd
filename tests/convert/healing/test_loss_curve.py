"""The picture of the loss, with one stage or two."""

import pytest

from regard.convert import Healed, draw_losses


def test_the_loss_curve_is_drawn(tmp_path):
    healed = Healed(tuple(1.0 / (1 + i) for i in range(50)), 20, 65.0, 12_800)
    for stages in (healed, Healed(healed.losses, 0, 1.0, 1), Healed(healed.losses, 50, 1.0, 1)):
        draw_losses(stages, tmp_path / "losses.png")
        assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no step"):
        draw_losses(Healed((), 0, 0.0, 0), tmp_path / "none.png")
