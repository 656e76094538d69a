"""A teacher in place of a reward: the right gradient, the right teacher, and what a run says."""

import json
import shutil

import pytest
import torch
from conftest import (
    DISTILL,
    QUESTIONS,
    SMALL,
    TEMPERATURE,
    L,
    as_numbers,
    as_sampled_from,
    gradient,
    learning_config,
    make_config,
    make_model,
    make_policy,
    make_trajectories,
    plain_logprobs,
    read_jsonl,
    reference_of,
    relative_error,
    start,
)
from processes import ROOT
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import machinery.model
import main
from logger import step_line
from machinery.errors import UserError
from machinery.metrics import change_metrics
from machinery.model import find_stop_ids, load_model, load_teacher, make_reference
from machinery.tasks import Question, load_questions, load_task

TINY = "tiny/model"


# ---------------------------------------------------------------- the gradient

FEW = 5  # tokens in the vocabulary of the enumeration
LONGEST = 3  # tokens in an answer
STOP = 0


def few_tokens(model, prefix: list[int]) -> torch.Tensor:
    """Log-probabilities of the first few tokens after a prefix, as if there were no others."""
    return (model(torch.tensor([prefix])).logits[0, -1, :FEW] / TEMPERATURE).log_softmax(-1)


def of_tokens(model, prompt: list[int], answer: tuple) -> torch.Tensor:
    """Log-probabilities of the tokens of an answer, (tokens,)."""
    found = []
    for t, token in enumerate(answer):
        found.append(few_tokens(model, [*prompt, *answer[:t]])[token])
    return torch.stack(found)


def all_answers(prefix: tuple = ()):
    """Every answer: it ends with STOP, or after LONGEST tokens."""
    if len(prefix) == LONGEST or (prefix and prefix[-1] == STOP):
        yield prefix
        return
    for token in range(FEW):
        yield from all_answers((*prefix, token))


@pytest.mark.mathematics
def test_the_expected_gradient_is_that_of_kl_at_each_token_with_what_came_before_held_fixed():
    """Over all answers that a student with a small vocabulary can write."""
    student = make_model("gpt2", torch.float64)
    teacher = reference_of(student)
    prompt = [5, 6, 7]
    mean_objective = torch.zeros((), dtype=torch.float64)
    reached = {}  # {what comes before a token: how likely the student gets there}
    for answer in all_answers():
        log_probs = of_tokens(student, prompt, answer)
        trajectory = main.Trajectory(Question({}, prompt), list(answer), "", False)
        trajectory.reference_log_probs = of_tokens(teacher, prompt, answer).detach()
        trajectory.old_log_probs = log_probs.detach()
        probability = log_probs.sum().exp().item()
        advantages = main.reference_advantages([trajectory], make_config(**DISTILL).training)
        mean_objective = mean_objective + probability * (advantages * log_probs).sum()
        for t in range(len(answer)):
            reached[answer[:t]] = reached.get(answer[:t], 0.0) + probability
    sum_of_kl = torch.zeros((), dtype=torch.float64)
    for prefix, probability in reached.items():
        p = few_tokens(student, [*prompt, *prefix])
        q = few_tokens(teacher, [*prompt, *prefix])
        sum_of_kl = sum_of_kl + probability * (p.exp() * (p - q)).sum()

    (-mean_objective).backward()
    of_samples = gradient(student)
    student.zero_grad()
    sum_of_kl.backward()

    assert reached[()] == pytest.approx(1)
    assert relative_error(of_samples, gradient(student)) < 1e-9


@pytest.mark.mathematics
def test_the_change_is_measured_towards_the_teacher_and_not_along_rewards(one_rank):
    config = learning_config(training__learning_rate=1e-4, **DISTILL)
    model = make_model("gpt2", torch.float64)
    run = make_policy(model, config, gradient_as_bucket_view=True)
    run.reference = main.Policy(make_reference(reference_of(model), config), config)
    answers = as_sampled_from(model, make_trajectories())
    for answer in answers:
        answer.advantage = 0.0
    before = as_numbers(plain_logprobs(model, answers, TEMPERATURE))
    wanted = as_numbers(plain_logprobs(reference_of(model), answers, TEMPERATURE))

    metrics = main.learn(run, answers)[-1]
    groups = [answers[i:i + 2] for i in range(0, len(answers), 2)]
    measured = change_metrics(run.policy.module, groups, answers, config.training)

    after = as_numbers(plain_logprobs(model, answers, TEMPERATURE))
    total = towards = lower = 0.0
    for old_of_answer, new_of_answer, teachers in zip(before, after, wanted, strict=True):
        for old, new, teacher in zip(old_of_answer, new_of_answer, teachers, strict=True):
            total += abs(new - old)
            towards += abs(new - old) * ((new - old) * (teacher - old) > 0)
            lower += teacher < old
    assert measured["change_as_meant"] == pytest.approx(towards / total, rel=1e-5)
    assert measured["change_as_meant"] > 0.6
    num_tokens = sum(answer.num_tokens for answer in answers)
    assert metrics["teacher_lower"] == pytest.approx(lower / num_tokens)


