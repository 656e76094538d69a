"""Would the tests notice? Each mutant is a one-line fault in a copy of the sources. The regular
test that it names has to fail because of it.

    .venv/bin/python tests/mutants.py                     all mutants, one row for each
    .venv/bin/python tests/mutants.py moment checkpoint   those with such a word in them

A row says which test has failed, and after how many seconds."""

import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from processes import ROOT, ranks

COPIED = ("main.py", "countdown.py", "logger.py", "config.yaml", "pyproject.toml", "README.md",
          "CONTRIBUTING.md", "machinery", "tests", "tiny", "examples", "bench", "recipes", "docs")
SECONDS = 90  # A rank that waits for another one for ever has to end, too.

LEARNING, FAMILY, SAMPLING = "test_learning.py", "test_family.py", "test_sampling.py"
FIRST_STEP, LORA = "test_first_step.py", "test_lora.py"
RUN, RESUME = "test_run.py", "test_resume.py"
FAILURES, COUNTDOWN, CONFIG = "test_failures.py", "test_countdown.py", "test_config.py"
MODELS, CODE, DISTILL = "test_models.py", "test_code.py", "test_distill.py"
ADAMW = f"{RUN}::test_a_step_is_adamws_with_the_betas_and_the_decay_of_the_settings"
# The first tests of some files take long, so these mutants name their test.
RANKS = f"{FAMILY}::test_the_gradient_is_the_same_on_any_number_of_ranks"
TOTALS = f"{RUN}::test_sums_and_maxima_are_those_of_all_ranks_on_each"
ORDER = f"{RUN}::test_the_order_of_questions_depends_on_seed_and_epoch_alone"
HELD_OUT = f"{RUN}::test_neither_a_seed_nor_more_data_trains_on_what_was_held_out"
SPLIT = f"{RUN}::test_no_problem_is_in_both_splits_in_whatever_order_of_its_numbers"
GATHERED = f"{RUN}::test_ranks_share_an_evaluation_and_gather_it_in_the_order_of_the_questions"
BY_HAND = f"{RUN}::test_best_of_n_and_all_means_of_an_evaluation_by_hand"
OWN_STATE = f"{RESUME}::test_a_state_of_ones_own_is_the_same_on_all_ranks_and_what_json_knows"
UNDONE = f"{RESUME}::test_best_is_never_of_a_step_that_was_undone"
SAID_ONCE = f"{FAILURES}::test_one_ranks_mistake_is_said_once_and_again_in_torchruns_report"
DIFFERENT = "test_sharding.py::test_ranks_with_different_weights_save_nothing_and_end_in_one_line"


class Mutant(NamedTuple):
    fault: str
    path: str
    right: str  # stands once in the file
    wrong: str
    test: str  # notices it


