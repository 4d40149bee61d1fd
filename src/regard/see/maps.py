"""Attention maps of a model: weights of chosen heads, statistics and an overview of all."""

import html
import io
import re
import zipfile
import zlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.see.figures import sheet
from regard.whole_file import write_whole
from regard.words import counted

UNREADABLE = (  # what numpy and zipfile raise for other files
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    EOFError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)
LAYOUT = "regard-attention-maps-1"  # of the file that `save` writes


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionMaps:
    """Maps of chosen layers and heads, and what all heads do on average.

    The statistics are means over the queries that see a key, without padding. `entropy` is in
    nats, over the keys and the learned sink. Everything is on the CPU, in float32.

    Attributes:
        weights: `[layers, heads, queries, keys]` of the chosen ones; rows sum to 1 minus the
            learned sink, over all keys.
        tokens: a name for every key of the call, those of the cache first.
        layers: the layers of `weights`.
        heads: the heads of `weights`.
        queries: the rows of `weights`, as indices into `tokens`.
        keys: the columns of `weights`, as indices into `tokens`.
        past: tokens that a cache held before the call; the first query is `tokens[past]`.
        overview: `[all layers, all heads, rows, columns]`, at most 32 x 32. The queries are cut
            into as many equal intervals as there are rows, the keys into columns. A cell is the
            share of its queries' attention that goes to its keys: the mean over the queries of the
            sum over the keys, where a token on a border counts for both in proportion. Rows sum to
            1 minus the learned sink.
        entropy: `[all layers, all heads]`, of the weights of a query; its exponential is the
            number of keys that are read, if they are read equally.
        distance: slots from a query to a key, weighted.
        sink_share: the weight on the first token that is not padding.
        previous_share: the weight on the token before the query, of queries that have one.
        self_share: the weight on the query's own key.
        learned_sink: the weight on the learned sink, as gpt-oss has; 0 without one.
        backends: for all layers, the backend that ran.
        names: for all layers, the name of the module.

    Examples:
        >>> import torch
        >>> from regard import Attention, Causal
        >>> from regard.see import attention
        >>> layer = Attention(8, 2, mask=Causal())
        >>> maps = attention(layer, torch.randn(1, 3, 8), heads=[0], names=["a", "b", "c"])
        >>> maps.weights.shape, maps.entropy.shape
        (torch.Size([1, 1, 3, 3]), torch.Size([1, 2]))
        >>> maps.top(layer=0, head=0, query=0)
        [('a', 1.0)]
    """

    weights: Float[Tensor, "M N Q K"]
    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    past: int
    overview: Float[Tensor, "layers heads rows columns"]
    entropy: Float[Tensor, "layers heads"]
    distance: Float[Tensor, "layers heads"]
    sink_share: Float[Tensor, "layers heads"]
    previous_share: Float[Tensor, "layers heads"]
    self_share: Float[Tensor, "layers heads"]
    learned_sink: Float[Tensor, "layers heads"]
    backends: tuple[str, ...]
    names: tuple[str, ...]

    def map(self, layer: int, head: int) -> Float[Tensor, "Q K"]:
        """The map of one head.

        Raises:
            ValueError: if it was not chosen.
        """
        return self.weights[_index("layer", layer, self.layers), _index("head", head, self.heads)]

    def top(self, layer: int, head: int, query: int, n: int = 5) -> list[tuple[str, float]]:
        """The keys with the largest weights of a query, largest first.

        Keys of weight 0 are left out.

        Args:
            layer: one of `layers`.
            head: one of `heads`.
            query: one of `queries`; negative counts from the last token.
            n: keys at most.

        Raises:
            ValueError: if the map of this query was not computed.
        """
        query += len(self.tokens) if query < 0 else 0
        row = self.map(layer, head)[_index("query", query, self.queries)]
        best = row.topk(min(n, len(row)))
        found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [(self.tokens[self.keys[at]], weight) for at, weight in found if weight > 0]

    def save(self, path: str | Path) -> None:
        """Write the maps, the statistics and the overview as `.npz`, without pickled objects.

        `attention` is `[layers, heads, q, k]` and `tokens` are the names of its keys, which
        CircuitsVis and attnview take as they are (`attention[0]` is one layer's); `query_tokens`
        are the names of its rows, where they are other tokens.

        Raises:
            ValueError: if the name does not end in `.npz`.
            ImportError: if numpy is missing.
        """
        if Path(path).suffix != ".npz":
            raise ValueError(f"maps are saved as .npz, got {str(path)!r}; give maps.npz")
        numpy = _numpy()
        arrays = {each.name: getattr(self, each.name) for each in fields(self)}
        stored = {name: numpy.asarray(value) for name, value in arrays.items()}
        stored["attention"], stored["all_tokens"] = stored.pop("weights"), stored["tokens"]
        stored["tokens"] = _words(numpy, [self.tokens[at] for at in self.keys])
        stored["query_tokens"] = _words(numpy, [self.tokens[at] for at in self.queries])
        written = io.BytesIO()
        numpy.savez_compressed(written, layout=numpy.asarray(LAYOUT), **stored)
        write_whole(Path(path), written.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> "AttentionMaps":
        """Read what `save` wrote.

        Raises:
            ValueError: if the file is not one that `save` wrote.
            OSError: if there is no such file.
            ImportError: if numpy is missing.
        """
        numpy = _numpy()
        try:
            with Path(path).open("rb") as opened, numpy.load(opened, allow_pickle=False) as file:
                stored = {name: file[name] for name in file.files}
        except UNREADABLE as error:
            raise ValueError(f"{path} is not a file of maps: {error}") from error
        return cls(**_restored(stored, path))

    def __str__(self) -> str:
        layers, heads = self.entropy.shape
        of = f"{counted(layers, 'layer')} of {counted(heads, 'head')}"
        chosen = len(self.layers) * len(self.heads)
        rows = counted(len(self.queries), "query", "queries")
        kept = "no map chosen" if not chosen else f"{counted(chosen, 'map')} of {rows}"
        return f"{of} over {counted(len(self.tokens), 'token')}; {kept}"

    def _repr_html_(self) -> str:
        """The overview of all heads as one picture, for notebooks."""
        layers, heads = self.entropy.shape
        try:
            source = f"data:image/png;base64,{b64encode(sheet(self.overview)).decode()}"
        except ImportError as missing:
            return f"<p>{html.escape(f'{self}; {missing}')}</p>"
        says = "rows are layers, columns are heads; darker is more attention"
        return (
            f"<figure><figcaption>{html.escape(str(self))}: {says}</figcaption>"
            f'<img alt="overview of {layers} layers of {heads} heads" '
            f'style="max-width:100%;image-rendering:pixelated" src="{source}"></figure>'
        )


def find(tokens: Sequence[str], text: str) -> tuple[int, ...]:
    """The tokens that hold a part of `text`, wherever it occurs; upper and lower case are one.

    Examples:
        >>> from regard.see import find
        >>> find(["The", " cap", "ital", " of", " the", " Cap", "ital"], "capital")
        (1, 2, 5, 6)
    """
    if not text:
        raise ValueError("the text to find is empty; give at least one character")
    starts = [0]
    for token in tokens:
        starts.append(starts[-1] + len(token))
    found = re.finditer(re.escape(text), "".join(tokens), re.IGNORECASE)
    ranges = [match.span() for match in found]
    return tuple(
        at
        for at in range(len(tokens))
        if any(start < starts[at + 1] and starts[at] < stop for start, stop in ranges)
    )


def _index(what: str, number: int, chosen: tuple[int, ...]) -> int:
    if number not in chosen:
        some = ", ".join(map(str, chosen[:8])) + (", ..." if len(chosen) > 8 else "")
        raise ValueError(f"the map of {what} {number} was not computed, but of {some or 'none'}")
    return chosen.index(number)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise ImportError("maps are saved by numpy; python -m pip install numpy") from error
    return numpy


def _words(numpy: Any, words: Sequence[str]) -> Any:
    """A unicode array: without a type, an array of no words would hold numbers."""
    return numpy.asarray(words, dtype=numpy.str_)


def _restored(stored: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """The fields of `AttentionMaps`, from the arrays of a file."""
    stored = stored | {"weights": stored.get("attention"), "tokens": stored.get("all_tokens")}
    missing = [each.name for each in fields(AttentionMaps) if stored.get(each.name) is None]
    if missing or str(stored.get("layout")) != LAYOUT:
        raise ValueError(
            f"{path} is not a file of maps: it lacks {', '.join(missing) or 'its layout'}; "
            "AttentionMaps.save writes one"
        )
    restored: dict[str, Any] = {}
    for each in fields(AttentionMaps):
        array = stored[each.name]
        if each.name == "past":
            restored[each.name] = int(array)
        elif array.ndim == 1:
            restored[each.name] = tuple(array.tolist())
        else:
            restored[each.name] = torch.from_numpy(array)
    return restored
