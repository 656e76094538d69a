"""main.py on two ranks, the second of which takes four seconds to score, where the library by itself waits for one."""

import sys
import time
from datetime import timedelta

import conftest  # noqa: F401, finds main.py and sets the threads
from torch.distributed import distributed_c10d

import main

assert distributed_c10d._get_default_timeout("gloo") > timedelta(minutes=1)
distributed_c10d._get_default_timeout = lambda backend: timedelta(seconds=1)
score = main.score


def slow_score(*arguments):
    if main.RANK == 1:
        time.sleep(4)
    score(*arguments)


main.score = slow_score
main.main(sys.argv[1:])
