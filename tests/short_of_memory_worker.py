"""main.py, except that on the last rank hardly any memory is left for one phase: `short_of_memory_worker.py FUNCTION arguments...`"""

import os
import resource
import sys

import conftest  # noqa: F401, finds main.py and sets the threads

import main

original = getattr(main, sys.argv[1])


def with_little_memory(*arguments):
    if main.RANK == main.WORLD_SIZE - 1:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + 60_000_000, -1))
    try:
        return original(*arguments)
    finally:  # or what comes after, like drawing curves, would have none either
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))


setattr(main, sys.argv[1], with_little_memory)
main.main(sys.argv[2:])
