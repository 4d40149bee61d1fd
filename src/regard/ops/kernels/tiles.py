"""What a kernel is compiled for (`Tile`), what one call of it is given (`Decode`), constants."""

import math
import struct
from typing import Any, NamedTuple

import numpy as np

LOWEST = np.float32(-1e38)  # where a running maximum starts: -inf - LOWEST is -inf and never NaN
HIDDEN = np.float32(-math.inf)  # the score of a hidden key
LOG2E = np.float32(math.log2(math.e))  # scores are in powers of 2: exp(x) is 2**(LOG2E x)
EXP2 = (  # coefficients of 2**f on [-1/2, 1/2], lowest power first: minimax, error 2**-28.9
    1.0, 0.6931472028550832, 0.24022647913626496, 0.05550332471100074,
    0.009618437357826595, 0.0013398874422279362, 0.0001535336188694808,
)  # fmt: skip

KEYS_A_TASK = 256  # keys, at least: merging the partial results of fewer costs more than it saves
TASKS_A_THREAD = 4  # tasks, at most: several for each thread, so that a slow core takes fewer
FEW_LINES = 256  # bytes of a key: four longer ones are more lines than a core requests at a time
BLOCK_BYTES = 4096  # of keys, at least: what a block costs once is then small beside reading it
FAR = 4  # blocks between one that is read and one that is requested for the second cache
UNROLLED = {16: 128, 8: 128, 4: 32}  # channels of keys, at most, dequantised in registers, by lanes
LINE = 64  # bytes of a cache line
NIBBLES = 16  # bytes of 4-bit codes: their low halves are so many channels, the high ones the next
STEP = 2 * NIBBLES  # channels whose codes of 6 or 4 bits are packed together


