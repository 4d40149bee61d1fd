"""regard show attention: where the heads of a model look, while its fast kernels run."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from regard.cli import options
from regard.cli.layout import tabulate
from regard.cli.options import option
from regard.cli.terminal import print_json, say, stdout, waiting
from regard.words import counted, ranges

if TYPE_CHECKING:
    from regard.see import AttentionMaps

LARGEST = 2**27  # weights of all maps together, at most: 512 MiB in float32
PAGE = 2**25  # numbers in a page at most, if no maps are chosen: 30 x 9 maps of 350 tokens
AROUND = 16  # tokens before and after a word that was searched
NEXT = "Next: maps, by --heads 3.1, --layers 0,3, --find WORD or --html FILE."
PRINTED = 4  # maps that are printed at most
LEAST = 0.005  # weight of a key that is named: less is 0 %
LINES = 8  # of the table of layers, at most
MOST_OF_A_RANGE = 1 << 24  # numbers as 3-5
MEANS = {  # columns of the table of layers: the statistic, and its form
    "on the first token": ("sink_share", "4.0%"),
    "learned sink": ("learned_sink", ".0%"),
    "previous token": ("previous_share", ".0%"),
    "itself": ("self_share", ".0%"),
    "distance": ("distance", ".1f"),
    "entropy, nats": ("entropy", ".2f"),
}
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


@partial(options.verb, of=options.shows)
def show_attention(
    model: options.OptionalModel = None,
    text: str | None = option(None, "The prompt.", callback=options.in_utf8),
    text_file: Path | None = option(None, "A file with the prompt."),
    layers: str | None = option(None, "Layers whose maps are computed, as 0,3-5."),
    heads: str | None = option(None, "Heads as LAYER.HEAD: 3.1,4.0."),
    queries: str | None = option(None, "Tokens whose rows are computed, as 0,3-5."),
    find: str | None = option(None, "Show the part around this word."),
    out: Path | None = option(None, "Save maps and tokens, as other viewers read them: .npz."),
    svg: options.Svg = None,
    png: options.Png = None,
    html: options.Html = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Draw where the heads of a model look, while its fast kernels run."""
    if (text is None) == (text_file is None):
        options.refuse("--text", "give one of --text and --text-file")
    options.start("regard.see", threads=threads)
    from regard.convert.texts import read_text
    from regard.see import attention
    from regard.see.map_picture import draw
    from regard.see.pages import head_maps

    prompt = str(text) if text_file is None else read_text(text_file)
    lists = (_numbers("--layers", layers), _pairs(heads), _numbers("--queries", queries))
    loaded, ids, names = _load(model, prompt)
    found = _found(names, find)
    asked = asked_for(*lists, found, len(names))
    most = LARGEST if out is not None else PAGE if html is not None else 0
    chosen = kept(loaded.config, asked, len(names), most)
    started = time.perf_counter()
    with waiting(f"looking at {counted(len(names), 'token')}"):
        try:
            maps = attention(loaded, ids, names=names, **chosen)
        except IndexError as error:  # a layer, head or query that is not there
            raise ValueError(str(error)) from error
    seconds, name = time.perf_counter() - started, str(model or options.DEFAULT_MODEL)
    shown = printed(maps, asked)
    if out is not None:
        maps.save(out)
    if html is not None:
        head_maps.write(maps, html, title=f"{name}: where its heads look", pairs=asked.pairs)
    for path in (svg, png):
        if path is not None:
            draw(maps, path, shown if asked.anything else ())
    if as_json:
        print_json(as_data(maps, shown, name, found), indent=None)
        return
    console = stdout(80)
    say(console, f"{name}: {_said(maps, asked)}, in {seconds:.1f} s.")
    if found:
        console.print()
        say(console, f"{find!r} is in the tokens {', '.join(map(str, found))}.")
    (_show_maps if asked.anything else _show_all)(maps, shown, console)


def _load(model: Path | None, prompt: str) -> tuple[Any, Any, list[str]]:
    """The model, the tokens of a prompt, and their text one by one."""
    from regard.hf import fetch_smollm2, load
    from regard.hf.packages import quiet

    with quiet(), waiting(f"loading {model or options.DEFAULT_MODEL}"):
        loaded, tokenizer = load(model or fetch_smollm2())
    if tokenizer is None:
        raise ValueError("the model has no tokenizer, which a prompt needs")
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    if not ids.numel():
        raise ValueError("the prompt is empty; give at least one token")
    return loaded, ids, [tokenizer.decode([each]) for each in ids[0].tolist()]


