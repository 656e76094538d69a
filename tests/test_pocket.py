"""examples/pocket.py learns from main.py's answers as main.py does."""

import copy

import pocket
import pytest
import torch
from conftest import gradient, make_config, relative_error
from processes import ranks
from silent import NoFolder, SilentLog
from torch.nn.parallel import DistributedDataParallel

import main
from machinery.passes import pad_left, pad_right
from machinery.ranks import RANK, end_process, join, leave_group

L = 64


def learn_both_ways():
    """Each rank learns from answers of its own to two questions."""
    join()
    pocket.MAX_TOKENS = L
    config = make_config(training__max_new_gen_tokens=L, training__num_samples_per_step=2,
                         training__max_grad_norm=None, data__max_rows=500, data__num_validation=2,
                         model__precision="float32")
    run = main.prepare(config, NoFolder(step=1), SilentLog())
    torch.manual_seed(RANK)
    groups = main.rollout(run, main.questions(run), pocket.GROUP_SIZE, config.sampling, "sample")
    answers = main.compute_advantages(groups, config.training)
    assert len({answer.num_tokens for answer in answers}) > 1
    assert any(answer.advantage for answer in answers)

    run.model.double()
    prompts, is_prompt = pad_left([answer.prompt_ids for answer in answers], run.model.device)
    completions, is_answer = pad_right([answer.completion_ids for answer in answers],
                                       run.model.device)
    policy = DistributedDataParallel(copy.deepcopy(run.model))
    rewards = torch.tensor([answer.reward for answer in answers])
    pocket.policy_gradient(
        policy, torch.cat([prompts, completions], 1), torch.cat([is_prompt, is_answer], 1).long(),
        prompts.shape[1], rewards)

    run.policy = DistributedDataParallel(main.Policy(run.model, config))
    run.optimizer = torch.optim.SGD(run.model.parameters())  # AdamW has a state in float32.
    main.learn(run, answers)
    assert relative_error(gradient(policy), gradient(run.model)) < 1e-6
    leave_group()
    end_process(0)


@pytest.mark.house
@pytest.mark.mathematics
def test_the_gradient_of_the_pocket_version_is_that_of_main_py():
    result = ranks(2, learn_both_ways)

    assert result.returncode == 0, result.stderr
