"""Every decoder of the installed transformers, tiny and random: is it itself under regard?

Question: of all models that `AutoModelForCausalLM` knows, which compute the same under `install`
and under `attn_implementation="regard"`, which are refused and why, and is any of them different?

Each model is built from its configuration class, its sizes shrunk by rules that know no model. Its
own eager forward is the reference: logits with padding left and right, greedy generation with its
cache, beams, a static cache, gradients, bfloat16.

    python benchmarks/models.py
    python benchmarks/models.py --only llama mistral
    python benchmarks/models.py --only llama --write    # and its place in the guide's tables
    python benchmarks/models.py --json rows.json        # the rows, with reasons
    python benchmarks/models.py --read rows.json --write  # the tables from rows of before
"""

import argparse
import copy
import json
import logging
import multiprocessing
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto import modeling_auto as known
from transformers.models.auto.configuration_auto import model_type_to_module_name

import regard.hf
from regard.hf.running import registering

ROOT = Path(__file__).parents[1]
GUIDES = (ROOT / "docs/guides/transformers.md", ROOT / "docs/zh/guides/transformers.md")
MARKS = ("<!-- models -->", "<!-- /models -->")
SECONDS = 90  # for one model
NEW = 20  # tokens that are generated
HEAD, HEADS, LAYERS, VOCABULARY, WINDOW = 16, 4, 2, 99, 5
WIDE = HEAD * HEADS
RULES: tuple[tuple[str, int], ...] = (  # of a configuration: what ends like this is as large
    (r"vocab_size|vocab_size_per_layer_input", VOCABULARY),
    (r"(num|n|encoder|decoder|h)_(hidden_|decoder_|encoder_)?layers?|depth", LAYERS),
    (r"(encoder_|decoder_)?attention_heads|n_heads?|num_(attention_)?heads", HEADS),
    (r"(v_|swa_v_|swa_|global_|attention_)?head_dim|kv_channels|d_kv|attention_head_size", HEAD),
    (r"qk_(nope|rope)_head_dim", HEAD // 2),
    (r"qk_head_dim", HEAD),
    (r"(kv|q|o)_lora_rank", WIDE // 2),
    (r"hidden_size|d_model|n_embd|embed_dim|embedding_size|word_embed_proj_dim|dim|emb_dim", WIDE),
    (r".*(intermediate|ffn|ff|inner|expert|mlp)\w*(size|dim|hidden)?|n_inner|d_ff", WIDE),
    (r"max_position_embeddings|n_positions|max_seq_len|n_ctx|max_target_positions", 128),
    (r"(sliding_window|window_size|local_window_size|attention_chunk_size|swa_window)", WINDOW),
    (r"(num|n)_(local_|routed_|hash_)?experts|moe_num_experts|num_experts", 8),
    (r".*experts_per_tok(en)?|moe_top_?k|top_k_experts|moe_k|top_k", 2),
    (r"rotary_dim", HEAD // 2),
    (r"codebook_size", 64),
    (r"n_group|num_expert_group|n_groups", 2),
    (r"topk_group|num_selected_groups", 1),
)


COUNTS = {"num_experts_per_tok": 2, "num_key_value_heads": HEADS // 2, "head_dim": HEAD}  # if None
OVERRIDES: dict[str, dict[str, Any]] = {  # where the sizes of one model depend on one another
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {
            each: {"rope_type": "default", "rope_theta": 10_000.0}
            for each in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [64] * 4,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "smollm3": {
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * 2,
        "no_rope_layers": [1, 0],
    },
}


def models() -> dict[str, str]:
    """Every model type with a causal decoder, and its class."""
    return dict(known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def shrunk(config: Any, layers: int | None = None) -> dict[str, Any]:
    """The values of a configuration with which its model is tiny."""
    given = config.to_dict()
    own = next(
        (given[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in given), 0
    )
    types = given.get("layer_types") or []
    kinds = list(dict.fromkeys(types))
    small: dict[str, Any] = {}
    if given.get("use_sliding_window") is False:
        small["use_sliding_window"] = True
        kinds = kinds and ["sliding_attention", "full_attention"]
    layers = layers or max(LAYERS, len(kinds))
    heads = given.get("num_attention_heads") or given.get("n_head") or given.get("num_heads") or 0
    if given.get("is_decoder") is False:
        small["is_decoder"] = True
    rope = given.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_theta", 0) is None:
        small["rope_parameters"] = {**rope, "rope_theta": 10_000.0}
    for name, value in given.items():
        if name in ("model_type", "transformers_version"):
            continue
        if name in getattr(config, "sub_configs", {}) and isinstance(value, dict):
            part = getattr(config, name)
            small[name] = {**value, **shrunk(part)}
        elif isinstance(value, list) and own and len(value) == own:
            small[name] = (
                (kinds * layers)[:layers] if name == "layer_types" else list(_spread(value, layers))
            )
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            small[name] = (
                min(value, 2) if name.startswith(("pad", "bos", "eos")) else 90 + len(small) % 9
            )
        elif name in (
            "num_key_value_heads",
            "n_head_kv",
            "num_kv_heads",
            "swa_num_key_value_heads",
            "num_global_key_value_heads",
        ):
            small[name] = value if value in (None, 1) else HEADS if value == heads else HEADS // 2
        elif isinstance(value, dict) and value and all(str(each).isdigit() for each in value):
            small[name] = {key: each for key, each in value.items() if int(key) < layers}
        elif name == "mrope_section":
            small[name] = [HEAD // 8, HEAD // 8, HEAD // 4]
        elif name in COUNTS and value is None:
            small[name] = COUNTS[name]
        elif isinstance(value, int) and not isinstance(value, bool) and value > 1:
            sizes = [size for rule, size in RULES if re.fullmatch(rule, name)]
            small |= dict.fromkeys([name][: len(sizes)], sizes[-1] if sizes else 0)
    if "qk_rope_head_dim" in small and given.get("head_dim") == given["qk_rope_head_dim"]:
        small["head_dim"] = small["qk_rope_head_dim"]  # a size that is computed
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if name in small:
            small[name] = layers
    return {name: value for name, value in small.items() if value != given.get(name)}


def _spread(values: list[Any], count: int) -> Iterator[Any]:
    """So many of these values: each kind once before any comes twice."""
    firsts = [i for i, each in enumerate(values) if each not in values[:i]]
    chosen = sorted((firsts + [i for i in range(len(values)) if i not in firsts])[:count])
    return (values[i] for i in chosen)


def configured(name: str) -> Any:
    """A tiny configuration of this type."""
    whole = type(AutoConfig.for_model(name))
    config = whole(**{**shrunk(whole()), **OVERRIDES.get(name, {})})
    wanted = getattr(transformers, models()[name]).config_class
    if isinstance(config, wanted):
        return config
    parts = [getattr(config, each) for each in config.sub_configs]
    return next((each for each in parts if isinstance(each, wanted)), config)


def built(name: str, config: Any, implementation: str) -> nn.Module:
    """The same random model at every call, with this implementation of attention."""
    kind = getattr(transformers, models()[name])
    config = copy.deepcopy(config)
    torch.manual_seed(7)
    with torch.device("meta"):
        size = sum(each.numel() for each in kind._from_config(copy.deepcopy(config)).parameters())
    if size > 60_000_000:
        raise ValueError(f"its shrunk model still has {size:,} parameters")
    torch.manual_seed(7)
    model = kind._from_config(config, attn_implementation=implementation).eval().float()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for each in model.parameters():
            noise = torch.randn(each.shape, generator=generator)
            if each.ndim == 2 and each.is_floating_point():
                each.copy_(noise * 1.2 / each.shape[-1] ** 0.5)
            elif each.ndim == 1:
                each.add_(0.2 * noise)
    generation = model.generation_config
    generation.eos_token_id, generation.pad_token_id = None, 0
    generation.bos_token_id = 1
    return model


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Two rows of tokens, and masks that pad one of them at the left and at the right."""
    ids = torch.randint(5, 85, (2, 11), generator=torch.Generator().manual_seed(3))
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :4], right[0, -3:] = 0, 0
    return ids, left, right


def logits(model: nn.Module, mask: Tensor | None) -> Tensor:
    """The logits of the tokens that are no padding."""
    ids, *_ = tokens()
    given = {} if mask is None else {"attention_mask": mask}
    out = model(input_ids=ids, **given).logits.float()
    return out if mask is None else out[mask.bool()]


def generated(model: nn.Module, mask: Tensor, **options: Any) -> Any:
    """What is generated after tokens that are padded at the left."""
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True} | options
    options["output_scores"] = "num_beams" in options
    made = model.generate(tokens()[0], attention_mask=mask, output_logits=True, **options)
    return made.sequences, torch.stack(made.logits), getattr(made, "sequences_scores", None)


def gradients(model: nn.Module) -> Tensor:
    """All gradients of a loss."""
    ids, left, _ = tokens()
    model.zero_grad()
    out = model(input_ids=ids, attention_mask=left).logits.float()[left.bool()]
    torch.nn.functional.cross_entropy(out, ids[left.bool()]).backward()
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return torch.cat([each.flatten() for each in grads])


@torch.no_grad()
def in_bfloat16(model: nn.Module) -> Tensor:
    """Logits in bfloat16."""
    narrow = model.to(torch.bfloat16)
    return logits(narrow, tokens()[1])


def checks() -> dict[str, Callable[[nn.Module], Any]]:
    """What is compared, the last first changing the model."""
    _, left, right = tokens()
    without = torch.no_grad()
    return {
        "logits": without(lambda model: logits(model, None)),
        "left padding": without(lambda model: logits(model, left)),
        "right padding": without(lambda model: logits(model, right)),
        "greedy": lambda model: generated(model, left),
        "beams": lambda model: generated(model, left, num_beams=3),
        "static cache": lambda model: generated(model, left, cache_implementation="static"),
        "gradients": gradients,
        "bfloat16": in_bfloat16,
    }


def results(model: nn.Module) -> dict[str, Any]:
    """Each check's outcome: a value, or the error in words."""
    made: dict[str, Any] = {}
    for name, check in checks().items():
        try:
            made[name] = check(model)
        except Exception as error:
            made[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return made


def difference(own: Any, ours: Any, near: float) -> str | None:
    """How two outcomes differ, in words; None if they do not, or there is nothing to compare."""
    if isinstance(own, str):
        return None
    if isinstance(ours, str):
        return ours
    if isinstance(own, Tensor):
        if own.shape != ours.shape:
            return f"shapes {tuple(own.shape)}, {tuple(ours.shape)}"
        far = (own - ours).abs().max() / own.abs().max()
        return None if own.isnan().any() or far <= near else f"{far:.1e} of the largest"
    (text, steps, score), (other_text, other_steps, other_score) = own, ours
    if score is not None:
        same = torch.equal(text, other_text) or bool(
            ((score - other_score).abs() <= near * 9).all()
        )
        return None if same else "other texts"
    prompt = text.shape[1] - len(steps)
    for step in range(len(steps)):
        begun = (text[:, : prompt + step] == other_text[:, : prompt + step]).all(dim=1)
        if begun.any():
            worse = difference(steps[step][begun], other_steps[step][begun], near)
            if worse:
                return f"{worse} at token {step + 1}"
    return None


def judged(own: dict[str, Any], ours: dict[str, Any]) -> tuple[str, str]:
    """`equal`, `refused` or `different`, and why."""
    for name, expected in own.items():
        near = 1e-3
        if name == "bfloat16":
            if isinstance(expected, str) or isinstance(own["left padding"], str):
                continue
            exact = own["left padding"]
            near = 0.03 + 2.0 * float((expected - exact).abs().max() / exact.abs().max())
            expected = exact
        why = difference(expected, ours[name], near)
        if why is not None:
            kind = (
                "refused"
                if "regard" in why and why.startswith(("ValueError", "TypeError"))
                else "different"
            )
            return kind, f"{name}: {why}"
    return "equal", ""


def usual(kind: type) -> str:
    return "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"


def registered(name: str, config: Any, row: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """Results with regard as one of transformers' attention functions."""
    calls = Counter[str]()
    own = registering.attention

    def counted(*args: Any, **given: Any) -> Any:
        calls["regard"] += 1
        return own(*args, **given)

    regard.hf.register()
    transformers.AttentionInterface.register("regard", counted)
    try:
        model = built(name, config, usual(getattr(transformers, models()[name])))
        model.set_attn_implementation("regard")
    except (ValueError, NotImplementedError, ImportError) as error:
        return " ".join(str(error).split()), {}
    made = results(model)
    if not calls["regard"]:
        return "its attention does not call transformers' AttentionInterface", made
    return "", made


def installed(name: str, config: Any, row: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """Results with `install`."""
    model = built(name, config, usual(getattr(transformers, models()[name])))
    try:
        done = regard.hf.install(model)
    except ValueError as error:
        return " ".join(str(error).split()), {}
    left = set(done.left_alone.values())
    row["install_how"] = "calls" if done.called else "knows"
    row["install_said"] = "; ".join(sorted(set(done.called.values())))
    return "left alone: " + "; ".join(sorted(left)) if left else "", results(model)


def surveyed(name: str) -> dict[str, str]:
    """One model's row."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    row = {"folder": model_type_to_module_name(name), "model": name}
    try:
        config = configured(name)
        model = built(name, config, "eager")
        own = results(model)
        if isinstance(own["logits"], str):
            raise ValueError(own["logits"])
    except Exception as error:
        return row | {"unbuilt": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    row["own"] = "; ".join(f"{each}: {made}" for each, made in own.items() if isinstance(made, str))
    for way, run in (("register", registered), ("install", installed)):
        try:
            why, ours = run(name, config, row)
        except Exception as error:
            row |= {way: "different", f"{way}_why": f"{type(error).__name__}: {error}"}
            continue
        kind, what = judged(own, ours) if ours else ("refused", why)
        if kind == "equal" and why:
            kind, what = ("in part" if why.startswith("left alone") else "refused"), why
        row |= {way: kind, f"{way}_why": what}
    return row


def _send(name: str, pipe: Any) -> None:
    pipe.send(surveyed(name))


def bounded(name: str) -> dict[str, str]:
    """`surveyed` in a process of its own, which is ended when its time is over."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_send, args=(name, theirs))
    process.start()
    theirs.close()
    row = {"folder": model_type_to_module_name(name), "model": name}
    try:
        row = ours.recv() if ours.poll(SECONDS) else row | {"unbuilt": f"not done in {SECONDS} s"}
    except EOFError:
        row |= {"unbuilt": "its process ended"}
    process.kill()
    process.join()
    return row


def outcomes(row: dict[str, str]) -> set[int]:
    """Which rows of the table, counted from 0, name a model."""
    if "unbuilt" in row:
        return {7}
    install = {"equal": 0 if row.get("install_how") == "knows" else 1, "in part": 2}
    register = {"equal": 4, "refused": 5, "different": 6}
    return {(install | {"refused": 3, "different": 6})[row["install"]], register[row["register"]]}


def tabled(text: str) -> dict[str, set[int]]:
    """The same of each model in a table of before; one that is nowhere else is equal in row 4."""
    found: dict[str, set[int]] = {}
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    for number, line in enumerate(lines):
        for name in re.findall("`([^`]+)`", line.rpartition("|")[0].rpartition("|")[2]):
            found.setdefault(name, set()).add(number)
    return {name: each if each & {5, 6, 7} else each | {4} for name, each in found.items()}


def table(found: dict[str, set[int]], words: tuple[str, ...]) -> str:
    """The models of each outcome, as Markdown."""
    lines = ["|  | | |", "|---|---|---|"]
    for number, said in enumerate(words):
        names = sorted(name for name, each in found.items() if number in each)
        shown = "" if number == 4 else ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {said} | {len(names)} | {shown} |")
    return "\n".join(lines)


ENGLISH = (
    "equal under `install`, as layers that regard knows",
    "equal under `install`, by their own forward, which calls regard",
    "equal under `install`, which leaves some of the attention alone",
    "refused by `install`",
    'equal under `attn_implementation="regard"`',
    'refused under `attn_implementation="regard"`',
    "different",
    "not built by the survey, so not compared",
)
CHINESE = (
    "`install` 后相同: regard 认识其注意力层",
    "`install` 后相同: 由其自身的 forward 调用 regard",
    "`install` 后相同: 但保留了部分注意力不变",
    "`install` 拒绝",
    '`attn_implementation="regard"` 时相同',
    '`attn_implementation="regard"` 时拒绝',
    "不同",
    "此调查未能构建: 因此没有比较",
)


def write(rows: list[dict[str, str]]) -> None:
    """Put the rows into the tables between the marks of the guide and of its twin, in the place of
    earlier ones of the same models."""
    new = {row["model"]: outcomes(row) for row in rows}
    for path, words in zip(GUIDES, (ENGLISH, CHINESE), strict=True):
        before, _, rest = path.read_text().partition(MARKS[0])
        old, _, after = rest.partition(MARKS[1])
        found = {name: each for name, each in tabled(old).items() if name in models()} | new
        path.write_text(f"{before}{MARKS[0]}\n\n{table(found, words)}\n\n{MARKS[1]}{after}")


def shown(row: dict[str, str]) -> str:
    """A row in one line."""
    if "unbuilt" in row:
        return f"{row['model']:28}cannot be built: {row['unbuilt'][:200]}"
    ways = (f"{way} {row[way]} {row[f'{way}_why'][:90]}" for way in ("register", "install"))
    return f"{row['model']:28}{' | '.join(ways)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="model types")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--read", type=Path, help="take the rows from here, without a run")
    parser.add_argument("--write", action="store_true", help="write the tables of the guide")
    options = parser.parse_args()
    began = time.perf_counter()
    rows = json.loads(options.read.read_text()) if options.read else []
    for name in () if options.read else options.only or models():
        rows.append(bounded(name))
        print(shown(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.write:
        write(rows)
    ways = ("register", "install")
    counts = {way: Counter(row.get(way, "unbuilt") for row in rows) for way in ways}
    seconds = round(time.perf_counter() - began)
    print(json.dumps({"models": len(rows), **counts, "seconds": seconds}))


if __name__ == "__main__":
    main()
