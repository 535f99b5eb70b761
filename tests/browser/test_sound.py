"""A model of speech on the page: its spectrogram, and the moments a token looks at, live and in a file."""

from __future__ import annotations

import io

import numpy as np
import pytest

import clearhead as ch
from clearhead.app.explorer.session import Opened
from clearhead.inside.attention import attention
from tests.browser.test_kinds import saved
from tests.explorer.toys import serving
from tests.test_speech import folder, sounds  # noqa: F401

MOST = "() => document.querySelector('#attention-large .spectrogram')?.dataset.most"


@pytest.mark.ledger("L11", "F2")
@pytest.mark.slow
def test_where_a_token_was_heard(folder, watched, tmp_path):  # noqa: F811
    import soundfile

    m, file = ch.load(folder), io.BytesIO()
    soundfile.write(file, sounds()[3], 16_000, format="WAV", subtype="FLOAT")
    (tmp_path / "clip.wav").write_bytes(file.getvalue())
    heard = attention(m, tmp_path / "clip.wav", kinds=["cross"])
    said = m.transcribe(tmp_path / "clip.wav").ids
    with serving(Opened("speech", lambda: m)) as served:
        seen = watched().open(served.url)
        before = seen.page.evaluate("clearhead.store.get('run').run")
        clip = {"name": "clip.wav", "mimeType": "audio/wav", "buffer": file.getvalue()}
        seen.page.set_input_files("#input-sound", clip)
        seen.wait("before => clearhead.store.get('run').run !== before", before)
        ids = seen.page.evaluate("clearhead.store.get('run').tokens.ids")
        assert ids[-len(said) :] == said  # it is read in one window, without times
        shape = seen.page.evaluate("clearhead.store.get('run').sound.shape")
        assert shape == [8, 100] and seen.page.locator("#input-picture .spectrogram").count() == 1
        seen.look("attention", "#attention-large .spectrogram")
        copy, tried = saved(seen, watched, tmp_path / "page.html")
        for page in (seen, copy):
            page.look("attention", "#attention-large .spectrogram")
            name = page.page.get_attribute("#attention-head", "data-head")
            layer, head = (int(part) for part in name.split(".")[-2:])
            pattern = heard.of("cross")[layer].pattern[head]
            for place in (len(ids) - 1, 2):
                page.page.select_option("#attention-query", str(place))
                page.wait(f"most => ({MOST})() === most", str(int(np.argmax(pattern[place]))))
        assert not seen.wrong and not copy.wrong and not tried
