"""Compile, export, autocast, copy, pickle, devices, and the shape of the house itself."""

import ast
import copy
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import regard
from regard import (
    Alibi,
    Attention,
    Causal,
    GroupedQueryAttention,
    KVCache,
    LatentKVAttention,
    Llama3,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    Rotary,
    SelfAttention,
    SlidingWindow,
)

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src/regard").rglob("*.py"))
MLA = {
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "rope": Rotary(4, pairing="pairs"),
}
LAYERS = [
    SelfAttention(32, mask=Causal()),
    MultiHeadAttention(32, 4, bias=True, dropout=0.1),
    MultiQueryAttention(32, 4, rope=Rotary(8, scaling=Llama3(8.0)), mask=Causal()),
    GroupedQueryAttention(
        32,
        4,
        2,
        head_dim=6,
        bias={"q_proj", "v_proj"},
        out_bias=True,
        qk_norm="width",
        norm_eps=1e-5,
        rope=Rotary(4, theta=5e5),
        mask=Causal() & SlidingWindow(3),
        scale=0.5,
        score_bias=Alibi.for_heads(4),
        softcap=30.0,
        sinks=True,
        gate="head",
    ),
    Attention(32, 4, num_kv_heads=2, context_size=12, backend="eager"),
    MultiHeadLatentAttention(32, 4, **MLA, q_lora_rank=10, mask=Causal(), form="absorbed"),
    LatentKVAttention(32, 4, num_kv_heads=2, head_dim=8, kv_lora_rank=12, rope=Rotary(8)),
]
SELF = [layer for layer in LAYERS if getattr(layer, "context_size", 32) == 32]


@pytest.fixture(scope="module")
def traced():
    script = ROOT / "tests/support/traced_layers.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_decoding_compiles_to_two_graphs_and_three_when_a_window_binds(traced):
    decoded = {name: each for name, each in traced.items() if "decode" in name}
    assert len(decoded) == 8
    for name, each in decoded.items():
        assert each["graphs"] <= (3 if "window" in name else 2), name
        assert each["gap"] <= 1e-6, name


def test_compiled_layers_train_as_eager_ones(traced):
    trained = {name: each for name, each in traced.items() if "trained" in name}
    assert len(trained) == 8
    assert max(trained.values()) <= 1e-5


def test_one_graph_takes_masks_of_any_size(traced):
    masked = {name: each for name, each in traced.items() if "masked" in name}
    assert len(masked) == 4
    assert max(masked.values()) <= 1e-5


def test_one_exported_program_serves_every_batch_and_length(traced):
    exported = {name: each for name, each in traced.items() if "exported" in name}
    assert len(exported) == 7
    assert max(exported.values()) <= 1e-6


def test_graphs_give_what_backends_that_stay_out_of_them_give(traced):
    found = {name: each for name, each in traced.items() if "attend" in name}
    assert {each["name"] for each in found.values()} == {"fused", "blocked"}
    assert max(each["gap"] for each in found.values()) <= 1e-6


@pytest.mark.parametrize("layer", SELF, ids=lambda layer: type(layer).__name__)
def test_autocast_is_the_layer_in_half_precision(layer):
    layer = copy.deepcopy(layer).eval()
    x = torch.randn(2, 6, 32)
    with torch.no_grad():
        full = layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = layer(x)
            cache = KVCache()
            if "Causal" in repr(layer):
                parts = [layer(chunk, cache=cache) for chunk in x.split([3, 1, 2], dim=1)]
                torch.testing.assert_close(
                    torch.cat(parts, dim=1), cast, rtol=0, atol=0.02 * full.abs().max().item()
                )
    assert cast.dtype == torch.bfloat16
    assert (cast.float() - full).abs().max() <= 0.04 * full.abs().max()


def test_autocast_and_half_weights_leave_positions_alone():
    x = torch.randn(1, 1, 2, 8)
    rope = Rotary(8)
    far = torch.tensor([70_001, 70_002])
    want = rope.rotate(x, far)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rope.rotate(x, far), want)
    layer = MultiHeadAttention(32, 4, rope=rope).to(torch.bfloat16)
    assert torch.equal(layer.rope.rotate(x, far), want)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_a_layer_is_the_code_that_builds_it(layer):
    built = eval(repr(layer), vars(regard))
    assert repr(built) == repr(layer)
    built.load_state_dict(layer.state_dict())
    x = torch.randn(1, 4, 32)
    options = {} if layer in SELF else {"context": torch.randn(1, 3, 12)}
    assert torch.equal(built.eval()(x, **options), layer.eval()(x, **options))


@pytest.mark.parametrize("layer", SELF, ids=lambda layer: type(layer).__name__)
def test_copies_and_pickles_compute_the_same(layer):
    x = torch.randn(1, 4, 32)
    want = layer.eval()(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), want)
        assert other.state_dict().keys() == layer.state_dict().keys()


@pytest.mark.parametrize("layer", SELF, ids=lambda layer: type(layer).__name__)
def test_layers_move_between_dtypes_and_devices(layer):
    double = copy.deepcopy(layer).double().eval()
    x = torch.randn(1, 4, 32)
    got = double(x.double())
    assert got.dtype == torch.float64
    torch.testing.assert_close(got.float(), layer.eval()(x), rtol=0, atol=1e-5)
    away = copy.deepcopy(layer).to("meta")
    assert away(x.to("meta")).shape == got.shape


