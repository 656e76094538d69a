"""examples/one_step.py: its command line, and the page that it writes."""

import json

import one_step
import pytest
from browser import HOSTILE, data_of, shown_by_chromium
from conftest import stay

FEW = ["data.max_rows=60", "data.num_validation=4"]


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The command line, in a folder of its own. Returns the exit code."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> int:
        try:
            return one_step.command(list(words))
        finally:
            stay(0)  # It leaves the process group that the command has joined.

    return call


def test_the_page_shows_the_numbers_that_the_terminal_says(command, tmp_path, capfd):
    assert command("3", "7", "25", "=", "68", *FEW, "sampling.temperature=0.9",
                   "training.learning_rate=1e-3", "training.seed=1") == 0

    told, _ = capfd.readouterr().out.splitlines()
    page = tmp_path / "one_step.html"
    data = data_of(page)
    assert told == ", ".join(f"{name} {data[name]:.4f}" for name in one_step.NUMBERS)
    for answer in data["answers"]:
        shown = [token for token in answer["tokens"] if token[1] is not None]
        assert len(shown) == answer["length"]
    before, after = data["again"]
    assert before["answers"] != after["answers"]
    text = shown_by_chromium(page, tmp_path)
    assert "<title>One step, token by token</title>" in text
    assert f"{100 * data['change_as_meant']:.1f} %" in text
    assert all(answer["verdict"] in text for answer in data["answers"])


def test_no_text_can_end_the_script_of_the_page():
    text = one_step.as_script({"settings": HOSTILE})

    assert "<" not in text and json.loads(text) == {"settings": HOSTILE}


def test_all_prints_means_over_groups_as_a_line_of_json(command, capfd):
    assert command(*FEW, "training.max_new_gen_tokens=40", "--all", "2") == 0

    numbers = json.loads(capfd.readouterr().out)
    assert numbers["groups"] == 2 and 0 < numbers["change_as_meant"] <= 1


@pytest.mark.parametrize(("words", "says"), [
    (["--model", "none"], "model.name='none' cannot be loaded"),
    (["--all", "2", "3", "7", "=", "10"], "--all N averages"),
    (["training.learning_rate=1e9"], "lower training.learning_rate")])
def test_a_mistake_is_one_line_and_no_page(words, says, command, tmp_path, capfd):
    assert command(*words, *FEW, "training.max_new_gen_tokens=40") == 2

    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ") and says in err and err.count("\n") == 1
    assert not list(tmp_path.glob("*.html"))
