"""What every page has: templates that escape all text, and a policy that allows its own style and script alone."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup


def template(name: str, names: Mapping[str, Any]) -> Template:
    """A template of this package; `names` are what it may use besides its variables."""
    environment = Environment(
        loader=FunctionLoader(_file), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    environment.filters["url"] = lambda text: quote(text, safe="")
    return environment.get_template(name, globals=dict(names))


def head(script_name: str, *further: str) -> dict[str, str]:
    """The variables `style`, `script` and `policy` of a template.

    The policy allows both by their hashes, whatever a name in a report may hold, and the `further` directives.
    """
    style, script = _file("page.css"), _file(script_name)
    allowed = ["default-src 'none'", "base-uri 'none'", "form-action 'none'", *further]
    for directive, text in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed.append(f"{directive} 'sha256-{digest}'")
    # Both are files of this package.
    return {"style": Markup(style), "script": Markup(script), "policy": "; ".join(allowed)}  # noqa: S704


def _file(name: str) -> str:
    return resources.files("layerline.views").joinpath(name).read_text("utf-8")
