"""The rates of GPUs by their data sheets, and the time of a call on one.

Nothing here was measured: the rates are those that the manufacturer states for dense matrices, and
the shares of them that kernels reach are published ones (arXiv:2407.08608 for an H100). Only the
order of the estimates matters.
"""

import functools
from typing import Any, NamedTuple

import torch

from regard.masks import Nothing, Span
from regard.ops.call import Call, narrowed


class DeviceRates(NamedTuple):
    """What a device does in a second.

    Attributes:
        name: the start of the device's name, as torch gives it.
        memory: bytes read from or written to its memory.
        half: floating-point operations of matrix products in float16 and bfloat16, with sums in
            float32, of dense matrices.
        tf32: the same for float32 inputs rounded to TF32; for devices without TF32, as `single`.
        single: floating-point operations in float32.
        source: the document that states them.
    """

    name: str
    memory: float
    half: float
    tf32: float
    single: float
    source: str


# Longer names before those that they begin with. Figures "with sparsity" are halved.
DATA_SHEETS = (
    DeviceRates("NVIDIA B200", 8e12, 2250e12, 1125e12, 75e12, "NVIDIA HGX B200 data sheet"),
    DeviceRates("NVIDIA H200 NVL", 4.8e12, 836e12, 418e12, 60e12, "NVIDIA H200 data sheet"),
    DeviceRates("NVIDIA H200", 4.8e12, 989e12, 494e12, 67e12, "NVIDIA H200 data sheet"),
    DeviceRates("NVIDIA H100 PCIe", 2.0e12, 756e12, 378e12, 51e12, "NVIDIA H100 data sheet"),
    DeviceRates("NVIDIA H100 NVL", 3.9e12, 836e12, 418e12, 60e12, "NVIDIA H100 data sheet"),
    DeviceRates("NVIDIA H100", 3.35e12, 989e12, 494e12, 67e12, "NVIDIA H100 data sheet"),
    DeviceRates("NVIDIA A100-SXM4-80GB", 2.04e12, 312e12, 156e12, 19.5e12, "A100 80GB data sheet"),
    DeviceRates("NVIDIA A100 80GB PCIe", 1.94e12, 312e12, 156e12, 19.5e12, "A100 80GB data sheet"),
    DeviceRates("NVIDIA A100", 1.56e12, 312e12, 156e12, 19.5e12, "NVIDIA A100 data sheet"),
    DeviceRates("NVIDIA L40S", 864e9, 362e12, 183e12, 91.6e12, "NVIDIA L40S data sheet"),
    DeviceRates("NVIDIA L40", 864e9, 181e12, 90.5e12, 90.5e12, "NVIDIA L40 data sheet"),
    DeviceRates("NVIDIA L4", 300e9, 121e12, 60e12, 30.3e12, "NVIDIA L4 data sheet"),
    DeviceRates("NVIDIA A10", 600e9, 125e12, 62.5e12, 31.2e12, "NVIDIA A10 data sheet"),
    DeviceRates(
        "NVIDIA GeForce RTX 5090", 1.79e12, 209e12, 105e12, 105e12, "RTX Blackwell whitepaper"
    ),
    DeviceRates("NVIDIA GeForce RTX 4090", 1.01e12, 165e12, 82.6e12, 82.6e12, "Ada whitepaper"),
    DeviceRates("NVIDIA GeForce RTX 3090", 936e9, 71e12, 35.6e12, 35.6e12, "GA102 whitepaper"),
    DeviceRates("Tesla V100", 900e9, 125e12, 15.7e12, 15.7e12, "NVIDIA V100 data sheet"),
    DeviceRates("Tesla T4", 320e9, 65e12, 8.1e12, 8.1e12, "NVIDIA T4 data sheet"),
)
UNKNOWN = DeviceRates("a device of unknown rates", 1e12, 200e12, 100e12, 25e12, "none")

LAUNCH = 5e-6  # seconds to start an operator, which decoding steps outside of CUDA graphs wait for
READ = 0.8  # share of the memory's rate that long reads reach
FLASH = 0.55  # share of the rate of products: FlashAttention and cuDNN on an H100
EFFICIENT = 0.3  # torch's kernel for dense masks and float32
GENERATED = 0.4  # kernels that Triton compiles, FlexAttention's among them, on an H100
UNFUSED = 0.6  # plain matrix products of the sizes of one head
_PASSES = 12  # over the scores in `eager`: softcap, bias, mask, softmax, dropout
_SAMPLES = 16  # queries at which the reach of a mask is looked up