class Format(NamedTuple):
    """How the elements of keys or of values are stored."""

    bits: int  # of an element: 32 of float32, 16 of bfloat16, 8, 6 or 4 of codes
    group: int = 0  # channels that have one scale and one zero; 0 of floating point
    by_page: bool = False  # the tokens of a page have the same scales and zeros
    rank: int = 0  # numbers of the latent that a key is computed from; 0 of keys that are stored
    rotated: int = 0  # channels of such a key that are rotated: the first ones
    pairs: bool = False  # two neighbours of such a latent are multiplied by one instruction

    @property
    def quantized(self) -> bool:
        """Whether elements are codes; a block of keys at a time is dequantised to float32."""
        return self.group > 0

    @property
    def rebuilt(self) -> bool:
        """Whether elements are products with latents; a block of keys at a time is computed."""
        return self.rank > 0

    @property
    def item(self) -> int:
        """Bytes of one element of the tensor; a tensor of codes is one of bytes."""
        return max(1, self.bits // 8)

    def bytes(self, width: int) -> int:
        """Bytes of a row of so many elements, or of its latent."""
        return -(-(self.rank or width) * self.bits // 8)


FLOAT32, BFLOAT16 = Format(32), Format(16)


class Tile(NamedTuple):
    """The shape of a kernel's loops. Each value is a constant in its machine code."""

    lanes: int  # float32 elements of a vector: 16, 8 or 4
    rows: int  # query rows that are multiplied with a key while it is in registers
    width: int  # elements of a query and of a key, D
    value_width: int  # elements of a value, Dv
    block: int  # keys whose scores are computed before their values are read: 16, 32 or 64
    half: bool  # q is bfloat16; otherwise float32
    joined: bool  # a value is the first `value_width` elements of its key (absorbed MLA)
    biased: bool  # a float32 bias is added to the scores
    k: Format  # of the keys: that of q, or codes
    v: Format  # of the values: that of q, or codes; where the tile is joined, that of the keys
    paged: bool = False  # keys and values lie in pages, which are found through a table
    direct: bool = False  # codes are dequantised in registers, as they are multiplied
    integers: bool = False  # codes may be multiplied as integers: `k_integers`, `v_integers`
    streams: int = 1  # parts of a block that are requested from memory in turns

    @property
    def item(self) -> int:
        """Bytes of one element of q."""
        return 2 if self.half else 4

    @property
    def v_quantized(self) -> bool:
        """Whether values are codes that are not within the keys."""
        return self.v.quantized and not self.joined

    @property
    def k_direct(self) -> bool:
        """Whether keys are codes that are dequantised as they are multiplied."""
        return self.direct and self.k.quantized

    @property
    def v_direct(self) -> bool:
        """Whether values are codes that are dequantised as they are multiplied."""
        return self.direct and self.v_quantized

    @property
    def k_integers(self) -> bool:
        """Whether queries are rounded to 16 bits, and keys are codes that are multiplied as they
        are: scales belong to a page, or to equal groups of whole words of codes."""
        if not (self.integers and _fills(self.k, self.width)):
            return False
        equal = self.width % self.k.group == 0 or self.width < self.k.group
        grouped = self.k.by_page or (self.k.group % STEP == 0 and equal)
        channels = self.width if self.k.by_page else min(self.width, self.k.group)
        fits = channels * (2**self.k.bits - 1) < 2**16  # a sum of so many products, in 32 bits
        return grouped and fits and (not self.joined or self.sums_integers)

    @property
    def v_integers(self) -> bool:
        """Whether weights are rounded to 16 bits, and values are codes multiplied as they are."""
        return self.k_integers if self.joined else self.integers and self.sums_integers

    @property
    def sums_integers(self) -> bool:
        """Whether values are codes whose groups and strips are whole vectors of sums."""
        if not _fills(self.v, self.value_width) or self.v.by_page:
            return False
        together = 2 * self.lanes * 8 // self.v.bits  # channels whose sums are mixed
        return self.strip % together == 0 and self.v.group % together == 0

    @property
    def k_read(self) -> int:
        """Bytes of an element of a key, as it is multiplied: codes are dequantised before, and keys
        of latents computed."""
        return 4 if self.k.quantized or self.k.rebuilt else self.k.item

    @property
    def v_read(self) -> int:
        """Bytes of an element of a value, as it is multiplied."""
        return 4 if self.v.quantized else self.v.item

    @property
    def latent_bytes(self) -> int:
        """Bytes of a latent that is converted to float32: whole vectors."""
        return 4 * -(-self.k.rank // self.lanes) * self.lanes

    @property
    def words(self) -> int:
        """Words of 4 bytes of a latent, as it is multiplied: numbers in float32, or pairs."""
        return self.k.rank // 2 if self.k.pairs else self.k.rank

    @property
    def widens(self) -> bool:
        """Whether the latents of a block are converted to float32 before they are multiplied."""
        return self.k.rebuilt and self.k.bits < 32 and not self.k.pairs

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights that rebuild the keys of a head, as they are multiplied."""
        return 4 * self.width * self.words

    @property
    def stored_bytes(self) -> int:
        """Bytes of those weights as they are stored."""
        return self.width * self.k.bytes(self.width)

    @property
    def registers(self) -> int:
        """Vectors of sums that stay in registers: AVX2 has 16 of them, AVX-512 and NEON have 32."""
        return 12 if self.lanes == 8 else 24

    @property
    def keys(self) -> int:
        """Keys requested, and multiplied, at once: their sums take `rows * keys` registers."""
        long = self.requests_all and self.k.bytes(self.width) > FEW_LINES
        return 2 if (self.rows > 1 and long) or 4 * self.rows > self.registers else 4

    @property
    def together(self) -> int:
        """Keys that are multiplied as integers at once: two vectors, so that an element of a query
        is read once for both."""
        return min(2 * self.lanes, self.block)

    @property
    def strip(self) -> int:
        """Columns of the values whose weighted sums of `rows` rows fit into registers.

        Two bfloat16 vectors are read at once, so a strip of those is a multiple of two vectors.
        """
        lanes, most = self.lanes, self.registers * self.lanes // self.rows
        widths = range(lanes, min(most, self.value_width) + 1, lanes)
        fits = [c for c in widths if self.value_width % c == 0]
        pairs = self.v == BFLOAT16
        whole = [c for c in fits if not pairs or c == self.value_width or c % (2 * lanes) == 0]
        return max(whole, default=self.value_width)

    @property
    def prefetches(self) -> int:
        """Into how many strips the prefetching of the next block's keys is divided."""
        return 2 * (self.value_width // self.strip) if self.joined else 1

    @property
    def prefetch_bytes(self) -> int:
        """Bytes of each key that one strip prefetches: whole cache lines."""
        return -(-self.k.bytes(self.width) // self.prefetches // LINE) * LINE

    @property
    def requests(self) -> int:
        """Into how many strips the requests of far values are divided."""
        return min(self.value_width // self.strip, -(-self.v.bytes(self.value_width) // LINE))

    @property
    def request_bytes(self) -> int:
        """Bytes of each far value that one strip requests: whole cache lines."""
        return -(-self.v.bytes(self.value_width) // self.requests // LINE) * LINE

    @property
    def requests_all(self) -> bool:
        """Whether every block is requested long before it is read, as float32 is, which has most
        bytes for each product; otherwise only blocks that follow no other in memory are."""
        return self.streams == 1 and not self.k.rebuilt and {self.k.bits, self.v.bits} == {32}

    @property
    def query_bytes(self) -> int:
        """Bytes of a scaled query in float32."""
        return 4 * self.width

    @property
    def sum_bytes(self) -> int:
        """Bytes of a row of weighted sums in float32."""
        return 4 * self.value_width

    @property
    def part_bytes(self) -> int:
        """Bytes that a task's result takes for each row: its sums, its maximum and its total.

        The last two take a vector's space, so that each part begins at a multiple of a vector.
        """
        return 4 * (self.value_width + 2 * self.lanes)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of a thread's scratch for each row: a scaled query, the scores of a block, and
        integers in place of both."""
        return 4 * (self.width + self.block) + self.integer_bytes // self.rows

    @property
    def groups(self) -> tuple[int, int]:
        """Groups of channels of keys and values that are multiplied as integers; of keys one where
        the scales are a page's."""
        of_keys = 1 if self.k.by_page else -(-self.width // max(1, self.k.group))
        of_values = -(-self.value_width // max(1, self.v.group))
        return of_keys * self.k_integers, of_values * self.v_integers

    @property
    def integer_bytes(self) -> int:
        """Bytes of the integers of a tile's rows: twice 2 for an element of the query, 2 for a
        score and group of values, and what belongs to rows and groups."""
        of_k, of_v = self.groups
        of_row = 4 * self.width * self.k_integers + 4 * (1 + of_k)
        of_row += (2 * self.block + 8) * of_v
        return -(-of_row // LINE) * LINE * self.rows if of_k + of_v else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a thread's scratch for a block of keys, or of values, that is dequantised; of
        rebuilt keys, beside their latents in float32, with their weights at the end."""
        keys = 4 * (self.k.quantized or self.k.rebuilt) * self.width
        keys += self.widens * self.latent_bytes
        return self.block * max(keys, 4 * self.v.quantized * self.value_width) + self.weights_bytes

    def padded(self, rows: int) -> int:
        """`rows` rounded up to whole tiles."""
        return -(-rows // self.rows) * self.rows

    def ranges(self, keys: int, heads: int, threads: int) -> tuple[int, int]:
        """How many ranges the keys of a head are divided into, and the keys of each."""
        ranges = max(1, min(TASKS_A_THREAD * threads // heads, keys // KEYS_A_TASK))
        length = -(-keys // (ranges * self.block)) * self.block
        return -(-keys // length), length


def _fills(form: Format, width: int) -> bool:
    """Whether elements are codes that fill whole steps of channels, and no code is in two bytes."""
    return form.quantized and form.bits in (4, 8) and width % STEP == 0


def tile_for(
    rows: int,
    width: int,
    value_width: int,
    half: bool,
    joined: bool,
    biased: bool,
    lanes: int,
    k: Format | None = None,
    v: Format | None = None,
    page: int = 0,
    integers: bool = False,
    *,
    streams: int = 1,
) -> Tile:
    """The tile for so many rows: of those that pad least, the one with most rows.

    `k` and `v` are the formats of keys and values, those of the queries by default; `page` is the
    size of the pages that they lie in, 0 without pages: a whole number of blocks, if it can be.
    Codes are dequantised into registers where one tile multiplies them, else into the cache; not
    with `integers`, of which the processor multiplies pairs. Others have blocks for all `streams`.
    """
    plain = BFLOAT16 if half else FLOAT32
    k = k or plain
    v = k if joined else v or plain
    odd = v == BFLOAT16 and value_width % (2 * lanes) > 0  # vectors: a strip is all of them
    tiles = (1, 2, 4)[: 3 - odd] if lanes == 8 else range(1, 7 - 2 * odd)
    in_tile = min(tiles, key=lambda r: (-(-rows // r) * r, -r))
    codes = k.quantized or v.quantized
    direct = codes and not joined and rows == in_tile and width <= UNROLLED[lanes]
    streams = 1 if codes or k.rebuilt else streams
    block = next((x for x in (16, 32) if x * k.bytes(width) >= streams * BLOCK_BYTES), 64)
    few = in_tile < min(2, rows)  # rows of a tile: each tile transposes all codes
    tile = Tile(
        lanes, in_tile, width, value_width, block, half, joined, biased, k, v, page > 0, direct,
        integers and codes and not few, streams,
    )  # fmt: skip
    if tile.k_integers or tile.v_integers:
        block = max(32, block)  # what is rounded once for a block takes less time then
    block = 64 if k.rebuilt else block
    if page:
        block = next((x for x in (64, 32) if x <= block and page % x == 0), 16)
    return tile._replace(block=block)


class KeyPages(NamedTuple):
    """Where the keys of a call lie, in tensors of pages `[1, G, tokens of all pages, W]`."""

    table: Any  # [B, n] numbers of pages in int64: a sequence's, in order
    size: int  # tokens of a page: page i is the tokens from i * size on
    skipped: int  # tokens of the first page that are no keys
    keys: int  # of each sequence, S


class Latents(NamedTuple):
    """What keys are computed from, beside the latents."""

    weights: Any  # [G, D, R] in the dtype of the latents, contiguous
    positions: Any  # [B, 1, S, 1] in int32, each a row of the tables
    cos: Any  # [P, rotated] in float32
    sin: Any  # the same, negative in the first of a pair's channels


class Decode(NamedTuple):
    """One call of a kernel. Addresses are in bytes, strides in elements of their tensor."""

    batch: int  # sequences, B
    kv_heads: int  # key heads, G
    rows: int  # query rows of a key head: the query heads that share it, times the queries, M
    keys: int  # keys of a sequence, S
    q: int  # address of the queries [B, G, M, D]
    q_batch: int
    q_head: int
    q_row: int
    k: int  # address of the keys [B, G, S, D]; in pages [1, G, tokens of all pages, D]
    k_batch: int
    k_head: int
    k_row: int
    v: int  # address of the values [B, G, S, Dv]; that of the keys where the tile is joined
    v_batch: int
    v_head: int
    v_row: int
    k_scales: int  # address of scale and zero, side by side, of each group of channels of each key
    k_scales_batch: int  # [B, G, S, 2 x groups] in bfloat16; all 0 where keys are no codes
    k_scales_head: int
    k_scales_row: int  # from those of a key to the next, or of a page where its keys share them
    v_scales: int  # the same of the values; all 0 where these are no codes, or within the keys
    v_scales_batch: int
    v_scales_head: int
    v_scales_row: int
    table: int  # address of the int64 numbers of a sequence's pages, in order; 0 without pages
    table_batch: int
    page: int  # tokens of a page; page i of a tensor is its tokens from i * page on
    skipped: int  # tokens of the first page of a sequence that are no keys of the call
    weights: int  # address of the weights [G, D, R] that rebuild keys; 0 of other keys
    cos: int  # address of the cosines [P, rotated] in float32 of positions 0 to P - 1
    sin: int  # address of the sines, of which the first of a pair is negative
    positions: int  # address of the positions [B, S] of the keys in int32
    positions_batch: int
    positions_row: int
    bias: int  # address of the bias [B, G, M, S] in float32; 0 where the tile has none
    bias_batch: int
    bias_head: int
    bias_row: int  # 0 where all rows have the same bias
    out: int  # address of the output [B, G, M, Dv], contiguous float32
    lse: int  # address of the log-sum-exps [B, G, M], contiguous float32
    counters: int  # address of the int64 counters: see the package's docstring
    parts: int  # address of the tasks' results
    scratch: int  # address of the threads' scratch
    ranges: int  # ranges that the keys of a head are divided into; a task is one range of one head
    range_keys: int  # keys of a range, the last one's excepted
    scale: float  # of the scores, times log2(e): the kernel computes powers of 2


def _field(name: str) -> tuple[str, type[np.generic]]:
    return name, np.float32 if Decode.__annotations__[name] is float else np.int64


RECORD = np.dtype([_field(name) for name in Decode._fields], align=True)  # as the kernel reads
PACKED = struct.Struct(f"{len(Decode._fields) - 1}qf4x")  # the same, as Python packs it
