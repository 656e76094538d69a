"""Whether the tests of the mathematics would notice: each wrong formula is put into a copy of
main.py and machinery/, and a test must fail on it, by an assertion and not by a crash. (One is left
out: gradients that ranks share at every micro-batch. Where one rank has more of those than another
it waits for ever, so the test of ranks ends by its time limit.)"""

import os
import re
import shutil
import sys

import pytest
from processes import ROOT, ranks

sys.path.append(str(ROOT / "examples"))
from exercise import copy_all_but_main

pytestmark = pytest.mark.soak
SOURCES = [ROOT / "main.py", *sorted((ROOT / "machinery").glob("*.py"))]
CHANGE = ("test_first_step.py::"
          "test_the_change_of_log_pi_is_that_from_the_models_logits_before_and_after")
GAP = ("test_first_step.py::"
       "test_answers_really_sampled_show_no_gap_and_those_of_another_policy_do")
LOSS = ("test_learning.py::test_loss_and_gradient_equal_the_plain_formula_for_any_micro_batch_size"
        "[50-dtype0]")
FAMILY = "test_family.py::test_loss_and_gradient_of_each_published_variant_equal_the_plain_formula"
RATIO = "test_family.py::test_a_second_update_with_another_ratio_equals_the_plain_formula"
RANKS = "test_family.py::test_the_gradient_is_the_same_on_any_number_of_ranks[all learn]"
SAMPLES = ("test_sampling.py::test_samples_follow_the_models_softmax_whatever_its_generation_config"
           "_says[0.6-generate]")
