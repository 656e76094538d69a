"""Every fault in mutants.py is noticed by the regular test that it names."""

import pytest
from mutants import MUTANTS, first_failure
from processes import ROOT


@pytest.mark.house
def test_every_fault_can_be_put_into_the_sources():
    for mutant in MUTANTS:
        assert (ROOT / mutant.path).read_text().count(mutant.right) == 1, mutant.fault


@pytest.mark.soak
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.fault for mutant in MUTANTS])
def test_a_fault_is_noticed(mutant):
    failed, output = first_failure(mutant)
    assert failed, output
