"""A rank that dies takes the others along, whatever they do, and torchrun starts all again."""

import json
import signal

import pytest
from conftest import SMALL, interrupted, outcome, uninterrupted
from processes import ROOT, torchrun

from machinery.errors import KILLED

STEPS = ["training.max_steps=2", "validation.every=2"]
# In step 2, while the others are in C code.
STRIKE = {"rank": 0, "point": "sampling", "passing": 2, "how": "kill one, others busy"}


@pytest.mark.parametrize(("num_ranks", "strike", "more"), [
    (2, {**STRIKE, "rank": 1}, []),
    pytest.param(3, {"rank": 2, "point": "learning", "how": "kill one"}, ["training.shard=true"],
                 marks=pytest.mark.soak)], ids=["busy in C", "waiting for the dead rank"])
def test_when_a_rank_is_killed_the_others_end_by_themselves_whatever_they_do(
        num_ranks, strike, more, tmp_path):
    """When one rank has died, torchrun sends SIGTERM to the others, and so does `ranks`. Nothing in
    a rank may hold that up. `ranks` kills one that resists after SECONDS_TO_END."""
    result = interrupted(num_ranks, strike, tmp_path, *STEPS, *more)

    assert result.codes.pop(strike["rank"]) == -signal.SIGKILL
    assert -signal.SIGKILL not in result.codes  # None has resisted.
    assert 0 not in result.codes and not (tmp_path / "a" / "summary.json").exists()


def struck_under_torchrun(num_ranks, folder, *arguments, torchrun_options=()):
    return torchrun(num_ranks, ROOT / "tests" / "interrupted_worker.py", json.dumps(STRIKE), folder,
                    *SMALL, *STEPS, *arguments, f"run.dir={folder}",
                    torchrun_options=torchrun_options)


@pytest.mark.soak
@pytest.mark.parametrize(("num_ranks", "shard"), [(2, "false"), (3, "true")])
def test_torchrun_starts_all_again_and_the_run_ends_as_if_nothing_had_been(
        num_ranks, shard, tmp_path):
    expected = uninterrupted(num_ranks, tmp_path / "whole", *STEPS, f"training.shard={shard}")

    result = struck_under_torchrun(num_ranks, tmp_path, f"training.shard={shard}",
                                   torchrun_options=["--max-restarts=1"])

    assert result.returncode == 0, result.stderr
    # Step 1, which was saved before the strike, is not repeated.
    saved = tmp_path / "a" / "checkpoints" / "step-000001"
    assert f"resuming from {saved}\n" in result.stdout
    assert outcome(tmp_path / "a") == expected


def test_torchruns_report_says_why_a_rank_may_have_been_killed(tmp_path):
    """A rank that the system kills for its memory cannot say so itself."""
    result = struck_under_torchrun(1, tmp_path)

    assert result.returncode == 1
    report = result.stderr[result.stderr.rindex("Root Cause"):]
    assert "(SIGKILL)" in report
    assert KILLED in report
