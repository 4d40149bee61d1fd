"""How a kernel is run: workspaces of threads, torch's defaults, tensors that are refused."""

import threading

import pytest
import torch

pytest.importorskip("numba")

from kernel_checks import check
from regard.ops.kernels import launching, vectors
from regard.ops.kernels.launching import decode
from regard.ops.kernels.tiles import Format, KeyPages, tile_for

START = 1 << 20  # an address


def test_memory_is_read_as_several_streams_on_processors_of_intel_alone(monkeypatch):
    for maker, wanted in (("GenuineIntel", 4), ("AuthenticAMD", 1), ("ARM", 1)):
        monkeypatch.setattr(vectors, "is_made_by", maker.__eq__)
        assert vectors.memory_streams.__wrapped__() == wanted


def test_calls_in_several_threads_do_not_affect_each_other():
    q, k = torch.randn(4, 1, 2, 3, 32), torch.randn(4, 1, 2, 700, 32)
    wanted = [decode(a, b, b, scale=0.2)[0] for a, b in zip(q, k, strict=True)]
    found: list = [None] * 4

    def work(at):
        for _ in range(20):
            found[at] = decode(q[at], k[at], k[at], scale=0.2)[0]

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(a.equal(b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("more", [0, 1000])
@pytest.mark.parametrize("width", [32, 96])
def test_the_parts_of_a_workspace_lie_within_it(width, more, monkeypatch):
    asked = []
    monkeypatch.setattr(launching, "workspace", lambda count: asked.append(count) or START)
    monkeypatch.setattr(launching.ctypes, "memset", lambda *given: None)
    tile = tile_for(3, width, width, True, False, True, 8, Format(8, 16), Format(8, 16))
    rows, heads, ranges, threads = 3, 2, 5, 2
    at = launching.memory(tile, rows, heads, ranges, threads, more)
    padded = tile.padded(rows)
    needed = (
        8 * (heads + 2),  # counters of tasks, of threads, and of each head's finished tasks
        heads * ranges * padded * tile.part_bytes,
        threads * (padded * tile.scratch_bytes + tile.block_bytes),
        more,
    )
    ends = [*at[1:], START + asked[0]]
    assert all(start + size <= end for start, size, end in zip(at, needed, ends, strict=True))
    assert at[0] == START


def test_calls_of_other_sizes_and_numbers_of_threads_do_not_affect_each_other():
    """Each calling thread has a workspace of its own, which grows with its largest call."""
    torch.set_num_threads(2)
    found: list = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for turn in range(15):
            torch.set_num_threads(1 + (seed + turn) % 3)
            keys, rows = 1 + 397 * ((seed + turn) % 4), (1, 3, 12)[(seed * turn) % 3]
            q, k = (torch.randn(1, 2, n, 32, generator=generator) for n in (rows, keys))
            check(q, k, k)
        found.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2, 3]


def plain(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


Q, K = plain(1, 2, 3, 32), plain(1, 2, 40, 32)
REFUSED = {
    "another dtype": ({"q": Q.double(), "k": K.double(), "v": K.double()}, "float32 or bfloat16"),
    "queries of another dtype": ({"q": Q.bfloat16()}, "q must be torch.float32"),
    "values of another dtype": ({"v": K.bfloat16()}, "v must be torch.float32"),
    "a bias in double precision": ({"bias": torch.zeros(40).double()}, "bias must be .*float32"),
    "another number of keys": ({"v": plain(1, 2, 39, 32)}, r"v must be .* \(1, 2, 40, 32\)"),
    "another number of heads": ({"k": plain(1, 1, 40, 32)}, "k must be"),
    "another width": ({"k": plain(1, 2, 40, 48)}, "k must be"),
    "an odd width": ({"q": Q[..., :18], "k": K[..., :18]}, "multiples of 16, got 18 and 32"),
    "odd values": ({"v": None, "width": 18}, "multiples of 16, got 32 and 18"),
    "columns with a stride": (
        {"k": plain(1, 2, 40, 64)[..., ::2]},
        "has stride 2, not 1",
    ),
    "a bias for all keys": (
        {"bias": torch.zeros(1, 1, 1, 1)},
        "of bias has stride 0",
    ),
    "no keys": ({"k": K[:, :, :0], "v": K[:, :, :0]}, "needs at least one key"),
    "no queries": ({"q": Q[:, :, :0]}, "has no memory"),
    "values wider than keys": ({"v": None, "width": 48}, "no wider than the keys, got 48 of 32"),
    "another device": ({"k": K.to("meta")}, "Tensor on meta"),
    "a subclass": ({"k": K.as_subclass(type("Mine", (torch.Tensor,), {}))}, "but a Mine on cpu"),
    "a lazy minus sign": ({"k": torch._neg_view(K)}, "k is no plain tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_memory_that_the_kernel_must_not_touch_is_refused(case):
    given, message = REFUSED[case]
    given = {"q": Q, "k": K, "v": K, "scale": 1.0, "lanes": 16, **given}
    with pytest.raises(AssertionError, match=message):
        decode(given.pop("q"), given.pop("k"), **given)


TABLE = torch.tensor([[2, 0, 1]])
TABLES = {
    "a page that is not there": ((TABLE + 1, 16, 0, 40), "pages 1 to 3 of 16 tokens are not"),
    "a negative page": ((TABLE - 1, 16, 0, 40), "pages -1 to 1"),
    "too few pages": ((TABLE, 16, 9, 40), "9 \\+ 40 tokens of 1 rows in pages of 16"),
    "no keys": ((TABLE, 16, 0, 0), "at least one key"),
    "another number of rows": ((TABLE.expand(2, -1), 16, 0, 40), r"a table of \(2, 3\)"),
    "pages of nothing": ((TABLE, 0, 0, 40), "in pages of 0"),
    "tokens before the first": ((TABLE, 16, -1, 40), "-1 \\+ 40 tokens"),
    "numbers of 32 bits": ((TABLE.int(), 16, 0, 40), "is int64 on the CPU"),
    "a table elsewhere": ((TABLE.to("meta"), 16, 0, 40), "is int64 on the CPU"),
    "rows with a stride": ((TABLE.repeat(1, 2)[:, ::2], 16, 0, 40), "has stride 2, not 1"),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables_that_lead_elsewhere_are_refused(case):
    given, message = TABLES[case]
    memory = plain(1, 2, 48, 32)
    with pytest.raises(AssertionError, match=message):
        decode(Q, memory, memory, scale=1.0, pages=KeyPages(*given))
    with pytest.raises(AssertionError, match="v must be"):
        decode(Q, memory, memory[:, :, :47], scale=1.0, pages=KeyPages(TABLE, 16, 0, 40))


def refused_or_raised(call):
    with pytest.raises(
        (AssertionError, RuntimeError), match=r"no plain tensor|no memory|data pointer|data_ptr"
    ):
        call()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own jvp calls it
def test_tensors_without_memory_of_their_own_are_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    refused_or_raised(lambda: torch.func.vmap(lambda q: decode(q, K, K, scale=1.0)[0])(Q[None]))
    refused_or_raised(lambda: torch.func.vmap(lambda k: decode(Q, k, k, scale=1.0)[0])(K[None]))
    tangents = torch.ones_like(Q)
    refused_or_raised(
        lambda: torch.func.jvp(lambda q: decode(q, K, K, scale=1.0)[0], (Q,), (tangents,))
    )
    refused_or_raised(lambda: torch.func.functionalize(lambda q: decode(q, K, K, scale=1.0)[0])(Q))
    refused_or_raised(lambda: decode(Q, K.to_mkldnn(), K, scale=1.0))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        refused_or_raised(lambda: decode(Q, K, K, scale=1.0))  # the output would be fake
        fake = mode.from_tensor(K)
    refused_or_raised(lambda: decode(Q, fake, fake, scale=1.0))
    check(Q, K, K)  # the refused calls have changed nothing


def test_parameters_are_plain_memory():
    with torch.no_grad():
        q, k = torch.nn.Parameter(Q), torch.nn.Parameter(K)
        assert decode(q, k, k, scale=0.1)[0].equal(decode(Q, K, K, scale=0.1)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_torchs_defaults_change_nothing(dtype, device):
    q, bias = torch.randn(1, 2, 4, 32), torch.randn(40)
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        out, lse = decode(q, K, K, scale=0.1, bias=bias)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert out.dtype == lse.dtype == torch.float32
    wanted = decode(q, K, K, scale=0.1, bias=bias)
    assert out.equal(wanted[0]) and lse.equal(wanted[1])
