"""The table of backends, in order of preference. One kernel a file; what they share is in `common`.
None imports another, except `blocked`, which splits a call into calls that others run."""

from regard.ops.backends import blocked, eager, flex, fused, grouped, sdpa, tiled
from regard.ops.call import Backend

BACKENDS: dict[str, Backend] = {
    "sdpa": Backend(
        sdpa.objection,
        sdpa.estimate,
        sdpa.run,
        sdpa.partial,
        partial_objection=sdpa.partial_objection,
    ),
    "grouped": Backend(
        grouped.objection,
        grouped.estimate,
        grouped.run,
        grouped.partial,
        quantized=grouped.quantized,
        quantized_partial=grouped.quantized_partial,
        any_length=False,
    ),
    "fused": Backend(
        fused.objection,
        fused.estimate,
        fused.run,
        fused.partial,
        quantized=fused.quantized,
        quantized_partial=fused.quantized_partial,
        paged=fused.paged,
        paged_partial=fused.paged_partial,
        reads_pages=fused.reads_pages,
        any_length=False,
    ),
    "tiled": Backend(tiled.objection, tiled.estimate, tiled.run, tiled.partial, any_length=False),
    "blocked": Backend(
        blocked.objection,
        blocked.estimate,
        blocked.run,
        blocked.partial,
        partial_objection=blocked.partial_objection,
        widens=True,
        any_length=False,
        note=blocked.note,
    ),
    "flex": Backend(flex.objection, flex.estimate, flex.run, flex.partial, any_length=False),
    "eager": Backend(eager.objection, eager.estimate, eager.run, eager.partial),
}
