"""Attention of few queries over many keys on a CPU: a kernel that numba compiles on the machine.

PyTorch has no kernel that reads each key and value once for all query heads that share it. This one
does, so it decodes at nearly the memory's bandwidth. It needs numba, and no C compiler. Keys and
values are float32, bfloat16, or codes of a quantised cache, each in a format of their own.

    tiles.py          what a kernel is compiled for (`Tile`), what a call is given (`Decode`)
    specification.py  the kernel in NumPy: read this first; tests compare the two
    decoding.py       the kernel: its tasks, and its phases score, softmax, gather and merge
    intrinsics.py     the loops over vectors that the phases are made of
    gathering.py      those of gather: weighted sums of values, or of their codes
    integers.py       both products with codes as integers, for queries in bfloat16
    code_words.py     those integers, by twos
    rebuilding.py     keys of a block from latents: a product, then rotation
    vectors.py        the instructions of LLVM that the intrinsics are made of
    launching.py      `decode`: addresses of tensors, memory to work in
    appending.py      rotates one token's queries and keys, appends its keys and values to a cache
    stepping.py       `Plan.run`: those two, as a decoding step of a layer
    sequencing.py     `KernelSequence.run`: kernels one after the other, in one call
    merging.py        `decode_all`: the kernel on keys in several places, merged that way
    model_stepping.py  a decoding step of all layers of a model that way
    layer_steps.py    the attention of a layer in a step of a model, and its memory
    absorbed_values.py  outputs of heads from sums of latents
    paged_stepping.py  a step over pages
    latent_stepping.py  the same over a joint latent, whose keys are rebuilt
    threads.py        the threads that run a kernel
    row_products.py   chains of few rows times weights: norms, gated products, with these vectors
    chaining.py       `linear`, `PreparedChain.run`: those, with tensors as addresses

The kernel of `tiled`, for many queries in bfloat16 or float32, shares intrinsics and vectors:

    panels.py             what it is compiled for (`Panel`), what a call is given (`Prefill`)
    prefilling.py         the kernel: packing, then for each block of keys two products, a softmax
    products.py           the products of packed blocks, by AMX tiles or dot products of pairs
    columns.py            softmax, packing and results as intrinsics: a lane is a query
    launching_prefill.py  `prefill`: memory, threads, and which instructions a process may use

One key head (there are B x G), the M query rows that share it, and its S keys and values:

                         k [S, D]        v [S, Dv]
                        +----------+    +-------+-------+
       q [M, D]         | block    |    | strip | strip |  )
     +-----------+      |          |    |       |       |  )
     | rows      |      +----------+    +-------+-------+  )  a range of keys: one task
     |           |      | block    |    |       |       |  )
     +-----------+      |          |    |       |       |  )
     | rows: the |      +==========+    +=======+=======+
     | last row  |      | block    |    |       |       |  )
     | repeated  |      |          |    |       |       |  )  the next range: another task
     +-----------+      +----------+    +-------+-------+  )
      padded rows

    (codes)  multiplied as integers, where the queries are bfloat16 (and groups of channels whole
             vectors). Otherwise dequantised to float32: in registers, as they are multiplied, if
             the rows are one tile; else a block of keys, and later of values, in the L1 cache.
             Either way a code is read from memory once for all rows
    score    rows x keys dot products at once, each a vector of `lanes` partial sums in a register
    softmax  a row of a block at a time: running maximum, powers of 2, their sum
    gather   rows x strip weighted sums at once, in registers, key after key of a block
    merge    the tasks' results of a head, in the order of its keys, by its last task to finish

The last dimension of every tensor is contiguous; batch, heads and rows have any strides, so a view
of a cache is read where it lies. With `joined` the values are the first columns of the keys.

Keys and values may lie in pages of a memory that many sequences share, `[1, G, tokens, W]`: a table
has the numbers of a sequence's pages, in order. A block is then of one page. Where a page does not
follow the one before it in memory, its rows are requested some blocks before they are read, a few
at a time: keys while keys are read, and values while values are.

The workspace, one for each calling thread, everything in float32 but the counters (int64):

    counters  | next task | next thread | finished tasks of head 0 | of head 1 | ...   whole lines
    parts     for each task:
              | sums [padded, Dv] | maxima [padded] ... | totals [padded] ... |
              the last two take `lanes` elements a row, so that each part begins at a whole vector
    scratch   for each thread:
              | queries [padded, D], times scale and log2(e) | scores [padded, block] |
              | integers of the rows (`integers.OfRows`) |  where they are multiplied with codes
              | keys or values of a block, dequantised [block, D or Dv], or scales of one
              (`integers.OfBlock`) |  where they are codes

A value is zero + scale * code, with a scale and a zero for each key and group of channels, side by
side in bfloat16: a scale is the lower half of a word, a zero the upper one. The halves of a byte of
4-bit codes are channels i and i + 16 of 32, so that neighbouring bytes are neighbouring channels,
and no shuffles are needed. 6-bit codes have 8 bytes more for 32 channels, whose four pairs of bits
are the upper ones of channels i, i + 8, i + 16 and i + 24.

Two vectors of bfloat16 are widened into their even elements and their odd ones, since that needs no
shuffles. Queries and sums are in this order too; `store_row` restores that of memory.

When numba or llvmlite change
-----------------------------
This code relies on these of their interfaces:

    intrinsics.py  numba.extending: intrinsic (it reads `__signature__`), typeof_impl, models,
                   register_model, infer_getattr, lower_getattr_generic; AttributeTemplate of
                   numba.core.typing.templates
    vectors.py     llvmlite.ir: IRBuilder, vector types, typed pointers (`as_pointer`),
                   atomic_rmw, load_atomic, calls of functions by address (sequencing.py,
                   waiting.py); the LLVM intrinsics llvm.fmuladd and llvm.prefetch.p0;
                   numba.core.cgutils: alloca_once, for_range, get_or_insert_function; the codegen's
                   `magic_tuple()[2]`, which lists the processor's features; llvmlite.ir.Type,
                   subclassed for bfloat; llvm.x86.avx512bf16.dpbf16ps.512; InlineAsm, its parser
    decoding.py    constants of a closure; from_dtype; carray; prefilling.py: njit(inline="always");
                   row_products.py: arrays of records within a record
    compiling.py   njit(forceinline=, no_cpython_wrapper=, no_cfunc_wrapper=, pipeline_class=);
                   numba.core: compiler.Compiler, codegen.JITCodeLibrary, ccallback.CFunc and its
                   `_cache`, caching.FunctionCache, CompileResultCacheImpl and _CacheLocator;
                   `magic_tuple()`; files are named by `__qualname__`
    products.py    the LLVM intrinsics of AMX tiles (llvm.x86.tdpbf16ps and others)
    columns.py     llvm.x86.avx512.mask.reduce.ps.512 and .scalef.ps.512

The tests of this folder show what changed. First run those of the single intrinsics
(test_intrinsics.py): an error while compiling is an interface that changed, a wrong number an
instruction. If they pass, run test_every_tile_at_every_number_of_lanes, which compares kernel and
specification: a difference is then in the phases, so in what numba makes of `inline="always"` or of
the record. test_compiling.py shows a change of the files on disk. The changelog of numba or
llvmlite has the new form of the name above; the change belongs into the file listed with it. Until
then exclude the version in pyproject.toml, extra `cpu`: without numba, `attend` chooses another
backend.
"""
