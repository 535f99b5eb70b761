"""Every part off by itself, as rows of batched passes: the same as `effect` says of each alone."""

import pytest

from clearhead.errors import ClearheadError
from clearhead.inside.ablation import effect, effect_of_each, single_parts
from tests.explorer.toys import picture, toy

GIVEN = {
    "decoder": ("they speak of the king", None),
    "encoder": ("England [MASK] the king", None),
    "encoder-decoder": ("Ein Hund", "speak of it"),
    "classifier": ("they shall", None),
    "vit": (picture(3), None),
}


@pytest.mark.parametrize("family", GIVEN)
@pytest.mark.parametrize("how", ["zero", "mean"])
def test_each_part_is_what_effect_says_of_it(family, how, monkeypatch):
    monkeypatch.setattr("clearhead.inside.patch.TOKENS_AT_ONCE", 25)  # several batches
    (given, target), told = GIVEN[family], []
    m = toy(family)
    found = effect_of_each(m, given, how, target=target, on_progress=lambda *at: told.append(at))
    parts = single_parts(m.config)
    assert list(found.effects) == list(parts)
    assert len(told) > 1 and told[-1] == (len(parts) + 1, len(parts) + 1)
    for name, one in list(parts.items())[:: 3 if family != "encoder-decoder" else 1]:
        alone = effect(m, given, **one, how=how, target=target)
        assert found.effects[name].ablated == alone.ablated
        assert found.kl[name] == pytest.approx(alone.kl, abs=1e-5)
        assert found.effects[name].after.tolist() == pytest.approx(alone.after.tolist(), abs=1e-5)
        assert found.effects[name].position == alone.position
    assert max(found.kl.values()) > 1e-3


def test_what_chooses_nothing_is_refused():
    with pytest.raises(ClearheadError, match="chooses nothing"):
        effect_of_each(toy("vectors"), "they speak")
    with pytest.raises(ClearheadError, match="gone"):
        effect_of_each(toy("decoder"), "they speak", "gone")