# Floating-point operations of one multiprocessor in a cycle, by the major compute capability: dense
# float16 products with float32 sums, and float32 (CUDA C++ Programming Guide, whitepapers).
_CYCLE = {7: (1024, 128), 8: (1024, 256), 9: (4096, 256), 10: (8192, 256), 12: (1024, 256)}


@functools.cache
def rates_of(device: torch.device) -> DeviceRates:
    """The rates of a device that is not a CPU. Asks its driver, once, and waits for no kernel."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return UNKNOWN
    return rates_by_properties(torch.cuda.get_device_properties(device))


def rates_by_properties(properties: Any) -> DeviceRates:
    """The data sheet of a name; of an unknown name, estimates by clocks and numbers of units."""
    for sheet in DATA_SHEETS:
        if properties.name.startswith(sheet.name):
            return sheet
    unknown = UNKNOWN._replace(name=properties.name or UNKNOWN.name)
    try:  # a driver or a version of torch may not know all of them
        rate = properties.multi_processor_count * 1e3 * properties.clock_rate  # of kHz
        transfers = 2e3 * properties.memory_clock_rate  # of kHz; two in a cycle
        memory = transfers * properties.memory_bus_width / 8
        half, single = _CYCLE.get(properties.major, (0, 0))
    except AttributeError:
        return unknown
    if not all((memory, rate, half)):
        return unknown
    rates = memory, rate * half, rate * half / 2, rate * single
    return DeviceRates(properties.name, *rates, "its clocks and units")


def rates_note(device: torch.device) -> str | None:
    """For `explain`: what the estimates for a device rest on; None for a CPU."""
    if device.type == "cpu":
        return None
    rates = rates_of(device)
    return f"of {rates.name} ({rates.source}); not yet measured on this device"


def on_device(
    call: Call,
    *,
    operators: int,
    kernel: float,
    single: bool = False,
    share: float = 1.0,
    passes: float | int = 0,
    copies: float | int = 1,
) -> float:
    """Seconds that a call takes on a device that is not a CPU.

    Args:
        operators: operators that are started.
        kernel: share of the rate of products that the kernel reaches.
        single: whether products are computed in float32, whatever the dtype of the queries.
        share: of the scores, those that are computed.
        passes: over these scores in float32, in memory.
        copies: times that as many bytes as those of keys and values are read or written.
    """
    memory, half, float32 = _limits(call.device)
    width, heads = call.head_dim + call.v_head_dim, call.batch * call.num_heads
    cells = share * heads * call.num_queries * call.num_keys
    keys = call.batch * call.num_kv_heads * call.num_keys * share
    moved = call.dtype.itemsize * width * (copies * keys + heads * call.num_queries)
    moved += 4 * passes * cells
    rate = half if call.dtype.itemsize < 4 and not single else float32
    return LAUNCH * operators + max(moved / (READ * memory), 2 * cells * width / (kernel * rate))


def unfused(call: Call, *, operators: int) -> float:
    """Seconds of the definition: products in float32, all scores in memory, keys converted to
    float32 and repeated for the heads of a group."""
    converted = 1 if call.dtype.itemsize >= 4 else 5  # bytes moved for each byte of keys: read 2,
    repeated = 2 * call.group if call.group > 1 else 0  # write 4, read 4
    return on_device(
        call,
        operators=operators,
        kernel=UNFUSED,
        single=True,
        passes=_PASSES,
        copies=converted + repeated,
    )


def _limits(device: torch.device) -> tuple[float, float, float]:
    """The rates of memory and of products in half precision and in float32, as torch computes.
    Those of no device in particular inside a compiled graph, which cannot ask the driver."""
    if torch.compiler.is_compiling():
        return UNKNOWN.memory, UNKNOWN.half, UNKNOWN.single
    rates = rates_of(device)
    exact = torch.get_float32_matmul_precision() == "highest"
    return rates.memory, rates.half, rates.single if exact else rates.tf32


def visible_share(call: Call) -> float:
    """About the share of the scores that a kernel computes that skips hidden blocks, by what the
    mask knows without reading a tensor: the keys in reach of some of the queries. 1 inside a
    compiled graph, where each look would be a condition on the lengths."""
    if torch.compiler.is_compiling():
        return 1.0
    span, found = call.span, 0
    samples = min(_SAMPLES, call.num_queries)
    for sample in range(samples):
        query = span.first_query + (2 * sample + 1) * call.num_queries // (2 * samples)
        here = Span(query, query + 1, span.kv_start, span.kv_stop)
        visible = narrowed(here, call.mask)
        found += 0 if isinstance(call.mask.within(here), Nothing) else visible.num_keys
    return max(found, 1) / (samples * call.num_keys)
