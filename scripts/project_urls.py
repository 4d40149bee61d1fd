"""A hook of the build: the project's addresses, without those that are only placeholders."""

import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ProjectUrls(MetadataHookInterface):
    """Sets `urls` to `[tool.regard.urls]` of pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        settings = tomllib.loads(Path(self.root, "pyproject.toml").read_text(encoding="utf-8"))
        urls = settings["tool"]["regard"]["urls"]
        metadata["urls"] = {name: url for name, url in urls.items() if not is_placeholder(url)}


def is_placeholder(url: str) -> bool:
    """Whether an address is under `.invalid`, which RFC 2606 keeps out of use."""
    return (urlsplit(url).hostname or "").endswith(".invalid")