def _found(names: Sequence[str], word: str | None) -> tuple[int, ...]:
    """The tokens of a word that is searched."""
    from regard.see import find

    found = () if word is None else find(names, word)
    if word is not None and not found:
        raise ValueError(f"--find {word!r} is not in the text; upper and lower case are one")
    return found


def asked_for(
    layers: tuple[int, ...] | None,
    pairs: tuple[tuple[int, int], ...],
    queries: tuple[int, ...] | None,
    found: tuple[int, ...],
    tokens: int,
) -> Asked:
    """The arguments of `attention`: around the first token that was found, if one was. Raises a
    ValueError if layers are given twice."""
    heads = None
    if pairs:
        if layers is not None:
            raise ValueError("--heads 3.1 names the layer already; leave out --layers")
        layers, heads = (tuple(dict.fromkeys(each)) for each in zip(*pairs, strict=True))
    keys = None
    if found:
        keys = max(0, found[0] - AROUND), min(tokens, found[0] + AROUND + 1)
        queries = queries or tuple(range(*keys))
    return Asked(layers, heads, pairs, queries, keys)


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """The numbers of a list such as `0,3-5`; None if the option is left out. Raises a ValueError if
    it is no such list."""
    if text is None:
        return None
    found: list[int] = []
    for part in map(str.strip, text.split(",")):
        if not re.fullmatch(r"\d{1,9}(-\d{1,9})?", part, re.ASCII):
            raise ValueError(f"{option} is a list of numbers such as 0,3-5, got {text!r}")
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not 0 < len(numbers) < MOST_OF_A_RANGE:
            raise ValueError(f"{option} has ranges from few to many, such as 3-5, got {part!r}")
        found.extend(numbers)
    return tuple(dict.fromkeys(found))


def _pairs(heads: str | None) -> tuple[tuple[int, int], ...]:
    """Layer and head of a list such as `3.1,4.0`."""
    parts = [] if heads is None else [part.strip() for part in heads.split(",")]
    if not all(re.fullmatch(r"\d{1,9}\.\d{1,9}", part, re.ASCII) for part in parts):
        raise ValueError(f"--heads is a list of LAYER.HEAD as 3.1,4.0, got {str(heads)[:40]!r}")
    return tuple((int(layer), int(head)) for layer, _, head in (p.partition(".") for p in parts))


def kept(config: Any, asked: Asked, tokens: int, most: int) -> dict[str, Any]:
    """The arguments of `attention` that choose maps: what is asked for, or all maps if they hold
    `most` numbers at most. Raises a ValueError if what is asked for is larger than 512 MiB."""
    config = config.get_text_config(decoder=True)
    rows = tokens if asked.queries is None else len(asked.queries)
    columns = tokens if asked.keys is None else asked.keys[1] - asked.keys[0]
    layers = config.num_hidden_layers if asked.layers is None else len(asked.layers)
    maps = layers * (config.num_attention_heads if asked.heads is None else len(asked.heads))
    size = maps * rows * columns
    if not asked.anything:
        return {"layers": range(layers)} if size <= most else {}
    if size > LARGEST:
        raise ValueError(
            f"{maps:,} maps of {rows:,} x {columns:,} take {size / 2**28:.1f} GiB; "
            "choose fewer with --layers, --heads or --queries"
        )
    return {name: getattr(asked, name) for name in ("layers", "heads", "queries", "keys")}


def as_data(
    maps: "AttentionMaps", shown: Sequence[tuple[int, int]], model: str, found: Sequence[int]
) -> dict[str, Any]:
    """The maps and statistics as data for JSON."""
    statistics = ("entropy", "distance", "sink_share", "previous_share", "self_share")
    layers = [
        {"name": name, "backend": backend}
        | {each: getattr(maps, each)[at].tolist() for each in (*statistics, "learned_sink")}
        for at, (name, backend) in enumerate(zip(maps.names, maps.backends, strict=True))
    ]
    top = [
        {"layer": layer, "head": head, "query": query, "keys": maps.top(layer, head, query, TOP)}
        for layer, head in shown
        for query in maps.queries
    ]
    tokens, found = list(maps.tokens), list(found)
    return {"model": model, "tokens": tokens, "found": found, "layers": layers, "top": top}


