"""Settings: three layers, checked, and every mistake answered in one line
that says what to write."""

import itertools
import re

import pydantic
import pytest
import yaml
from conftest import make_config
from processes import ROOT

import main
from machinery import settings
from machinery.errors import UserError


def test_later_layers_win_over_earlier_ones(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("training: {seed: 1, max_steps: 7}\nsampling: {top_k: 5}\n")
    second.write_text("training: {seed: 2, learning_rate: 1e-5}\n")
    config = main.load_config(["--config", str(first), "sampling.top_k=9", "--config", str(second),
                               "data.max_rows=null"])
    assert (config.training.seed, config.training.max_steps, config.sampling.top_k) == (2, 7, 9)
    assert config.training.learning_rate == 1e-5  # which YAML reads as text
    assert config.data.max_rows is None


def test_config_yaml_holds_every_key_with_a_comment_and_no_other():
    text = (ROOT / "config.yaml").read_text()
    keys = {f"{section}.{key}" for section, keys in yaml.safe_load(text).items() for key in keys}
    assert keys == set(settings.flatten(make_config()))
    lines = text.splitlines()
    for above, line in itertools.pairwise(lines):
        if re.match(r"  \w+:", line):
            assert re.search(r" # \S", line) or re.match(r"  # \S", above), line


def test_settings_cannot_be_changed_and_pairs_are_pairs():
    config = make_config()
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.training.seed = 1
    assert config.training.k_best_of_n == (8, 8) and config.training.adam_betas == (0.9, 0.95)


MISTAKES = {
    "training.learning_rte=1": "training.learning_rate", "trainig.seed=1": "training.seed",
    "seed=1": "training.seed", "training.seed=one": "integer", "training.seed=1.0": "integer",
    "training.seed=true": "integer", "training.seed=-1": "greater than or equal to 0",
    "training.max_new_gen_tokens=0": "greater than or equal to 1",
    "training.learning_rate=.nan": "finite number",
    "training.learning_rate=fast": "valid number", "training.learning_rate=0": "greater than 0",
    "training.learning_rate=.inf": "finite number",
    "training.learning_rate=null": "valid number",
    "sampling.temperature=-1": "equal to 0.001", "sampling.top_p=1.5": "less than or equal to 1",
    "training.adam_betas=[0.9]": "Field required", "training.adam_betas=[0.9,1.0]": "less than 1",
    "model.precision=fp8": "'mixed', 'bfloat16' or 'float32'",
    "data.prompt_style=poem": "'base' or 'chat'", "logging.mlflow=1": "boolean",
    "run.name=5": "valid string", "training.k_best_of_n=8": "valid tuple",
    "training.k_best_of_n=[8]": "Field required", "training.k_best_of_n=[4,8]": "[G, G]",
    "training.k_best_of_n=[1,1]": "[G, G]", "training.k_best_of_n=[a,b]": "integer",
    "training.k_best_of_n=[0,0]": "greater than or equal to 1", "training.clip=0.2": "valid tuple",
    "training.clip=[0.2]": "Field required", "training.clip=[0,0.2]": "greater than 0",
    "training.kl_beta=-1": "greater than or equal to 0",
    "training.scale_rewards=std": "'none', 'group' or 'mean'",
    "training.loss_normalizer=mean": "'max_length', 'tokens' or 'sequence'",
    "training.updates_per_batch=0": "greater than or equal to 1",
    "task.reward_weights=answer": "valid dictionary",
    "model.lora_rank=-1": "greater than or equal to 0",
    "task.reward_weights={answer: much}": "valid number",
    "task.reward_weights={}": "at least 1 item", "model.lora_targets=q_proj": "list",
    "data.max_prompt_tokens=0": "greater than or equal to 1",
    "training.learning_type=sil": "[k, n]",
    "training.learning_type=ppo": "'grpo' or 'sil'", "word": "section.key=value", "--fast": "usage",
    "training.seed=[": "not YAML", "training={seed: 1}": "no such key",
    "run.name=group/one": r"^\w[^/]*$", "run.name=..": r"^\w[^/]*$", "run.name=''": r"^\w[^/]*$",
    "run.name=/tmp/a": r"^\w[^/]*$", "run.name=2024": "valid string", "model.name=": "valid string",
    "training.learning_rate=true": "a number is needed here, and not true or false",
    "sampling.temperature=0.0001": "greater than or equal to 0.001",
}


@pytest.mark.parametrize("argument", MISTAKES)
def test_a_mistake_is_named_with_its_value_and_what_to_write(argument):
    with pytest.raises(UserError) as raised:
        main.load_config([argument])
    message = str(raised.value)
    key, _, value = argument.partition("=")
    assert "\n" not in message and MISTAKES[argument] in message
    assert key.lstrip("-") in message or key == "training.learning_type"
    pieces = re.findall(r"[a-z0-9]+", value.replace("null", "none"))
    assert not pieces or any(piece in message.lower() for piece in pieces)


@pytest.mark.parametrize(("content", "says"), [(None, "is not there"), ("training: [", "not YAML"),
                                               ("- 1\n", "sections"), ("training: 3\n", "sections"),
                                               ("", "sections"), ("training:\n", "sections")])
def test_a_config_file_that_cannot_be_used_is_named(tmp_path, content, says):
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=says) as raised:
        main.load_config(["--config", str(path)])
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_the_default_name_is_made_of_what_defines_the_experiment_and_nothing_else(monkeypatch):
    name = settings.default_run_name(make_config())
    assert re.fullmatch(r"grpo-[0-9a-f]{8}", name)
    same = [{"training__max_steps": 7}, {"training__tokens_per_micro_batch": 9},
            {"validation__every": 3}, {"run__dir": "x"}, {"run__name": "y"},
            {"logging__mlflow": True}, {"sampling__max_rows": 3},
            {"model__gradient_checkpointing": True}]
    other = [{"training__seed": 1}, {"model__name": "m"}, {"data__dataset": "d"},
             {"training__num_samples_per_step": 3},
             {"sampling__temperature": 0.9}, {"training__learning_rate": 1.0},
             {"data__num_validation": 9}, {"training__kl_beta": 0.1},
             {"task__reward_weights": {"answer": 1.0}}, {"model__lora_rank": 2},
             {"training__learning_type": "sil", "training__k_best_of_n": [2, 8]}]
    assert {settings.default_run_name(make_config(**overrides)) for overrides in same} == {name}
    assert len({settings.default_run_name(make_config(**overrides)) for overrides in other}
               | {name}) == len(other) + 1
    monkeypatch.setattr(settings, "WORLD_SIZE", 2)  # the same questions per step, shared by two
    assert settings.default_run_name(make_config(training__num_samples_per_step=4)) == name
    assert settings.default_run_name(make_config()) != name


def test_switching_to_sil_takes_the_two_keys_that_config_yaml_names():
    text = (ROOT / "config.yaml").read_text()
    k_best_of_n = re.search(r"for sil set k_best_of_n to (\[\d+, \d+\])", text)[1]
    edited = re.sub(r"learning_type: grpo", "learning_type: sil",
                    re.sub(r"k_best_of_n: \[\d+, \d+\]", f"k_best_of_n: {k_best_of_n}", text))
    overrides = [f"training.{key}={yaml.safe_load(edited)['training'][key]}"
                 for key in ("learning_type", "k_best_of_n")]
    assert main.load_config(overrides).training.learning_type == "sil"