MUTANTS = [
    # ------------------------------------------------------------ the loss
    Mutant("the sign of the loss", "main.py",
           "return -(objective / normalizer)", "return (objective / normalizer)",
           LEARNING),
    Mutant("no temperature in the loss", "main.py",
           " / self.config.sampling.temperature", "", LEARNING),
    Mutant("tokens shifted by one", "main.py",
           "is_before = is_answer.roll(-1, dims=1)", "is_before = is_answer", LEARNING),
    Mutant("the last piece of logits left out", "machinery/prompts.py",
           "return torch.cat(firsts), torch.cat(seconds)",
           "return torch.cat(firsts[:-1]), torch.cat(seconds[:-1])", LEARNING),
    Mutant("an advantage for the first token alone", "main.py",
           "dtype=torch.float64).expand(self.num_tokens)",
           "dtype=torch.float64).expand(self.num_tokens) * (torch.arange(self.num_tokens) < 1)",
           LEARNING),
    Mutant("padding learned in place of tokens", "machinery/passes.py",
           "torch.arange(ids.shape[1]) < lengths[:, None]",
           "torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]", LEARNING),
    Mutant("positions that count the padding", "machinery/prompts.py",
           "(mask.cumsum(-1) - 1).clamp(min=0)",
           "torch.ones_like(mask, dtype=torch.long).cumsum(-1) - 1", LEARNING),
    Mutant("padding of prompts is attended to", "machinery/prompts.py",
           "whole_mask = torch.cat([prompt_mask, is_rest], 1)",
           "whole_mask = torch.cat([torch.ones_like(prompt_mask), is_rest], 1)", LEARNING),
    Mutant("a shared beginning that stays where padding belongs", "machinery/prompts.py",
           "places = positions(mask)[:, :len(shared)]",
           "places = positions(torch.ones_like(mask))[:, :len(shared)]", LEARNING),
    Mutant("equal rows take the places of others", "machinery/prompts.py",
           "place_of.setdefault(item, len(place_of)) for item in items]",
           "place_of.setdefault(item, len(place_of)) for item in sorted(items)]", LEARNING),
    Mutant("the stop token not learned", "main.py",
           "    objective = advantages * log_probs  # (tokens,)",
           "    advantages[batch[0].num_tokens - 1] = 0\n    objective = advantages * log_probs",
           SAMPLING),
    Mutant("another normalizer", "main.py",
           'normalizer = totals["answers"] * training', 'normalizer = totals["tokens"]  #',
           LEARNING),
    Mutant("a micro-batch's answers as the normalizer of all", "main.py",
           "variant_normalizer(batch, totals, training, log_probs)",
           'variant_normalizer(batch, {**totals, "answers": len(batch)}, training, log_probs)',
           FAMILY),
    Mutant("answers without an advantage not counted", "main.py",
           '"answers": len(answers),', '"answers": len(learned),', LEARNING),
    # ------------------------------------------------------------ ranks and micro-batches
    Mutant("the mean over micro-batches", "main.py",
           "(loss * WORLD_SIZE).backward()", "(loss * WORLD_SIZE / len(micro_batches)).backward()",
           LEARNING),
    Mutant("the mean over ranks", "main.py",
           "(loss * WORLD_SIZE).backward()", "loss.backward()", RANKS),
    Mutant("one rank's answers counted for those of all", "main.py",
           '"answers": len(answers),', '"answers": len(answers) / WORLD_SIZE,', RANKS),
    Mutant("gradients shared at every micro-batch", "main.py",
           "nullcontext() if is_last else policy.no_sync()", "nullcontext()", LEARNING),
    Mutant("no pass of a rank without answers", "machinery/passes.py",
           "batches.append(batch or [MadeUpAnswer()])", "batches += [batch] if batch else []",
           RANKS),
    Mutant("the gradient of the step before stays", "main.py",
           "    policy.zero_grad(set_to_none=False)  # The", "    # Dist",
           LEARNING),
    Mutant("the sum over ranks for the largest of any", "machinery/ranks.py",
           "dist.ReduceOp.MAX", "dist.ReduceOp.SUM", TOTALS),
    Mutant("every rank takes the same questions", "main.py",
           "((run.step - 1) * WORLD_SIZE + RANK) * num_per_rank", "(run.step - 1) * num_per_rank",
           ORDER),
    Mutant("every rank samples with the same random numbers", "machinery/ranks.py",
           "{seed} {step} {RANK} {purpose}", "{seed} {step} {purpose}", SAMPLING),
    # ------------------------------------------------------------ advantages and variants
    Mutant("equal rewards have a rounded mean", "main.py",
           "if max(rewards) == min(rewards):", "if False:", LEARNING),
    Mutant("the standard deviation of a population", "main.py",
           "stdev(answer.reward for answer in group) + 1e-4",
           "stdev(answer.reward for answer in group) * math.sqrt(1 - 1 / len(group)) + 1e-4",
           LEARNING),
    Mutant("the k worst imitated", "main.py",
           "reverse=True)\n    for answer in ranked", "reverse=False)\n    for answer in ranked",
           LEARNING),
    Mutant("answers that earned nothing imitated", "main.py",
           "1.0 if answer.reward > 0 else 0.0", "1.0", LEARNING),
    Mutant("clipping of the wrong side", "main.py",
           "torch.minimum(unclipped", "torch.maximum(unclipped", FAMILY),
    Mutant("a ratio that is always 1", "main.py",
           "if batch[0].old_log_probs is None:", "if True:", FAMILY),
    Mutant("a KL reward, or a teacher, of the wrong sign", "main.py",
           "(reference_log_probs - old_log_probs)", "(old_log_probs - reference_log_probs)",
           FAMILY),
    Mutant("the KL of the loss the other way round", "main.py",
           "log_q = reference_log_probs - log_probs", "log_q = log_probs - reference_log_probs",
           FAMILY),
    # ------------------------------------------------------------ a teacher
    Mutant("rewards that teach beside a teacher", "main.py",
           'if training.learning_type == "grpo":', 'if training.learning_type != "sil":', DISTILL),
    Mutant("a teacher that was exchanged", "machinery/runs.py",
           'self.data["weights of training.teacher"] = checksum(teacher.parameters())', "pass",
           DISTILL),
    Mutant("a reference with the adapters on", "machinery/model.py",
           "        reference.disable_adapters()", "        pass", LORA),
    # ------------------------------------------------------------ the update
    Mutant("an update that is not finite is made", "main.py",
           'if update["non_finite"]:', "if False:", FAMILY),
    Mutant("no limit to the gradient's norm", "main.py",
           "max_norm = training.max_grad_norm or math.inf", "max_norm = math.inf", LEARNING),
    Mutant("a warm-up that begins a step late", "main.py",
           "rising = step / max", "rising = (step - 1) / max", LEARNING),
    Mutant("a sampler that no update reaches", "main.py",
           "    refresh_sampler(run.sampler, run.model)  # By", "    # By", LEARNING),
    Mutant("weights cut to bfloat16 in mixed precision", "machinery/model.py",
           "sampler = frozen_copy(model, type_in_sampler)",
           "sampler = frozen_copy(model.to(HALF_PRECISION), type_in_sampler)", LEARNING),
    # ------------------------------------------------------------ sampling
    Mutant("no temperature in the samples", "main.py",
           "temperature=sampling.temperature,", "temperature=1.0,", SAMPLING),
    Mutant("answers change places when others leave", "machinery/sampling.py",
           "[completion_of_row[row] for row in still_open]", "completion_of_row[:len(still_open)]",
           SAMPLING),
    Mutant("the KV cache of another answer", "machinery/sampling.py",
           "torch.tensor(still_open, device=ids.device)",
           "torch.arange(len(still_open), device=ids.device)", SAMPLING),
    Mutant("one of several stop tokens", "machinery/model.py",
           "            stop_ids.update(eos)", "            stop_ids.add(eos[0])", SAMPLING),
    Mutant("every step samples with the same random numbers", "main.py",
           'random_seed(training.seed, run.step, "train")',
           'random_seed(training.seed, 0, "train")', SAMPLING),
    # ------------------------------------------------------------ questions and evaluation
    Mutant("every epoch in the same order", "machinery/ranks.py",
           "{seed} epoch {epoch}", "{seed} epoch", ORDER),
    Mutant("validation questions are trained on", "machinery/tasks.py",
           "if problem not in not_trained_on:", "if True:", SPLIT),
    Mutant("a split that depends on the seed", "machinery/tasks.py",
           "chosen = in_fixed_order(candidates)",
           "chosen = in_fixed_order(candidates)[config.training.seed:]", HELD_OUT),
    Mutant("an evaluation of training questions", "main.py",
           "row in run.validation_rows[RANK",
           "row in run.training_rows[:len(run.validation_rows)][RANK", GATHERED),
    Mutant("an evaluation in the order of another rank", "main.py",
           "gathered[i % WORLD_SIZE][i // WORLD_SIZE]",
           "gathered[-1 - i % WORLD_SIZE][i // WORLD_SIZE]", GATHERED),
    Mutant("best of n chosen by what it does not know", "machinery/metrics.py",
           "best_answer = max(group, key=lambda answer: answer.reward)",
           "best_answer = max(group, key=lambda answer: answer.reward_parts[task.SOLVED])",
           BY_HAND),
    Mutant("a worse model replaces the best one", "main.py",
           "    is_best = quality > run.best", "    is_best = True", UNDONE),
    Mutant("no evaluation after the last step", "machinery/settings.py",
           "step % every == 0 or step == config.training.max_steps", "step % every == 0", LEARNING),
    # ------------------------------------------------------------ resuming
    Mutant("a checkpoint that forgets a moment of AdamW", "machinery/runs.py",
           "in optimizer.state[parameter].items():",
           "in [*optimizer.state[parameter].items()][:2]:", RESUME),
    Mutant("a resume that repeats a step", "machinery/runs.py",
           "        return restored\n",
           '        return {**restored, "step": max(0, restored["step"] - 1)}\n', RESUME),
    Mutant("a state of one's own that differs between ranks", "machinery/runs.py",
           "if any(other != own_state for other in gather(own_state)):", "if False:", OWN_STATE),
    Mutant("a resume that forgets how good the best model is", "machinery/runs.py",
           'if not (self.path / "best").exists():', "if True:", RESUME),
    Mutant("a best model of a step that was undone", "machinery/runs.py",
           "if step_of(path) != step:", "if False:", UNDONE),
    Mutant("a best model that is gone when a resume goes back to it", "machinery/runs.py",
           "    if before(model).exists():\n        throw_away(model)\n    elif model.exists():\n",
           "    if model.exists():\n        throw_away(before(model))\n", UNDONE),
    Mutant("a resume with another number of questions a step", "machinery/settings.py",
           '    settings["training.num_samples_per_step"] *= WORLD_SIZE\n', "", CONFIG),
    Mutant("a first evaluation that no checkpoint holds", "main.py",
           "        evaluate_and_keep_best(run)\n        save(run)\n",
           "        evaluate_and_keep_best(run)\n", FAILURES),
    Mutant("a resume on rank 0 alone", "machinery/sharding.py",
           "    dist.broadcast(full, 0)\n", "", RESUME),
    Mutant("a resume that leaves later lines in the logs", "machinery/runs.py",
           "file.truncate(sizes[name])", "pass", RESUME),
    Mutant("a resume from the oldest checkpoint", "machinery/runs.py",
           "(len(path.name), path.name), reverse=True)", "(len(path.name), path.name))", RESUME),
    Mutant("a resume that samples from the model as it was loaded", "main.py",
           "        refresh_sampler(sampler, model)\n    return Run(", "    return Run(", RESUME),
    Mutant("a resume with other settings", "machinery/runs.py",
           "    if changes:", "    if False:", FAILURES),
    Mutant("two runs in one folder", "machinery/runs.py",
           "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass", FAILURES),
    # ------------------------------------------------------------ a run's code and data
    Mutant("a named run that other code has made", "machinery/runs.py",
           "if not self.code_changed or", "if True or", CODE),
    Mutant("code that differs between ranks", "machinery/runs.py",
           "if len(set(gather(code_digest))) > 1:", "if False:", CODE),
    Mutant("ranks with different settings", "machinery/runs.py",
           "first.get(key) != other.get(key):", "False:", CODE),
    Mutant("other weights below adapters", "machinery/runs.py",
           "if is_reference or not weight.requires_grad", "if is_reference", DISTILL),
    Mutant("data that have changed", "machinery/runs.py",
           'self.state.get("data", self.data)', "self.data", CODE),
    Mutant("data that differ between ranks", "machinery/runs.py",
           "if any(data != self.data for data in gather(self.data)):", "if False:", CODE),
    # ------------------------------------------------------------ what a run says
    Mutant("a user's mistake that reports success", "machinery/ranks.py",
           "    return 2\n", "    return 0\n", FAILURES),
    Mutant("a mistake said by every rank", "machinery/ranks.py",
           "raise SharedError(message) from cause", "raise UserError(message) from cause",
           SAID_ONCE),
    Mutant("metrics of rank 0 for those of all", "machinery/metrics.py",
           "{name: total / WORLD_SIZE for name, total in totals.items()}", "dict(means)",
           FIRST_STEP),
    Mutant("betas of AdamW swapped", "main.py",
           "betas=training.adam_betas", "betas=training.adam_betas[::-1]", ADAMW),
    Mutant("log-probabilities while sampling of the token before", "machinery/sampling.py",
           "cross_entropy(logits, sequences[:, -1]", "cross_entropy(logits, sequences[:, -2]",
           FIRST_STEP),
    # ------------------------------------------------------------ the task and the settings
    Mutant("a number used twice", "countdown.py",
           "used == given", "set(used) == set(given)", COUNTDOWN),
    Mutant("weights of the reward's parts ignored", "main.py",
           "weight * answer.reward_parts[part]", "answer.reward_parts[part]", RUN),
    # ------------------------------------------------------------ ends, restarts, prompts
    Mutant("a SIGTERM that waits for the end of C code", "machinery/ranks.py",
           "    faulthandler.enable(2)  #",
           "    __import__('signal').signal(15, lambda *_: sys.exit(1))  #",
           "test_dead_ranks.py"),
    Mutant("a restart that finds the addresses of dead ranks", "machinery/ranks.py",
           'dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)', "store",
           f"{FAILURES}::test_after_a_restart_the_ranks_find_no_address_from_before"),
    Mutant("weights that one rank changes before a save", "main.py",
           "        check_weights(run",
           "        next(run.model.parameters()).data.add_(RANK)\n"
           "        check_weights(run", RESUME),
    Mutant("ranks with different weights that are saved", "machinery/runs.py",
           "if len(set(gather(checksum(weights)))) > 1:", "if False:", DIFFERENT),
    Mutant("learning in the mode that sampling leaves", "main.py",
           "    policy.train()  #", "    #", LEARNING),
    # ------------------------------------------------------------ models that people bring
    Mutant("a check that refuses nothing", "machinery/check.py",
           "if difference <= allowed:", "if difference <= 99:", MODELS),
]


