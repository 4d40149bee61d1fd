"""The names of caches, for Python and for the command line: plain data, which needs no torch.

`regard.hf.cache(model, NAME)`, `regard generate --cache NAME` and `regard plan --storage NAME` take
them, in upper or lower case. Any `K{8|6|4}V{8|6|4}` is a format, too, where Python takes one.
"""

PLAIN = "plain"  # numbers in the dtype's own bits
KINDS = ("auto", "growing", "static", "sliding", "quantized", "evicting", "paged")
FORMATS = ("K8V8", "K8V4", "K6V4", "K4V4")  # bits of keys and of values
CODES = ("int8", "int4", *FORMATS)  # quantised caches by the format of their codes
CACHES = (*KINDS, *CODES)
STORAGES = (PLAIN, *CODES)  # what a plan knows the bytes of
PAGES = (PLAIN, *FORMATS)  # formats of the pages of "paged"
TARGETS = (  # of a conversion, in words
    "mha, gqa:N, mqa; latent-50, deepseek-50, portable-50 (rows of compare, of any percentage); "
    "mla:RANK, mla:RANK+ROPE, or mla with a budget"
)
UNCHANGED = tuple(kind for kind in KINDS if kind not in ("quantized", "evicting"))  # plain
