"""A tuned setting on another kind of device, under another config, and two commands that keep one."""

from pathlib import Path
from typing import Any

import pytest
from models import tiny
from test_tuned_choice import goes_by, kept, rewritten, tuned

from qada_cache import tuned_choice


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QADA_HOME", str(tmp_path / "home"))


def test_prompts_were_measured_on_another_kind_of_device() -> None:
    """These read their prompts exactly. Files of earlier versions do not name the device."""
    model = tiny()
    path = kept(model, prefill_threshold=60.0)
    for device, threshold in (("cuda", 0.0), ("cpu", 60.0)):
        rewritten(lambda state, device=device: state.update(device=device))(path)
        assert tuned(model).options.prefill_threshold == threshold
        assert goes_by(tuned(model)) == (8.0, True)
    rewritten(lambda state: state.pop("device"))(path)
    assert tuned(model).options.prefill_threshold == 60.0


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions", "pad_token_id"])
def test_entries_of_a_config_that_change_no_output(name: str) -> None:
    model = tiny(attention="eager")
    kept(model)
    setattr(model.config, name, 5 if name == "pad_token_id" else True)
    assert goes_by(tuned(model)) == (8.0, True)


def test_two_commands_check_the_folder_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: str, content: Any, *, folder: int) -> None:
        """The other command has removed its file, which is this one's."""

    tuned_choice.check_folder()
    monkeypatch.setattr(tuned_choice.files, "write", write)
    tuned_choice.check_folder()
