"""The table of backends, in order of preference. One kernel a file; what they share is in `common`.
None imports another, except `blocked`, which splits a call into calls that others run."""

from regard.ops.backends import blocked, eager, fused, grouped, sdpa
from regard.ops.call import Backend

BACKENDS: dict[str, Backend] = {
    "sdpa": Backend(sdpa.objection, sdpa.estimate, sdpa.run),
    "grouped": Backend(
        grouped.objection,
        grouped.estimate,
        grouped.run,
        grouped.partial,
        quantized=grouped.quantized,
        any_length=False,
    ),
    "fused": Backend(
        fused.objection,
        fused.estimate,
        fused.run,
        fused.partial,
        quantized=grouped.quantized,  # its kernel reads floating point; `grouped` multiplies codes
        any_length=False,
    ),
    "blocked": Backend(
        blocked.objection, blocked.estimate, blocked.run, any_length=False, note=blocked.note
    ),
    "eager": Backend(eager.objection, eager.estimate, eager.run, eager.partial),
}
