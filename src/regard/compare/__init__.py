"""What would each attention cost this model? The main job: run them all, show them side by side.

load -> prove that regard computes what the model computes -> convert -> measure
"""

from regard.compare.candidates import CANDIDATES, Candidate, chosen
from regard.compare.comparing import Comparison, Proof, compare, prove
from regard.compare.measure import Row
from regard.compare.runner import Runner
from regard.compare.texts import Texts, texts_for

__all__ = [
    "CANDIDATES",
    "Candidate",
    "Comparison",
    "Proof",
    "Row",
    "Runner",
    "Texts",
    "chosen",
    "compare",
    "prove",
    "texts_for",
]
