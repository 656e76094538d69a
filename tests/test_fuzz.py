"""A few cases of tests/fuzz.py; FUZZ_SEED chooses others."""

import os
import sys

import pytest
from processes import run


@pytest.mark.soak
def test_whatever_a_start_is_given_it_ends_soon_with_a_summary_or_in_one_line(tmp_path):
    seed = os.environ.get("FUZZ_SEED", "1")
    result = run(sys.executable, "tests/fuzz.py", "--seed", seed, "--cases", 25, "--seconds", 100,
                 TMPDIR=str(tmp_path))
    print(f"python tests/fuzz.py --seed {seed}\n{result.stdout}\n{result.stderr}")
    assert result.returncode == 0