def printed(maps: "AttentionMaps", asked: Asked) -> list[tuple[int, int]]:
    """The heads whose maps are shown: those that were named, else those with the least on the first
    token, whose maps show the most of the text."""
    from regard.see.map_text import best

    if not len(maps.queries) or not maps.layers:
        return []
    if asked.pairs:
        return list(asked.pairs)
    if asked.layers is None and asked.heads is None:
        least = best(maps.sink_share, maps.sink_share.numel(), least=True)
        return [(layer, head) for layer, head, _ in least][:PRINTED]
    return [(layer, head) for layer in maps.layers for head in maps.heads]


def _said(maps: "AttentionMaps", asked: Asked) -> str:
    """The number of layers, heads and maps, in words. Maps are stored as layers by heads; heads
    that are named as LAYER.HEAD are counted alone."""
    if not asked.pairs:
        return str(maps)
    queries = counted(len(maps.queries), "query", "queries")
    return f"{str(maps).partition(';')[0]}; {counted(len(asked.pairs), 'map')} of {queries}"


def _show_all(maps: "AttentionMaps", shown: Sequence[Any], console: Console) -> None:
    """Print the layers, and the heads that stand out."""
    for part in (_show_layers, _show_heads):
        console.print()
        part(maps, console)
    console.print()
    say(console, NEXT, style="dim")


def _show_maps(maps: "AttentionMaps", shown: Sequence[tuple[int, int]], console: Console) -> None:
    """Print the first maps of those that are asked for."""
    for layer, head in shown[:PRINTED]:
        _show_map(maps, layer, head, console)
    if (more := len(shown) - PRINTED) > 0:
        say(console, f"{more} more maps: choose with --heads LAYER.HEAD, or --html.")


def _show_layers(maps: "AttentionMaps", console: Console) -> None:
    """Means over the heads of each layer, or of a few layers where there are many."""
    from regard.see.map_text import bar

    rows, layers = [], len(maps.backends)
    together = -(-layers // LINES)
    shown = {n: each for n, each in MEANS.items() if n != "learned sink" or maps.learned_sink.any()}
    for first in range(0, layers, together):
        some = slice(first, min(first + together, layers))
        means = [(getattr(maps, name)[some].mean().item(), form) for name, form in shown.values()]
        cells = [f"{mean:{form}}" for mean, form in means]
        cells[0] += f" {bar(means[0][0]):<10}"
        kernels = ", ".join(dict.fromkeys(maps.backends[some]))
        rows.append([ranges(range(some.start, some.stop)), *cells, kernels])
    tabulate(console, ["layers", *shown, "kernel"], rows)


def _show_heads(maps: "AttentionMaps", console: Console) -> None:
    """The heads that stand out, as LAYER.HEAD."""
    from regard.see.map_text import best

    rows = []
    for what, (name, least) in STANDING_OUT.items():
        form = ".0%" if name.endswith("share") else ".1f"
        heads = best(getattr(maps, name), TOP, least=least)
        rows.append(
            [what, ", ".join(f"{layer}.{head} {value:{form}}" for layer, head, value in heads)]
        )
    tabulate(console, ["heads", "LAYER.HEAD"], rows)


def _show_map(maps: "AttentionMaps", layer: int, head: int, console: Console) -> None:
    """One map, and the keys of its last query."""
    from regard.see.map_text import map_text, readable

    name, ends = f"{layer}.{head}", f"{maps.keys[0]} to {maps.keys[-1]}" if maps.keys else ""
    console.print()
    say(console, f"{name}: rows are queries, columns keys {ends}", bold=name)
    console.print(Text(map_text(maps, layer, head, width=console.width)), soft_wrap=True)
    last = maps.queries[-1]
    top = maps.top(layer, head, last, TOP)
    keys = [f'"{readable(token)}" {weight:.0%}' for token, weight in top if weight >= LEAST]
    said = f'Query {last}, "{readable(maps.tokens[last])}", reads'
    say(console, f"{said} {', '.join(keys) or 'nothing'}.")
