"""regard show attention: where the heads of a model look, while its fast kernels run."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from regard.cli.describe import ranges
from regard.cli.layout import Column, tabulate
from regard.cli.terminal import say, waiting
from regard.hf import SMOLLM2, fetch_smollm2, load
from regard.hf.packages import quiet
from regard.see import AttentionMaps, attention, find
from regard.see.map_picture import draw
from regard.see.map_text import bar, best, map_text, readable
from regard.see.pages import head_maps
from regard.words import counted

LARGEST = 2**27  # weights of all maps together, at most: 512 MiB in float32
PAGE = 2**25  # numbers in a page at most, if no maps are chosen: 30 x 9 maps of 350 tokens
AROUND = 16  # tokens before and after a word that was searched
PRINTED = 4  # maps that are printed at most
LEAST = 0.005  # weight of a key that is named: less is 0 %
LINES = 8  # of the table of layers, at most
TOP = 5  # keys of a query, and heads of a statistic, that are named
STANDING_OUT = {  # a row of the table: the statistic, and whether the smallest values are listed
    "on the previous token": ("previous_share", False),
    "on the token itself": ("self_share", False),
    "on the first token": ("sink_share", False),
    "least on the first token": ("sink_share", True),
    "spread widest (nats)": ("entropy", False),
    "farthest (tokens)": ("distance", False),
}


@dataclass(frozen=True)
class Asked:
    """The options as arguments of `attention`, and the pairs of layer and head that are printed."""

    layers: tuple[int, ...] | None
    heads: tuple[int, ...] | None
    pairs: tuple[tuple[int, int], ...]
    queries: tuple[int, ...] | None
    keys: tuple[int, int] | None

    @property
    def anything(self) -> bool:
        """Whether maps are chosen at all."""
        return any(each is not None for each in (self.layers, self.heads, self.queries, self.keys))


@dataclass(frozen=True)
class Looked:
    """The maps of a prompt, the options as numbers, and the tokens of a word that was searched."""

    maps: AttentionMaps
    asked: Asked
    found: tuple[int, ...]
    seconds: float


def look(
    model: Path | None,
    prompt: str,
    lists: Sequence[str | None],
    *,
    window: tuple[int, int] | None = None,
    find: str | None = None,
    most: int = 0,
) -> Looked:
    """Load a model and run it once on a prompt.

    Args:
        model: its folder or file; SmolLM2 if None.
        prompt: the text.
        lists: of layers, of heads and of queries, as they are typed.
        window: the first token, and how many, that are shown.
        find: the word around which tokens are shown.
        most: numbers of all maps together up to which all are computed, if none is chosen.

    Raises:
        ValueError: if an option is no list of numbers, or names what is not there.
    """
    with quiet(), waiting(f"loading {model or SMOLLM2}"):
        loaded, tokenizer = load(model or fetch_smollm2())
    ids, names = _tokens(tokenizer, prompt)
    found = _found(names, find)
    asked = asked_for(*lists, window, found, len(names))
    with quiet(), waiting(f"looking at {counted(len(names), 'token')}"):
        started = time.perf_counter()
        chosen = kept(loaded.config, asked, len(names), most)
        try:
            maps = attention(loaded, ids, names=names, **chosen)
        except IndexError as error:  # a layer, head or query that is not there
            raise ValueError(str(error)) from error
    return Looked(maps, asked, found, time.perf_counter() - started)


def said(maps: AttentionMaps, asked: Asked) -> str:
    """The number of layers, heads and maps, in words. Maps are stored as layers by heads; heads
    that are named as LAYER.HEAD are counted alone."""
    if not asked.pairs:
        return str(maps)
    queries = counted(len(maps.queries), "query", "queries")
    return f"{str(maps).partition(';')[0]}; {counted(len(asked.pairs), 'map')} of {queries}"


def asked_for(
    layers: str | None,
    heads: str | None,
    queries: str | None,
    window: tuple[int, int] | None,
    found: tuple[int, ...],
    tokens: int,
) -> Asked:
    """Parse the options into numbers.

    Raises:
        ValueError: if one of them is not a list of numbers, or there are no such tokens.
    """
    pairs = _pairs(heads)
    own_heads = None if heads is None else tuple(dict.fromkeys(head for _, head in pairs))
    own_layers = numbers("--layers", layers)
    if pairs and pairs[0][0] is not None:
        if own_layers is not None:
            raise ValueError("--heads 3.1 names the layer already; leave out --layers")
        own_layers = tuple(dict.fromkeys(layer for layer, _ in pairs if layer is not None))
    rows, keys = numbers("--queries", queries), None
    if window is not None:
        first, count = window
        if not 0 <= first < tokens or count < 1:
            raise ValueError(
                f"--window {first} {count} is outside of the {tokens} tokens; give the first "
                "token and how many"
            )
        keys = first, min(tokens, first + count)
    if found:
        keys = max(0, found[0] - AROUND), min(tokens, found[0] + AROUND + 1)
    if keys is not None and rows is None:
        rows = tuple(range(*keys))
    return Asked(
        own_layers,
        own_heads,
        tuple((layer, head) for layer, head in pairs if layer is not None),
        rows,
        keys,
    )


def numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """The numbers of a list such as `0,3-5`; None if the option is left out.

    Raises:
        ValueError: if it is no such list.

    Examples:
        >>> numbers("--layers", "0,3-5")
        (0, 3, 4, 5)
    """
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 20:
            raise ValueError(f"{option} is a list of numbers such as 0,3-5, got {text!r}")
        start, stop = int(first), int(last or first)
        if not start <= stop < 1 << 24:
            raise ValueError(f"{option} has ranges from few to many, such as 3-5, got {part!r}")
        found.extend(range(start, stop + 1))
    return tuple(dict.fromkeys(found))


def _pairs(heads: str | None) -> list[tuple[int | None, int]]:
    """Layer, or None, and head of a list such as `0,3-5` or `3.1,4.0`."""
    if heads is None:
        return []
    if "." not in heads:
        return [(None, head) for head in numbers("--heads", heads) or ()]
    parts = [part.strip().partition(".") for part in heads.split(",")]
    if not all(layer.isdecimal() and head.isdecimal() for layer, _, head in parts):
        raise ValueError(f"--heads is a list as 0,3-5, or of LAYER.HEAD as 3.1,4.0, got {heads!r}")
    return [(int(layer), int(head)) for layer, _, head in parts]


def _tokens(tokenizer: Any, prompt: str) -> tuple[Any, list[str]]:
    """The tokens of a prompt, and their text one by one."""
    if tokenizer is None:
        raise ValueError("the model has no tokenizer, which a prompt needs")
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    if not ids.numel():
        raise ValueError("the prompt is empty; give at least one token")
    return ids, [tokenizer.decode([each]) for each in ids[0].tolist()]


def _found(names: Sequence[str], word: str | None) -> tuple[int, ...]:
    """The tokens of a word that is searched."""
    if word is None:
        return ()
    found = find(names, word)
    if not found:
        raise ValueError(f"--find {word!r} is not in the text; upper and lower case are one")
    return found


def kept(config: Any, asked: Asked, tokens: int, most: int) -> dict[str, Any]:
    """The arguments of `attention` that choose maps: what is asked for, or all maps if they hold
    `most` numbers at most.

    Raises:
        ValueError: if what is asked for is larger than 512 MiB.
    """
    config = config.get_text_config(decoder=True)
    rows = tokens if asked.queries is None else len(asked.queries)
    columns = tokens if asked.keys is None else asked.keys[1] - asked.keys[0]
    layers = config.num_hidden_layers if asked.layers is None else len(asked.layers)
    heads = config.num_attention_heads if asked.heads is None else len(asked.heads)
    size = layers * heads * rows * columns
    if not asked.anything:
        return {"layers": range(layers)} if size <= most else {}
    if size > LARGEST:
        raise ValueError(
            f"{layers * heads:,} maps of {rows:,} x {columns:,} take {size / 2**28:.1f} GiB; "
            "choose fewer with --layers, --heads, --queries or --window"
        )
    return {
        "layers": asked.layers,
        "heads": asked.heads,
        "queries": asked.queries,
        "keys": asked.keys,
    }


def write(
    looked: Looked,
    name: str,
    *,
    out: Path | None,
    html: Path | None,
    pictures: Sequence[Path | None],
) -> None:
    """Write the files of numbers, of pictures, and the page."""
    maps, asked = looked.maps, looked.asked
    if out is not None:
        maps.save(out)
    if html is not None:
        head_maps.write(maps, html, title=f"{name}: where its heads look", pairs=asked.pairs)
    for path in pictures:
        if path is not None:
            draw(maps, path, printed(maps, asked) if asked.anything else ())


def as_data(maps: AttentionMaps, asked: Asked, model: str, found: Sequence[int]) -> dict[str, Any]:
    """The maps and statistics as data for JSON."""
    statistics = ("entropy", "distance", "sink_share", "previous_share", "self_share")
    return {
        "model": model,
        "tokens": list(maps.tokens),
        "found": list(found),
        "layers": [
            {
                "name": name,
                "backend": backend,
                **{each: getattr(maps, each)[at].tolist() for each in statistics},
                "learned_sink": maps.learned_sink[at].tolist(),
            }
            for at, (name, backend) in enumerate(zip(maps.names, maps.backends, strict=True))
        ],
        "top": [
            {
                "layer": layer,
                "head": head,
                "query": query,
                "keys": maps.top(layer, head, query, TOP),
            }
            for layer, head in printed(maps, asked)
            for query in maps.queries
        ],
    }


def printed(maps: AttentionMaps, asked: Asked) -> list[tuple[int, int]]:
    """The heads whose maps are shown: those that were named, else those with the least on the first
    token, whose maps show the most of the text."""
    if not len(maps.queries) or not maps.layers:
        return []
    if asked.pairs:
        return list(asked.pairs)
    if asked.layers is None and asked.heads is None:
        least = best(maps.sink_share, maps.sink_share.numel(), least=True)
        return [(layer, head) for layer, head, _ in least][:PRINTED]
    return [(layer, head) for layer in maps.layers for head in maps.heads]


def show(
    maps: AttentionMaps,
    asked: Asked,
    console: Console,
    *,
    word: str | None = None,
    found: Sequence[int] = (),
) -> None:
    """Print the maps that are asked for; if none are, the layers and the heads that stand out."""
    if found:
        console.print()
        say(console, f"{word!r} is in the tokens {', '.join(map(str, found))}.")
    if not asked.anything:
        console.print()
        _show_layers(maps, console)
        console.print()
        _show_heads(maps, console)
        console.print()
        say(
            console,
            "Next: maps, by --heads 3.1, --layers 0,3, --find WORD or --html FILE.",
            style="dim",
        )
        return
    shown = printed(maps, asked)
    for layer, head in shown[:PRINTED]:
        _show_map(maps, layer, head, console)
    if len(shown) > PRINTED:
        say(
            console, f"{len(shown) - PRINTED} more maps: choose with --heads LAYER.HEAD, or --html."
        )


def _show_layers(maps: AttentionMaps, console: Console) -> None:
    """Means over the heads of each layer, or of a few layers where there are many."""
    learned = bool(maps.learned_sink.any())
    columns = [
        Column("layers"),
        Column("on the first token", left=True),
        *([Column("learned sink")] if learned else []),
        Column("previous token"),
        Column("itself"),
        Column("distance"),
        Column("entropy, nats"),
        Column("kernel", left=True),
    ]
    rows, layers = [], len(maps.backends)
    together = -(-layers // LINES)
    for first in range(0, layers, together):
        some = slice(first, min(first + together, layers))
        sink = maps.sink_share[some].mean().item()
        rows.append(
            [
                ranges(range(some.start, some.stop)),
                f"{sink:4.0%} {bar(sink)}",
                *([f"{maps.learned_sink[some].mean():.0%}"] if learned else []),
                f"{maps.previous_share[some].mean():.0%}",
                f"{maps.self_share[some].mean():.0%}",
                f"{maps.distance[some].mean():.1f}",
                f"{maps.entropy[some].mean():.2f}",
                ", ".join(dict.fromkeys(maps.backends[some])),
            ]
        )
    tabulate(console, columns, rows)


def _show_heads(maps: AttentionMaps, console: Console) -> None:
    """The heads that stand out, as LAYER.HEAD."""
    rows = []
    for what, (name, least) in STANDING_OUT.items():
        heads = best(getattr(maps, name), TOP, least=least)
        share = name.endswith("share")
        said = (
            f"{layer}.{head} {value:.0%}" if share else f"{layer}.{head} {value:.1f}"
            for layer, head, value in heads
        )
        rows.append([what, ", ".join(said)])
    tabulate(console, [Column("heads", left=True), Column("LAYER.HEAD", words=True)], rows)


def _show_map(maps: AttentionMaps, layer: int, head: int, console: Console) -> None:
    """One map, and the keys of its last query."""
    console.print()
    say(
        console,
        f"{layer}.{head}: rows are queries, columns keys {_ends(maps)}",
        bold=f"{layer}.{head}",
    )
    console.print(Text(map_text(maps, layer, head, width=console.width)), soft_wrap=True)
    last = maps.queries[-1]
    top = maps.top(layer, head, last, TOP)
    keys = [f"{readable(token)} {weight:.0%}" for token, weight in top if weight >= LEAST]
    say(console, f"{last} {readable(maps.tokens[last])} reads {', '.join(keys) or 'nothing'}")


def _ends(maps: AttentionMaps) -> str:
    """The first and last key of the columns."""
    return f"{maps.keys[0]} to {maps.keys[-1]}" if maps.keys else ""
