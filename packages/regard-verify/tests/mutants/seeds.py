"""Does the verdict on a mutant, or on a right subject, depend on the seed of the random inputs?

python packages/regard-verify/tests/mutants/seeds.py --seeds 12

With each seed, every mutant must break a law that names its cause, and every right subject must
keep all laws. What does not is printed by name, and the counts last. Mutants that only
`torch.compile` can show are left out, and right subjects are asked `quick`.
"""

import argparse
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
ROOT = PACKAGE.parents[1]


def found(mutant, seed: int) -> bool:
    """Whether a law that names the mutant's cause is broken."""
    from regard_verify import check

    report = check(mutant.make(), mutant.like, only=mutant.kills, seed=seed)
    return bool(report.failed or report.advice)


def broken(name: str, seed: int) -> list[str]:
    """The laws that a right subject breaks."""
    import torch

    from mutants.test_mutants import MADE, RIGHT
    from regard_verify import check

    subject, like = RIGHT[name]
    torch.manual_seed(0)  # the weights; one subject is compared with a reference that has the same
    report = check(subject() if name in MADE else subject, like, quick=True, seed=seed)
    return report.failed + ([report.problem] if report.problem else [])


def main() -> int:
    """Print what differs, and how many were asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=12, help="how many")
    seeds = range(parser.parse_args().seeds)

    from mutants.test_mutants import MUTANTS, RIGHT

    mutants = [mutant for mutant in MUTANTS if not mutant.slow]
    missed = alarms = 0
    for seed in seeds:
        for mutant in mutants:
            if not found(mutant, seed):
                missed += 1
                print(f"seed {seed}: {mutant.name} is not found", flush=True)
        for name in RIGHT:
            if laws := broken(name, seed):
                alarms += 1
                print(f"seed {seed}: {name} breaks {', '.join(laws)}", flush=True)
    print(
        f"{len(seeds)} seeds: {len(mutants)} faults each, {missed} not found; "
        f"{len(RIGHT)} right subjects each, {alarms} false alarms"
    )
    return int(bool(missed or alarms))


if __name__ == "__main__":
    sys.path[:0] = [
        str(each)
        for each in (
            PACKAGE / "tests",
            PACKAGE / "tests/support",
            ROOT / "tests/support",
            PACKAGE / "src",
        )
    ]
    sys.exit(main())