def mutated_copy(mutant: Mutant, folder: Path) -> None:
    """Makes a copy of the repository with this fault."""
    folder.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "runs")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    path = folder / mutant.path
    source = path.read_text()
    assert source.count(mutant.right) == 1, f"{mutant.fault}: {mutant.right!r} has to stand once"
    path.write_text(source.replace(mutant.right, mutant.wrong))


def run_test_of(folder: str, test: str) -> None:
    """In a process that knows nothing yet of these sources."""
    import pytest

    own = {str(ROOT), *(str(ROOT / name) for name in ("tests", "examples", "bench"))}
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{ROOT}/tests"):
            del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path and path not in own]
    # Ranks that the tests start import the main module, which would bring these sources back.
    sys.modules["__main__"] = type(sys)("__main__")
    code = pytest.main(["--numprocesses=0", "--rootdir", folder, "-rfE", "-x", "-p", "no:randomly",
                        "-p", "no:cacheprovider", f"--timeout={SECONDS}", test])
    sys.stdout.flush()
    os._exit(code)


def first_failure(mutant: Mutant) -> tuple[str | None, str]:
    """Returns the test that has failed, or None, and what pytest has said."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "copy")
        mutated_copy(mutant, folder)
        test = str(folder / "tests" / mutant.test)
        result = ranks(1, run_test_of, str(folder), test, cwd=folder)
    output = result.stdout + result.stderr
    pattern = r"^(?:FAILED|ERROR) \S*?(test_\w+\.py\S*.*?)(?: - .*)?$"
    failed = re.search(pattern, output, re.MULTILINE)
    if result.returncode == 0:
        return None, output
    assert result.returncode == 1 and failed, output
    return failed[1], output


def main() -> None:
    words = sys.argv[1:] or [""]
    chosen = [mutant for mutant in MUTANTS if any(word in " ".join(mutant) for word in words)]
    num_noticed = 0
    for mutant in chosen:
        started = time.monotonic()
        failed, _ = first_failure(mutant)
        seconds = time.monotonic() - started
        num_noticed += failed is not None
        print(f"| {mutant.fault} | {mutant.path} | {failed or 'NOT NOTICED'} | {seconds:.0f} s |",
              flush=True)
    print(f"{num_noticed} of {len(chosen)} are noticed")


if __name__ == "__main__":
    main()
