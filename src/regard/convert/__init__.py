"""Conversions between attentions: exact ones return a layer, lossy ones also what they lost.

Exact: `spell_out` (more key heads), `expand` (MLA as MHA), `as_latent` (a latent of full rank).
Lossy, calibrated on text: `regroup` (fewer key heads), `latentize` (a smaller joint latent),
`decouple` (DeepSeek's MLA). Whole models: `convert`; `regard.hf.place` puts the layers into the
model, `heal` trains them to imitate the original, `save` writes the model, and `to_deepseek_v3`
makes a stock checkpoint of MLA.

Examples:
    >>> from regard.convert import LAYOUTS
    >>> LAYOUTS["Phi3Attention"].weight  # where this class stores queries, keys and values
    'qkv_proj.weight'
"""

from regard.convert.converting import Converted, LayerReport, convert
from regard.convert.exact.expand import expand, spell_out
from regard.convert.exact.layouts import LAYOUTS, Layout, fuse_state, split_fused, split_state
from regard.convert.exact.pairing import (
    Detected,
    detect_pairing,
    halves_to_pairs,
    pairs_to_halves,
    repair_pairing,
    with_pairing,
)
from regard.convert.exact.portable import to_deepseek_v3
from regard.convert.healing.heal import Healed, heal
from regard.convert.healing.own_text import own_text
from regard.convert.healing.recipe import Recipe
from regard.convert.lossy.calibrate import Moments, Step, refit_output, walk, watch
from regard.convert.lossy.decouple import decouple
from regard.convert.lossy.directions import Lossy
from regard.convert.lossy.latentize import as_latent, latentize
from regard.convert.lossy.regroup import regroup
from regard.convert.queries import query_moments
from regard.convert.saving import save
from regard.convert.targets import Target, target_of
from regard.convert.texts import windows_of

__all__ = [
    "LAYOUTS",
    "Converted",
    "Detected",
    "Healed",
    "LayerReport",
    "Layout",
    "Lossy",
    "Moments",
    "Recipe",
    "Step",
    "Target",
    "as_latent",
    "convert",
    "decouple",
    "detect_pairing",
    "expand",
    "fuse_state",
    "halves_to_pairs",
    "heal",
    "latentize",
    "own_text",
    "pairs_to_halves",
    "query_moments",
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
