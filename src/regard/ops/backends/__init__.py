"""The table of backends, in order of preference. One kernel a file; none knows another, but that
`blocked` cuts a call into calls which others run."""

from regard.ops.backends import blocked, eager, fused, grouped, sdpa
from regard.ops.call import Backend

BACKENDS: dict[str, Backend] = {
    "sdpa": Backend(sdpa.objection, sdpa.estimate, sdpa.run),
    "grouped": Backend(
        grouped.objection,
        grouped.estimate,
        grouped.run,
        grouped.partial,
        coded=grouped.coded,
        any_length=False,
    ),
    "fused": Backend(
        fused.objection,
        fused.estimate,
        fused.run,
        fused.partial,
        coded=grouped.coded,  # its kernel reads numbers; codes are multiplied as they are
        any_length=False,
    ),
    "blocked": Backend(
        blocked.objection, blocked.estimate, blocked.run, any_length=False, note=blocked.note
    ),
    "eager": Backend(eager.objection, eager.estimate, eager.run, eager.partial),
}
