"""What a machine can do, as far as choosing a backend needs to know: three rates and a constant.

The figures are those of two cores of an AMD EPYC with torch 2.13; only their ratios matter, and
`benchmarks/` measures them anew.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """Rates of one machine.

    Attributes:
        call: seconds to start one operator.
        products: floating-point operations a second in large float32 matrix products.
        elements: elements a second streamed by plain elementwise work, in float32.
        row_float: elements of keys and values a second when torch's SDPA streams them for one
            block of queries, in float32.
        row_half: the same in half precision, where one-row products are converted first.
    """

    call: float = 4e-6
    products: float = 160e9
    elements: float = 4e9
    row_float: float = 7e9
    row_half: float = 2e9


SPEED = Speed()
