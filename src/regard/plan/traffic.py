"""Bytes that a layer of attention reads and writes at least, on one rank.

Counted are, each once: the parameters, the hidden states in and out, and the cache as it is stored,
read and written. What a kernel may leave in registers and caches of the processor is not counted:
queries, scores, keys computed from latents, outputs of the heads. Linear attention is refused.
"""

from regard.plan.cache_bytes import bytes_in_pages, coded_keys, coded_tokens, token_bytes
from regard.plan.flops import visible_keys
from regard.plan.shapes import STORAGES, LayerShape, Storage, Workload
from regard.plan.weights import check_known, parameters


def prefill_bytes(layer: LayerShape, storage: Storage, work: Workload) -> int:
    """Bytes moved by the prefill of `context` tokens.

    Keys and values of all tokens are written once and read once, as the cache stores them, also
    where a window drops them later. A layer with `keys_of` only reads them. In pages they are read
    in the dtype's own bits.

    Raises:
        ValueError: for linear attention.
    """
    check_known(layer)
    tokens = work.tokens
    if not storage.page_size:
        token = token_bytes(layer, storage, work)
        return _moved(layer, work, tokens, read=work.context * token, written=tokens * token)
    read = work.context * token_bytes(layer, STORAGES["plain"], work)
    written = bytes_in_pages(layer, storage, work, tokens, coded_tokens(storage, work, tokens))
    return _moved(layer, work, tokens, read=read, written=written)


def decode_bytes(layer: LayerShape, storage: Storage, work: Workload) -> int:
    """Bytes moved by one more token after `context` tokens.

    The visible keys and values are read, those of the new token too; the latter are also written.
    Sealing a page, once in `page_size` tokens, is left out.

    Raises:
        ValueError: for linear attention.
    """
    check_known(layer)
    keys = visible_keys(layer, work)
    if not storage.page_size:
        token = token_bytes(layer, storage, work)
        return _moved(layer, work, 1, read=keys * token, written=token)
    written = token_bytes(layer, STORAGES["plain"], work)
    read = bytes_in_pages(layer, storage, work, keys, coded_keys(storage, work, keys))
    return _moved(layer, work, 1, read=read, written=written)


def _moved(layer: LayerShape, work: Workload, tokens: int, *, read: int, written: int) -> int:
    """Parameters, hidden states of the tokens, and the cache's bytes of each row."""
    cached = read if layer.keys_of is not None else read + written
    hidden = 2 * work.batch * tokens * layer.hidden_size * work.itemsize
    return parameters(layer, work) * work.itemsize + hidden + work.batch * cached
