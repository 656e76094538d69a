"""Settings: config.yaml, files and key=value, checked. A mistake is one line that helps."""

import itertools
import re

import pydantic
import pytest
import yaml
from conftest import make_config
from processes import ROOT

from machinery import settings
from machinery.errors import UserError
from machinery.settings import load_config

CODE = "c1234567"


def refusal(*arguments: str) -> str:
    with pytest.raises(UserError) as raised:
        load_config(list(arguments))
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_later_files_win_over_earlier_ones_and_the_command_line_over_all(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("training: {seed: 1, max_steps: 7}\nsampling: {top_k: 5}\n")
    second.write_text("training: {seed: 2, learning_rate: 1e-5}\ndata: {max_rows: 3}\n")

    config = load_config(["--config", str(first), "sampling.top_k=9", "--config", str(second),
                               "data.max_rows=null"])

    assert (config.training.max_steps, config.training.seed, config.sampling.top_k) == (7, 2, 9)
    assert config.training.learning_rate == 1e-5  # which YAML reads as text
    assert config.data.max_rows is None
    assert config.training.k_best_of_n == (8, 8)  # of config.yaml


def test_config_yaml_holds_every_key_with_a_comment_and_no_other():
    text = (ROOT / "config.yaml").read_text()

    keys = set(settings.flatten(yaml.safe_load(text)))
    assert {key for key in keys if not key.startswith(settings.OWN)} == set(settings.KEYS)
    for above, line in itertools.pairwise(text.splitlines()):
        if re.match(r"  \w+:", line):
            assert re.search(r" # \S", line) or re.match(r"  # \S", above), line


def test_every_key_refuses_what_it_cannot_be_and_no_setting_can_be_changed():
    for key, value in settings.flatten(make_config()).items():
        if key.startswith(settings.OWN):  # Nobody knows what it can be.
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        for wrong in ["[{a: 1}]"] + is_number * ["-1", ".nan", "many"]:
            assert key in refusal(f"{key}={wrong}")
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        make_config().training.seed = 1


def test_a_key_of_ones_own_is_set_and_read_once_a_file_has_declared_it(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("training: {my_own_word: 0.0}\n")

    config = load_config(["--config", str(own), "training.my_own_word=0.01"])

    assert config.training.my_own_word == 0.01
    assert settings.experiment(config)["training.my_own_word"] == 0.01
    assert "Did you mean training.my_own_word?" in refusal(
        "--config", str(own), "training.my_own_wrod=0.01")
    assert "there is no such key" in refusal("training.my_own_word=0.01")
    own.write_text("sampling: {my_own_word: 0.0}\n")
    assert "there is no such key" in refusal("--config", str(own))


@pytest.mark.parametrize(("argument", "says"), [
    ("training.learning_rte=1", "Did you mean training.learning_rate?"),
    ("word", "section.key=value"),
    ("training.seed=[", "not YAML"),
    ("training.learning_rate=0", "greater than 0"),
    ("training.scale_rewards=std", "'none' or 'group'"),
    ("training.scale_rewards=mean", "changes/maxrl.diff"),
    ("training.ratio=sequence", "changes/gspo.diff"),
    ("training.ratio=cispo", "changes/cispo.diff"),
    ("training.ratio=token", "leave it out"),
    ("training.mask_truncated=true", "changes/overlong-filter.diff"),
    ("sampling.top_p=1.5", "less than or equal to 1"),
    ("run.name=group/one", "pattern"),
    ("training.k_best_of_n=[4,8]", "[G, G]"),
    ("training.decay_steps=49", "training.max_steps=60"),  # The warm-up has 10.
    ("training.learning_type=sil", "[k, n]"),
])
def test_a_mistake_is_named_with_what_to_write(argument, says):
    message = refusal(argument)

    assert says in message
    if says != "[k, n]":  # There the other key has to change.
        assert argument.partition("=")[0] in message


@pytest.mark.parametrize("content", [None, "training: [", "training: 3\n", ""])
def test_a_config_file_that_cannot_be_used_is_named(content, tmp_path):
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_text(content)

    assert str(path) in refusal("--config", str(path))


def test_the_default_name_is_made_of_what_defines_the_experiment_and_nothing_else(monkeypatch):
    name = settings.default_run_name(make_config(), CODE)
    assert re.fullmatch(rf"grpo-[0-9a-f]{{8}}-{CODE}", name)
    for free in ({"training__max_steps": 7}, {"run__dir": "x"}, {"model__check": "warn"}):
        assert settings.default_run_name(make_config(**free), CODE) == name
    assert set(settings.KEYS) - settings.experiment(make_config()).keys() == {
        "model.device", "model.attention", "model.gradient_checkpointing", "model.check",
        "training.max_steps", "training.tokens_per_micro_batch", "training.shard",
        "sampling.max_rows", "validation.every", "checkpoint.every", "run.dir", "run.name",
        "run.code", "logging.mlflow"}
    others = [settings.default_run_name(make_config(**own), CODE) for own in (
        {"model__name": "m"}, {"training__seed": 1}, {"task__reward_weights": {"answer": 1.0}},
        {"data__validation": "x"})]
    assert len({name, *others}) == 5
    # Two ranks that share the same questions of a step are the same experiment.
    monkeypatch.setattr(settings, "WORLD_SIZE", 2)
    assert settings.default_run_name(make_config(training__num_samples_per_step=4), CODE) == name
    assert settings.default_run_name(make_config(), CODE) != name
