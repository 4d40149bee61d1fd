"""The process in which cells run: a line of JSON in, a line of JSON out, until the pipe closes.

A process of its own, because cells change its defaults, record and transform what it runs, and may
crash it; and because the suite's type checks, which are not what users have, cannot be traced.
"""

import faulthandler
import json
import os
import sys
import traceback

WITHOUT = "REGARD_CALLERS_WITHOUT"  # a module that cannot be imported here
POOL = "REGARD_CALLERS_POOL"  # whether the decoding kernel uses Python's threads
WRONG = "REGARD_CALLERS_WRONG"  # whether the library is wrong, to see whether that is noticed


def be_wrong() -> None:
    """Outputs off by a tenth; of another dtype where there are no numbers."""
    from regard.ops.prepared import Prepared

    def made_wrong(right):
        def wrong(*given):
            out = right(*given)
            numbers = not (out.is_meta or type(out).__name__ == "FakeTensor")
            return out * 1.1 if numbers else out.bool()

        return wrong

    Prepared.run = made_wrong(Prepared.run)


def main() -> None:
    faulthandler.enable()
    answers = os.fdopen(os.dup(1), "w")  # so that nothing else that is printed gets in between
    os.dup2(2, 1)
    if WITHOUT in os.environ:
        sys.modules[os.environ[WITHOUT]] = None
    import torch

    from callers import cell  # after what may not be imported

    torch.set_num_threads(1)
    if POOL in os.environ:
        from regard.ops.kernels import threads

        threads._openmp = lambda: None
    if WRONG in os.environ:
        be_wrong()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        caller, call = json.loads(line)
        try:
            verdict = vars(cell.run_cell(caller, call))
        except BaseException:
            verdict = {"kind": "wrong", "words": traceback.format_exc()}
        print(json.dumps(verdict), file=answers, flush=True)
    os._exit(0)  # taking all modules down takes seconds


if __name__ == "__main__":
    main()