def test_names_of_parameters_are_hugging_faces():
    names = {
        name
        for name, _ in GroupedQueryAttention(
            32, 4, 2, qk_norm="head", sinks=True, gate="head"
        ).named_parameters()
    }
    assert names == {
        *(f"{each}_proj.weight" for each in ("q", "k", "v", "o", "gate")),
        "q_norm.weight",
        "k_norm.weight",
        "sinks",
    }
    names = dict(MultiHeadLatentAttention(32, 4, **MLA, q_lora_rank=10).named_parameters())
    parts = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm")
    assert names.keys() == {f"{part}.weight" for part in (*parts, "kv_b_proj", "o_proj")}


def test_kinds():
    kinds = [layer.kind for layer in LAYERS]
    assert kinds == ["MHA", "MHA", "MQA", "GQA", "GQA", "MLA", "LatentKV"]


def test_the_layers_have_one_signature():
    def names(layer):
        return [
            (p.name, p.kind, p.default)
            for p in inspect.signature(layer.forward).parameters.values()
        ]

    assert names(Attention) == names(MultiHeadLatentAttention) == names(LatentKVAttention)


def test_the_public_names_are_sorted_and_there():
    listed = regard.__all__
    assert listed == sorted(listed, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    assert all(hasattr(regard, name) for name in listed)
    public = {
        n for n, v in vars(regard).items() if not n.startswith("_") and not inspect.ismodule(v)
    }
    assert public == set(listed)


KNOWS = {  # which folders a folder may import from; "." is the files at the root
    ".": set(),
    "masks": {"."},
    "cache": {"."},
    "rope": {"."},
    "ops": {".", "masks", "cache"},
    "layers": {".", "masks", "cache", "rope", "ops"},
}
KNOWS["regard"] = {*KNOWS}  # the public names; what stands below may import them
KNOWS["hf"] = {*KNOWS}
KNOWS["convert"] = {*KNOWS}
KNOWS["compare"] = KNOWS["bench"] = {*KNOWS}
KNOWS["verify"] = {".", "regard", "hf"}
KNOWS["cli"] = {*KNOWS}


def folder_of(module):
    """The folder of a module's file, in KNOWS' words."""
    if module == "regard":
        return "regard"
    home = ROOT / "src" / Path(*module.split("."))
    return module.split(".")[1] if home.is_dir() or module.count(".") > 1 else "."


def imports_of(path):
    """The regard modules that a file imports, however it spells that."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports by a relative name"
            names = [f"{node.module}.{each.name}" for each in node.names]
        for name in names:
            while name.split(".")[0] == "regard" and name not in MODULES:
                name = name.rpartition(".")[0]
            if name in MODULES:
                yield name


def module_of(path):
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in SOURCES}


def test_imports_point_one_way():
    assert {folder_of(module) for module in MODULES} == KNOWS.keys(), "a folder is not in KNOWS"
    for module, path in MODULES.items():
        if module == "regard.__main__":
            continue
        me = folder_of(module)
        for other in map(folder_of, imports_of(path)):
            assert other == me or other in KNOWS[me], f"{module} imports from {other}"


def test_no_modules_import_each_other():
    left = {module: {*imports_of(path)} - {module} for module, path in MODULES.items()}
    left["regard.masks.draw"].discard("regard.masks.algebra")  # for its types only
    while ready := {module for module, known in left.items() if not known & left.keys()}:
        left = {module: known for module, known in left.items() if module not in ready}
    assert not left, f"in a circle: {sorted(left)}"


def test_backends_do_not_know_each_other():
    backends = sorted((ROOT / "src/regard/ops/backends").glob("*.py"))
    assert {"sdpa", "eager", "fused"} <= {path.stem for path in backends}
    for path in backends:
        if path.stem not in ("__init__", "blocked"):  # which cuts a call into calls for others
            known = {other.rpartition(".") for other in imports_of(path)}
            inside = {name for home, _, name in known if home == "regard.ops.backends"}
            assert inside <= {"common"}, f"{path.stem} imports {inside}"


def test_importing_regard_imports_nothing_optional():
    optional = ["transformers", "typer", "rich", "gguf", "safetensors", "beartype", "hypothesis"]
    code = f"import sys, regard; print([m for m in {optional} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_regard_brings_only_itself():
    """What it costs in time is measured by benchmarks/importing.py."""
    code = (
        "import sys, torch, jaxtyping; before = set(sys.modules); import regard; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['regard']"


def test_no_file_holds_two_things():
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 400, path


def test_functions_are_short():
    """Constructors and documented signatures aside, what a function does fits a screen; a kernel
    is compiled as one."""
    for path in SOURCES:
        if path.parent.name == "kernels":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if body:
                    lines = body[-1].end_lineno - body[0].lineno + 1
                    assert lines <= 45, f"{path}:{node.lineno} {node.name} has {lines}"


def test_every_layer_is_a_module():
    assert all(isinstance(layer, nn.Module) for layer in LAYERS)
