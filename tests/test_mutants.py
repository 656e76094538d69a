"""Every fault in mutants.py is noticed by the regular test that it names."""

import pytest
from mutants import MUTANTS, first_failure

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.fault for mutant in MUTANTS])
def test_a_fault_is_noticed(mutant):
    failed, output = first_failure(mutant, [mutant.test])
    assert failed, output
