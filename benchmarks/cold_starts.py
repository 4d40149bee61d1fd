"""Is the first thing that a process computes right, on a busy machine?

python benchmarks/cold_starts.py --compares 20 --forks 2000 --busy 2

The machine is made busy by processes that each keep a core at work. Then come cold starts of
`regard compare` with its cheapest row, each of which begins with the proof that regard computes
what the model does; and forks that each call one vector function for the first time, on two
threads, without regard and after `import regard` (see regard/first_calls.py). Both have to hold
every time; only the forks without regard may be wrong, now and then.
"""

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from common import finish

FORKS = """
import os, signal, sys, torch
if sys.argv[1] == "with":
    import regard
names = ("cos", "sin", "exp", "tanh", "sqrt", "erf")
torch.set_num_threads(1)  # a fork would wait forever for the parent's OpenMP threads
x = torch.arange(200_000) * 2.0**-15  # up to 6.1, exactly
wrong = 0
torch.set_num_threads(2)
for turn in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        name = names[turn % len(names)]
        first = getattr(torch, name)(x)
        again = getattr(torch, name)(x)
        os._exit(0 if (first - again).abs().max() <= 1e-6 * again.abs().max() else 1)
    wrong += os.waitpid(child, 0)[1] != 0
print(wrong)
"""


LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:  # an orphan ends
    pass
"""


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that compute without pause."""
    started = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def wrong_first_results(side: str, forks: int) -> int:
    """The number of forks whose first result differed from the second."""
    command = [sys.executable, "-c", FORKS, side, str(forks)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout)


def compares(count: int) -> int:
    """The number of cold starts in which the main command failed; each is printed at its end."""
    command = [sys.executable, "-m", "regard", "compare", "--attention", "shipped"]
    options = ["--context", "256", "--json"]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    failed = 0
    for at in range(count):
        done = subprocess.run(
            command + options, capture_output=True, text=True, check=False, env=environment
        )
        failed += done.returncode != 0
        told = done.stderr.strip() if done.returncode else "held"
        print(f"cold start {at + 1} of {count}: {told}", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description="cold starts on a busy machine")
    for name, default in (("compares", 20), ("forks", 2000), ("busy", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with busy(given.busy):
        failed = compares(given.compares)
        wrong = {side: wrong_first_results(side, given.forks) for side in ("without", "with")}
    print(
        f"regard compare: {given.compares - failed} of {given.compares} cold starts held\n"
        f"wrong first results in {given.forks} forks: {wrong['without']} without regard, "
        f"{wrong['with']} after import regard"
    )
    finish("cold_starts", [{**vars(given), "failed_compares": failed, **wrong}])


if __name__ == "__main__":
    main()