def test_rewards_teach_nothing():
    config = learning_config(training__k_best_of_n=[1, 1], **DISTILL)
    answers = make_trajectories(QUESTIONS)
    for i, answer in enumerate(answers):
        answer.reward, answer.advantage = float(i), 0.0

    counted = main.compute_advantages([answers[:4], answers[4:]], config.training)

    assert counted == answers
    assert all(answer.advantage == 0.0 for answer in answers)
    assert all(main.is_learned_from(answer, config.training) for answer in answers)


# ---------------------------------------------------------------- the teacher

def edited(folder, change):
    """A copy of the tiny model with something else in it."""
    shutil.copytree(ROOT / TINY, folder)
    change(folder)
    return folder


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def swap_two_tokens(folder):
    def change(tokenizer):
        vocabulary = tokenizer["model"]["vocab"]
        one, other = [token for token in vocabulary if len(token) == 1][:2]
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    edit_json(folder / "tokenizer.json", change)


def stop_elsewhere(folder):
    edit_json(folder / "generation_config.json", lambda config: config.update(eos_token_id=7))


def drop_rows(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(model.config.vocab_size - 1)
    model.save_pretrained(folder)


def lose_weights(folder):
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(("change", "says"), [
    (swap_two_tokens, "and model.name have different tokens, such as"),
    (stop_elsewhere, "ends its answers with the tokens"),
    (drop_rows, "use a teacher that knows at least as many"),
    (lose_weights, "cannot be loaded"),
])
def test_a_wrong_teacher_is_one_line(change, says, tmp_path):
    teacher = edited(tmp_path / "teacher", change)
    config = make_config(**{**DISTILL, "training__teacher": str(teacher)})
    model, tokenizer = load_model(make_config())

    with pytest.raises(UserError, match=says) as caught:
        load_teacher(model, tokenizer, config)

    assert "training.teacher=" in str(caught.value)


def test_a_teacher_of_another_size_with_more_rows_teaches_and_nothing_is_said_of_rewards(
        tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(ROOT / "tiny" / "lab" / "model")
    model.resize_token_embeddings(model.config.vocab_size + 8)
    teacher = tmp_path / "teacher"
    shutil.copytree(ROOT / "tiny" / "lab" / "model", teacher)
    model.save_pretrained(teacher)

    assert start([*SMALL, f"run.dir={tmp_path}", "training.learning_type=distill",
                  f"training.teacher={teacher}", "training.k_best_of_n=[1,1]",
                  "training.max_steps=2"]) == 0

    said = " ".join(capsys.readouterr().out.split())
    assert "of the total change is toward the teacher" in said
    assert "KL(student || teacher) is" in said
    assert "groups" not in said and "no signal" not in said
    steps = [entry for entry in read_jsonl(tmp_path / "a" / "metrics.jsonl") if "kl" in entry]
    assert len(steps) == 2
    assert all(step["kl"] > 0 and step["updated"] == 1 for step in steps)


def test_a_quantized_teacher_is_one_line(monkeypatch):
    config = make_config(**{**DISTILL, "training__teacher": TINY})
    student, tokenizer = load_model(make_config())
    load_weights = machinery.model.load_weights

    def load_quantized(*arguments):
        model, loading_info = load_weights(*arguments)
        model.is_quantized = True
        return model, loading_info

    monkeypatch.setattr(machinery.model, "load_weights", load_quantized)
    with pytest.raises(UserError, match="training.teacher='.*' is quantized"):
        load_teacher(student, tokenizer, config)


def test_a_teacher_may_know_more_tokens_than_the_student():
    config = make_config(**{**DISTILL, "training__teacher": TINY})
    student, tokenizer = load_model(make_config())
    teacher, its_tokenizer = load_model(make_config())
    its_tokenizer.add_tokens(["<new>"])
    teacher.resize_token_embeddings(len(its_tokenizer))

    machinery.model.check_tokens(teacher, its_tokenizer, student, tokenizer, TINY)

    with pytest.raises(UserError, match="different tokens, such as '<new>'"):
        machinery.model.check_tokens(student, tokenizer, teacher, its_tokenizer, TINY)
    assert config.training.has_reference


@pytest.mark.parametrize(("key", "more", "step", "code"), [
    ("training.teacher", ["training.learning_type=distill"], 1, 2),
    ("model.name", ["model.lora_rank=2"], 1, 2),     # The adapters' base isn't in a checkpoint.
    ("model.name", ["training.kl_beta=0.1"], 1, 2),  # Neither is the reference.
    ("model.name", [], 0, 2),                        # At step 0 no weights are.
    ("model.name", [], 1, 0)])                       # All of these weights are.
def test_a_run_resumes_with_the_weights_that_it_began_with(
        key, more, step, code, tmp_path, capsys):
    model = edited(tmp_path / "model", lambda folder: None)
    command = [*SMALL, f"run.dir={tmp_path}", *more, f"{key}={model}"]
    assert start([*command, f"training.max_steps={step}"]) == 0
    weights = load_file(model / "model.safetensors")
    save_file({name: 1.01 * weight for name, weight in weights.items()},
              model / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()

    assert start([*command, "training.max_steps=2"]) == code

    says = f"weights of {key}: "
    assert (says in capsys.readouterr().err) == (code == 2)


def test_a_step_without_anything_to_learn_and_one_that_is_not_finite_are_told(
        tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(main, "is_learned_from", lambda answer, training: False)
    assert start([*SMALL, f"run.dir={tmp_path}", "training.learning_type=distill",
                  "training.teacher=tiny/lab/model", "training.max_steps=1"]) == 0

    said = capsys.readouterr().out
    assert "nothing to learn from" in said and "KL(student || teacher) is n/a" in said
    metrics = read_jsonl(tmp_path / "a" / "metrics.jsonl")[1]
    spoiled = {**metrics, "kl": None, "teacher_lower": 0.0, "non_finite": 1}
    assert "gradient not finite" in step_line(1, spoiled)


def test_a_teacher_that_is_the_student_is_named(tmp_path, capsys):
    assert start([*SMALL, f"run.dir={tmp_path}", "training.learning_type=distill",
                  "training.teacher=tiny/model", "training.max_steps=1"]) == 0

    assert "! the teacher gives the same probabilities" in capsys.readouterr().out


@pytest.mark.parametrize(("precision", "dtype"), [
    ("float32", torch.float32), ("mixed", torch.bfloat16), ("bfloat16", torch.bfloat16)])
def test_a_teacher_has_no_masters_no_adapters_and_no_gradient(precision, dtype):
    config = make_config(**{**DISTILL, "training__teacher": TINY, "model__precision": precision,
                            "model__lora_rank": 4})
    model, tokenizer = load_model(config)

    teacher = load_teacher(model, tokenizer, config)

    assert {parameter.dtype for parameter in teacher.parameters()} == {dtype}
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert not any("lora" in name for name, _ in teacher.named_parameters())
    assert find_stop_ids(teacher, tokenizer) == find_stop_ids(model, tokenizer)


@pytest.mark.parametrize(("keys", "says"), [
    ({"training__learning_type": "distill"}, "set training.teacher to a folder"),
    ({"training__teacher": TINY}, "set training.learning_type to distill"),
    ({**DISTILL, "training__kl_beta": 0.1}, "set it to 0.0 with distill"),
    ({**DISTILL, "training__kl_in": "loss"}, "set it to reward with distill"),
    ({**DISTILL, "training__scale_rewards": "group"}, "set it to none with distill"),
    ({**DISTILL, "training__k_best_of_n": [1, 2]}, "or \\[1, 1\\] for distill"),
])
def test_keys_that_do_not_go_with_a_teacher_are_refused(keys, says):
    with pytest.raises(UserError, match=says):
        make_config(**keys)


def test_an_answer_needs_room_in_the_teacher_too(tmp_path):
    teacher = edited(tmp_path / "teacher", lambda folder: edit_json(
        folder / "config.json", lambda config: config.update(max_position_embeddings=L)))
    config = make_config(**{**DISTILL, "training__teacher": str(teacher)})
    model, tokenizer = load_model(config)
    task = load_task(config)

    with pytest.raises(UserError, match=f"exceeds the {L} that"):
        teacher = load_teacher(model, tokenizer, config)
        load_questions(task, model, teacher, tokenizer, config)
