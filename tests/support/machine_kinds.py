"""The kinds of caches that the state machine drives, and how their streams are coded."""

from listed import Coding
from regard import KVCache, QuantizedCache, SlidingCache, StaticCache
from sequences import Kind

WHOLE = 64  # channels with one scale in a format: more than a stream has here
GROUP = 4  # channels with one scale: several groups in a stream of 8 or 6

CONTIGUOUS = {
    "growing": Kind((KVCache,)),
    "static": Kind((lambda: StaticCache(40),), most=40),
    "sliding": Kind((lambda: SlidingCache(5, rollback=3),), window=(5,), ragged=False, rollback=3),
    "window of one": Kind((lambda: SlidingCache(1),), window=(1,), ragged=False, rollback=0),
    "int8": Kind(
        (lambda: QuantizedCache(8, group=GROUP),),
        codings=(Coding(8, GROUP), Coding(8, GROUP), None),
        joined=Coding(8, GROUP),
    ),
    "int4": Kind(
        (lambda: QuantizedCache(4, group=GROUP),),
        codings=(Coding(4, GROUP), Coding(4, GROUP), None),
        joined=Coding(4, GROUP),
    ),
    "K8V4": Kind(
        (lambda: QuantizedCache(format="K8V4"),),
        codings=(Coding(8, WHOLE), Coding(4, WHOLE, (4, 2)), None),
        joined=Coding(8, WHOLE),
    ),
    "K6V6": Kind(
        (lambda: QuantizedCache(format="K6V6"),),
        codings=(Coding(6, WHOLE, (8,)), Coding(6, WHOLE, (4, 2)), None),
        joined=Coding(6, WHOLE, (8,)),
    ),
    "layers": Kind(
        (KVCache, lambda: SlidingCache(5, rollback=3)),
        window=(None, 5),
        ragged=False,
        rollback=3,
    ),
}