# what is wrong: (what one of the sources says, what it then says, the test that notices)
WRONG = {
    "the sign": ("return -(advantages * token_log_probs", "return (advantages * token_log_probs",
                 LOSS),
    "the sign of a variant": ("return -(objective / normalizer)", "return (objective / normalizer)",
                              f"{FAMILY}[GRPO-no KL-unclipped-1-dtype0]"),
    "the default where a variant is meant": (
        "has_ratio or training.kl_beta or", "training.kl_beta or",
        f"{FAMILY}[Dr. GRPO-no KL-unclipped-2-dtype0]"),
    "no temperature in the loss": ("(logits / self.temperature).log_softmax(-1)",
                                   "logits.log_softmax(-1)", LOSS),
    "no temperature in the samples": ("temperature=config.sampling.temperature,",
                                      "temperature=1.0,", SAMPLES),
    "top_k of the model's own": ("top_k=config.sampling.top_k,", "top_k=1,", SAMPLES),
    "tokens off by one": ("completion_ids[completion_mask]",
                          "completion_ids.roll(1, 1)[completion_mask]", LOSS),
    "padding in place of tokens": (
        "completion_mask = torch.arange(time, device=device) < lengths[:, None]",
        "completion_mask = torch.arange(time, device=device) >= time - lengths[:, None]", LOSS),
    "padding counted among the tokens": (
        "num_own_tokens = sum(answer.num_tokens for answer in answers)",
        "num_own_tokens = len(answers) * max(answer.num_tokens for answer in answers)",
        f"{FAMILY}[DAPO-no KL-unclipped-1-dtype0]"),
    "positions that count the padding": (
        "(attention_mask.cumsum(-1) - 1).clamp(min=0)",
        "torch.ones_like(attention_mask, dtype=torch.long).cumsum(-1) - 1",
        ("test_learning.py::test_a_rows_log_probabilities_do_not_depend_on_the_rows_beside_it"
         "[False-gpt2]")),
    "the stop token skipped": (
        "return -(advantages * token_log_probs",
        ("return -(advantages * torch.cat([torch.arange(answer.num_tokens) < answer.num_tokens - 1 "
         "for answer in batch]) * token_log_probs"),
        ("test_sampling.py::"
         "test_the_stop_token_is_trained_on_and_padding_is_not_where_both_are_one_id")),
    "another normalizer": ("normalizer = num_answers * training.max_new_gen_tokens",
                           "normalizer = num_tokens", LOSS),
    "another normalizer of a variant": (
        "return num_answers * training.max_new_gen_tokens", "return num_tokens",
        f"{FAMILY}[Dr. GRPO-no KL-unclipped-2-dtype0]"),
    "each answer's length, but not their number": (
        "variant_normalizer(lengths, num_answers,", "variant_normalizer(lengths, len(batch),",
        f"{FAMILY}[GRPO-no KL-unclipped-1-dtype0]"),
    "skipped rows not counted among the answers": (
        "num_answers = len(answers) * WORLD_SIZE", 'num_answers = int(totals["learned"])', LOSS),
    "the mean over micro-batches": ("(loss * WORLD_SIZE).backward()",
                                    "(loss * WORLD_SIZE / len(batches)).backward()", LOSS),
    "the mean over ranks": ("(loss * WORLD_SIZE).backward()", "loss.backward()", RANKS),
    "one rank's batch for that of all": ("num_answers = len(answers) * WORLD_SIZE",
                                         "num_answers = len(answers)", RANKS),
    "clipping the wrong side": ("torch.minimum(unclipped", "torch.maximum(unclipped",
                                f"{FAMILY}[DAPO-no KL-clipped-2-dtype0]"),
    "low and high exchanged": ("clamp(1 - low, 1 + high)", "clamp(1 - high, 1 + low)",
                               f"{FAMILY}[DAPO-no KL-clipped-2-dtype0]"),
    "a ratio that is always 1": ("if batch[0].old_log_probs is None:", "if True:",
                                 f"{FAMILY}[DAPO-no KL-unclipped-2-dtype0]"),
    "the ratio of a sum in place of a mean": (
        "of_answer.mean().expand_as(of_answer)", "of_answer.sum().expand_as(of_answer)",
        f"{RATIO}[GSPO-no KL-unclipped-dtype0]"),
    "a weight that is not held constant": (
        "ratio.detach().clamp(max=1 + high)", "ratio.clamp(max=1 + high)",
        f"{RATIO}[CISPO-no KL-unclipped-dtype0]"),
    "a weight with a lower bound": (
        "ratio.detach().clamp(max=1 + high)", "ratio.detach().clamp(1 - low, 1 + high)",
        f"{RATIO}[CISPO-no KL-clipped-dtype0]"),
    "a KL reward that is not held constant": (
        "(token_log_probs - reference_log_probs).detach()",
        "(token_log_probs - reference_log_probs)", f"{FAMILY}[GRPO-KL-unclipped-1-dtype0]"),
    "a KL reward of the wrong sign": (
        "advantages - training.kl_beta * kl_in", "advantages + training.kl_beta * kl_in",
        f"{FAMILY}[GRPO-KL-unclipped-1-dtype0]"),
    "the published KL where its own gradient is meant": (
        "(token_log_probs - reference_log_probs).detach()",
        "-torch.expm1(reference_log_probs - token_log_probs).detach()",
        f"{FAMILY}[GRPO-KL-unclipped-1-dtype0]"),
    "the KL the other way round": (
        "log_ratio = reference_log_probs - token_log_probs",
        "log_ratio = token_log_probs - reference_log_probs",
        f"{FAMILY}[GRPO-KL in the loss-unclipped-1-dtype0]"),
    "advantages over the largest reward": (
        "sum(abs(reward) for reward in rewards) / len(rewards)",
        "max(abs(reward) for reward in rewards)",
        "test_family.py::test_advantages_over_the_mean_are_those_of_maxrl"),
    "the reference with the adapters on": (
        "        as_loaded.disable_adapters()", "        pass",
        ("test_lora.py::"
         "test_only_the_adapters_learn_and_the_kl_term_measures_from_the_model_without_them")),
    "a stale sampler": (
        "copied.copy_(unsharded(parameter, copied.dtype))", "pass",
        ("test_learning.py::"
         "test_mixed_precision_keeps_float32_masters_and_samples_from_a_bfloat16_copy")),
    "a sampler that no update reaches": (
        "    refresh_sampler(run.sampler, run.model)\n    return updates", "    return updates",
        "test_learning.py::test_after_each_update_the_sampler_has_the_new_weights[mixed]"),
    "a mean of one less": (
        "mean_reward = sum(rewards) / len(rewards)",
        "mean_reward = sum(rewards) / (len(rewards) - 1)",
        "test_learning.py::test_the_advantage_is_the_reward_less_the_mean_of_its_group"),
    "the deviation of a population": (
        "stdev(rewards) + 1e-4", "stdev(rewards) * math.sqrt(1 - 1 / len(rewards)) + 1e-4",
        ("test_family.py::"
         "test_scaled_advantages_are_those_of_grpo_and_still_exactly_zero_without_spread")),
    "a change that is meant only where it is rewarded": (
        "change * advantage > 0", "change > 0", f"{CHANGE}[{{}}]"),
    "a change of answers with no advantage": (
        "if answer.advantage != 0:", "if True:", f"{CHANGE}[{{'training__kl_beta': 0.04}}]"),
    "a gap that is chance": (
        'abs(sums["excess"]) - 4 * math.sqrt(sums["squares"])', 'abs(sums["excess"])', GAP),
    "a gap of one sign": ('abs(sums["excess"]) - 4', 'sums["excess"] - 4', GAP),
    "truncated answers learned all the same": (
        "training.mask_truncated and answer.is_truncated", "False and answer.is_truncated", RANKS),
}


def run_tests_of(folder, test):
    """In a process that knows nothing yet of these sources."""
    import pytest

    for name in [name for name, module in sys.modules.items()
                 if (getattr(module, "__file__", None) or "").startswith(f"{ROOT}/tests")]:
        del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path not in {
        "", str(ROOT), *(str(ROOT / name) for name in ("tests", "examples", "bench"))}]
    code = pytest.main(["--numprocesses=0", "--rootdir", str(folder), "-rf", "-p",
                        "no:cacheprovider", "-m", "", test])
    sys.stdout.flush()
    os._exit(code)


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_formula_is_noticed(what, tmp_path):
    right, wrong, test = WRONG[what]
    folder = tmp_path / "copy"
    copy_all_but_main(folder)
    shutil.copy(ROOT / "main.py", folder)
    path, = [path for path in SOURCES for _ in range(path.read_text().count(right))]
    (folder / path.relative_to(ROOT)).write_text(path.read_text().replace(right, wrong))
    result = ranks(1, run_tests_of, folder, str(folder / "tests" / test), cwd=folder)
    assert (result.returncode == 1
            and re.search(r"^1 failed", result.stdout, re.MULTILINE)), result.stdout + result.stderr
    assert (re.search(r"^E +(assert |AssertionError)", result.stdout, re.MULTILINE)
            and "returncode" not in "".join(
                re.findall(r"^E .*", result.stdout, re.MULTILINE))), result.stdout
