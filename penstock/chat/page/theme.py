"""The look of the page, and its own scripts: a theme for Gradio, a style sheet, and what goes into the page's head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_SCRIPTS = ("store.js", "page.js", "history.js", "keyboard.js", "status.js", "labels.js", "chat.js")
_STYLES = ("page.css", "chat.css")
_FONT = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "sans-serif")
_MONO = ("ui-monospace", "SF Mono", "Menlo", "Consolas", "monospace")
_TEAL = ("#effaf8", "#d3f0ec", "#a8e0d9", "#72c8bf", "#3ba89e", "#17897f", "#0f766e", "#0c5f59", "#0c4c48", "#0b3f3c",
         "#062523")  # fmt: skip
_GREY = ("#f7f8f9", "#eef0f3", "#e0e4e9", "#ccd2d9", "#96a0ac", "#66707d", "#4b5563", "#3a434e", "#242b33", "#161b21",
         "#0e1216")  # fmt: skip
# Without one a browser asks for /favicon.ico, which below a path is another server's.
ICON = (
    "<link rel=\"icon\" href=\"data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Crect width='16' height='16' rx='4' fill='%230f766e'/%3E%3Cpath d='M3 4h10v6H7l-3 2.5V10H3z' fill='none' "
    "stroke='%23fff' stroke-width='1.6' stroke-linejoin='round'/%3E%3C/svg%3E\">"
)


def theme() -> Any:
    """Gradio's plainest theme, whose colours page.css sets; fonts are the system's, none is loaded."""
    import gradio

    plain = gradio.themes.Base(
        primary_hue=gradio.themes.Color(*_TEAL, name="teal"),
        secondary_hue=gradio.themes.Color(*_TEAL, name="teal"),
        neutral_hue=gradio.themes.Color(*_GREY, name="grey"),
        text_size="sm", spacing_size="sm", radius_size="md", font=_FONT, font_mono=_MONO,
    )  # fmt: skip
    return plain.set(
        input_border_width="1px", slider_color="*border_color_accent", block_shadow="none", block_border_width="0px",
        button_primary_shadow="none", input_shadow="none",
        button_secondary_border_color="transparent", button_primary_border_color="transparent",
        shadow_drop="none", shadow_drop_lg="0 8px 28px rgb(0 0 0 / 14%)",
    )  # fmt: skip


def head() -> str:
    """Style and script, in a scope of its own: it leaves `window.penstock` and `window.penstockChat` only.

    Gradio would put its own classes before each rule of a style sheet that it gets, which breaks media queries.
    """
    css, script = ("\n".join((_HERE / name).read_text("utf-8") for name in names) for names in (_STYLES, _SCRIPTS))
    description = '<meta name="description" content="Chat with the models of this deployment">'
    return f'{description}<style>{css}</style><script>(() => {{\n"use strict";\n{script}}})();</script>'
