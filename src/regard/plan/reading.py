"""Reading entries of a description that is not trusted: each is checked, and named in errors."""

import math
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from regard.hf.loading.untrusted import COUNT, LAYERS, CheckpointError, refused

WIDEST = 1 << 20  # channels and tokens of a window: ten times what published models have
LONGEST = 1 << 30  # tokens of a context; the longest published are 10 million
# words in the names of entries that say how keys and values are made, hidden or cached
MATTERS = re.compile(
    r"window|kv|key|value|cache|latent|lora|rank|share|sharing|chunk|sparse|index|attention|attn"
    r"|rope|rotary|nope|head|layer_type|layers_type|block_type|linear|recurrent|ssm|mamba|conv"
    r"|compress|sink|qk|query|alibi|bidirectional|causal|cross|position_embedding|softcap|interval"
    r"|is_decoder|encoder_decoder|qkv|delta|hybrid"
)


class Keys:
    """The entries of one JSON object, or of a GGUF's header.

    Args:
        values: what the file holds.
        file: named in errors.
        names: the file's own names, by the usual ones.
        defaults: the values of entries that the file leaves out.
        inside: where the object stands in the file, as `"text_config."`; `""` at the top.

    Examples:
        >>> from pathlib import Path
        >>> keys = Keys({"n_embd": 768, "head_dim": None}, Path("config.json"),
        ...     names={"hidden_size": "n_embd"}, defaults={"rope_theta": 10000.0})
        >>> keys.size("hidden_size"), keys.optional_size("head_dim"), keys.number("rope_theta")
        (768, None, 10000.0)
        >>> keys.size("num_attention_heads")
        Traceback (most recent call last):
        regard.hf.loading.untrusted.CheckpointError: config.json: 'num_attention_heads' must be ...
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        file: Path,
        *,
        names: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        inside: str = "",
    ) -> None:
        self.values, self.file, self.inside = values, file, inside
        self.names, self.defaults = names or {}, defaults or {}
        self.read: set[str] = set()
        self.left_out: list[str] = []

    def get(self, name: str) -> Any:
        """The value of an entry: the file's, which may be null, else the default, else None."""
        own = self.names.get(name, name)
        self.read |= {own, name}
        given = [self.values[each] for each in dict.fromkeys((own, name)) if each in self.values]
        if not given:
            return self.defaults.get(name)
        if len(given) == 2 and given[0] != given[1]:
            raise self.refused(own, f"the same as {name!r}", given)
        return given[0]

    def given(self, name: str) -> bool:
        """Whether the file has the entry, and not as null."""
        own = self.names.get(name, name)
        return self.values.get(own, self.values.get(name)) is not None

    def refused(self, name: str, rule: str, came: object, out: str = "") -> CheckpointError:
        """The error for an entry that breaks a rule."""
        named = f"{self.inside + self.names.get(name, name)!r} must be {rule}"
        return refused(self.file, named, came, out or "correct the entry")

    def optional_size(self, name: str, most: int = WIDEST) -> int | None:
        """A whole number of 1 to `most`, or None."""
        value = self.get(name)
        if value is None:
            return None
        if type(value) is not int or not 1 <= value <= most:
            raise self.refused(name, f"a whole number of 1 to {most}", value)
        return value

    def size(self, name: str, most: int = WIDEST) -> int:
        """A whole number of 1 to `most`."""
        value = self.optional_size(name, most)
        if value is None:
            raise self.refused(name, f"a whole number of 1 to {most}", None)
        return value

    def heads(self, name: str) -> int:
        """A number of heads."""
        return self.size(name, COUNT)

    def layers(self, name: str = "num_hidden_layers") -> int:
        """A number of layers, small enough to make a list of."""
        return self.size(name, LAYERS)

    def number(self, name: str) -> float | int:
        """A finite number."""
        value = self.get(name)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.refused(name, "a finite number", value)
        return value

    def optional_number(self, name: str) -> float | int | None:
        """A finite number, or None."""
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        """True or false; false if it is left out."""
        value = self.get(name)
        if value is not None and type(value) is not bool:
            raise self.refused(name, "true or false", value)
        return bool(value)

    def words(self, name: str, known: tuple[str, ...], count: int) -> list[str] | None:
        """A list of `count` words out of those that are known, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count:
            rule = f"a list of {count} words, one for each layer"
            raise self.refused(name, rule, f"{len(value)} entries" if _sized(value) else value)
        for each in value:
            if not isinstance(each, str) or each not in known:
                raise self.refused(name, f"made of {', '.join(known)}", each, UNKNOWN)
        return list(value)

    def flags(self, name: str, count: int) -> list[bool] | None:
        """A list of `count` zeros and ones, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count:
            raise self.refused(name, f"a list of {count} zeros and ones, one for each layer", value)
        for each in value:
            if type(each) not in (int, bool) or each not in (0, 1):
                raise self.refused(name, "made of zeros and ones", each)
        return [bool(each) for each in value]

    def object(self, name: str) -> dict[str, Any] | None:
        """A JSON object, or None."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refused(name, "an object", value)
        return value

    def divided(self, name: str, by: str) -> int:
        """One size over another, which divides it."""
        whole, parts = self.size(name), self.heads(by)
        if whole % parts:
            raise self.refused(by, f"a divisor of {name!r}, which is {whole}", parts)
        return whole // parts

    def check_unread(self, harmless: Set[str]) -> None:
        """Raise if an entry that was not read could change what is cached or visible.

        Raises:
            CheckpointError: naming the entry.
        """
        for name, value in self.values.items():
            if name in self.read or name in harmless or value in (None, False, [], {}):
                continue
            if MATTERS.search(name.lower()):
                rule = (
                    f"{self.inside + name!r} is an entry that may change attention or its cache, "
                    "and not one that regard knows of this architecture"
                )
                raise refused(self.file, rule, value, UNKNOWN)


UNKNOWN = "a description without knowing it would be a guess"


def _sized(value: Any) -> bool:
    return isinstance(value, list | dict | str)
