"""From one attention to another: exact conversions return a layer, lossy ones also what they lost.

Exact: `spell_out` (more key heads), `as_latent` (a joint latent of full rank).
Lossy: `regroup` (fewer key heads), `latentize` (a joint latent of fewer numbers), `decouple`
(DeepSeek's MLA), all chosen by calibration; `convert` does so to a whole model.
Whole models: `regard.hf.place` puts layers into one, `save` keeps it, `to_deepseek_v3` writes MLA
as a stock checkpoint.
"""

from regard.convert.converting import Converted, LayerReport, convert
from regard.convert.exact.detecting import Detected, detect_pairing, repair_pairing
from regard.convert.exact.expand import expand
from regard.convert.exact.layouts import LAYOUTS, fuse, fuse_state, split_fused, split_state
from regard.convert.exact.pairing import halves_to_pairs, pairs_to_halves, with_pairing
from regard.convert.exact.portable import to_deepseek_v3
from regard.convert.exact.spell_out import spell_out
from regard.convert.healing.heal import Healed, heal
from regard.convert.healing.loss_curve import draw_losses
from regard.convert.healing.recipe import Recipe
from regard.convert.lossy.blockwise import Step, walk
from regard.convert.lossy.calibrate import Moments, watch
from regard.convert.lossy.decouple import Decoupled, common_counts, decouple
from regard.convert.lossy.latentize import Latentized, as_latent, latentize
from regard.convert.lossy.refit import refit_output
from regard.convert.lossy.regroup import Regrouped, regroup
from regard.convert.lossy.selection import components
from regard.convert.saving import check_free, save
from regard.convert.targets import Target, target_of
from regard.convert.windows import windows_of

__all__ = [
    "LAYOUTS",
    "Converted",
    "Decoupled",
    "Detected",
    "Healed",
    "Latentized",
    "LayerReport",
    "Moments",
    "Recipe",
    "Regrouped",
    "Step",
    "Target",
    "as_latent",
    "check_free",
    "common_counts",
    "components",
    "convert",
    "decouple",
    "detect_pairing",
    "draw_losses",
    "expand",
    "fuse",
    "fuse_state",
    "halves_to_pairs",
    "heal",
    "latentize",
    "pairs_to_halves",
    "refit_output",
    "regroup",
    "repair_pairing",
    "save",
    "spell_out",
    "split_fused",
    "split_state",
    "target_of",
    "to_deepseek_v3",
    "walk",
    "watch",
    "windows_of",
    "with_pairing",
]
