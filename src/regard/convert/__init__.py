"""From one attention to another: exact conversions return a layer, lossy ones also what they lost.

Exact: `spell_out` (GQA or MQA as MHA), `as_latent` (as a joint latent of full rank).
Lossy: `latentize` (as a joint latent of fewer numbers, chosen by calibration).
"""

from regard.convert.calibrate import Moments, watch
from regard.convert.latentize import Latentized, as_latent, latentize
from regard.convert.spell_out import spell_out

__all__ = ["Latentized", "Moments", "as_latent", "latentize", "spell_out", "watch"]
