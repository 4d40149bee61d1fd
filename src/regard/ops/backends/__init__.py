"""The table of backends, in order of preference. One kernel a file; what they share is in `common`.
None imports another, except `blocked`, which splits a call into calls that others run.

Another package may add a backend, such as one for streams of a class of its own.
"""

from regard.ops.backends import (
    blocked,
    eager,
    flash,
    flex,
    fused,
    grouped,
    latents,
    sdpa,
    tiled,
)
from regard.ops.call import Backend

BACKENDS: dict[str, Backend] = {
    "sdpa": Backend(sdpa.objection, sdpa.estimate, sdpa.run, sdpa.partial),
    "grouped": Backend(
        grouped.objection, grouped.estimate, grouped.run, grouped.partial, grouped.READS
    ),
    "latents": Backend(latents.objection, latents.estimate, latents.run, latents.partial),
    "fused": Backend(
        fused.objection,
        fused.estimate,
        fused.run,
        fused.partial,
        fused.READS,
        run_parts=fused.run_parts,
    ),
    "tiled": Backend(tiled.objection, tiled.estimate, tiled.run, tiled.partial),
    "blocked": Backend(
        blocked.objection, blocked.estimate, blocked.run, blocked.partial, note=blocked.note
    ),
    "flash": Backend(flash.objection, flash.estimate, flash.run, flash.partial),
    "flex": Backend(flex.objection, flex.estimate, flex.run, flex.partial),
    "eager": Backend(eager.objection, eager.estimate, eager.run, eager.partial),
}
