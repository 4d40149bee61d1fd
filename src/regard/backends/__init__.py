"""The table of backends, in order of preference. One kernel a file; none knows another."""

from regard.backends import eager, grouped, sdpa
from regard.call import Backend

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
    "eager": Backend(eager.objection, eager.estimate, eager.run, eager.partial),
}
