"""The look of the page, and its own scripts: a theme for Gradio, a style sheet, and what goes into the page's head.

The colours are those of the gateway's live page. Text on its background has a contrast of at least 4.5 to 1, see
https://www.w3.org/TR/WCAG21/#contrast-minimum.
"""

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
# Each as (light, dark).
_COLOURS = {
    "body_background_fill": ("#ffffff", "#12161b"),
    "background_fill_primary": ("#ffffff", "#12161b"),
    "background_fill_secondary": ("#f7f8f9", "#171c22"),
    "body_text_color": ("#1b2129", "#e4e8ed"),
    "body_text_color_subdued": ("#5a6472", "#98a3b0"),
    "block_background_fill": ("#ffffff", "#12161b"),
    "block_label_text_color": ("#4b5563", "#b4bdc8"),
    "block_title_text_color": ("#3a434e", "#ccd2d9"),
    "block_info_text_color": ("#5a6472", "#98a3b0"),
    "border_color_primary": ("#e0e4e9", "#2a323b"),
    "border_color_accent": ("#0f766e", "#3cc4b4"),
    "input_background_fill": ("#ffffff", "#171c22"),
    "input_border_color": ("#ccd2d9", "#37414c"),
    "input_border_color_focus": ("#0f766e", "#3cc4b4"),
    "input_placeholder_color": ("#66707d", "#8d98a5"),
    "button_primary_background_fill": ("#0f766e", "#0f766e"),
    "button_primary_background_fill_hover": ("#0c5f59", "#138a80"),
    "button_primary_text_color": ("#ffffff", "#ffffff"),
    "button_secondary_background_fill": ("#eef0f3", "#242b33"),
    "button_secondary_background_fill_hover": ("#e0e4e9", "#2f3842"),
    "button_secondary_text_color": ("#1b2129", "#e4e8ed"),
    "button_cancel_background_fill": ("#b01c1c", "#a32a2a"),
    "button_cancel_background_fill_hover": ("#931616", "#b93434"),
    "button_cancel_text_color": ("#ffffff", "#ffffff"),
    "color_accent_soft": ("#eef0f3", "#242b33"),
    "link_text_color": ("#0f766e", "#5fd0c3"),
    "link_text_color_hover": ("#0c5f59", "#8fe0d7"),
    "link_text_color_visited": ("#0f766e", "#5fd0c3"),
    "link_text_color_active": ("#0c5f59", "#8fe0d7"),
    "code_background_fill": ("#f4f5f7", "#0e1216"),
    "error_text_color": ("#b01c1c", "#ff8f86"),
    "error_background_fill": ("#fde6e4", "#421918"),
    "error_border_color": ("#e9a8a4", "#7a2f2c"),
    "checkbox_background_color_selected": ("#0f766e", "#0f766e"),
    "checkbox_border_color_selected": ("#0f766e", "#3cc4b4"),
}


def theme() -> Any:
    """Gradio's plainest theme in our colours; fonts are the system's, none is loaded."""
    import gradio

    plain = gradio.themes.Base(
        primary_hue=gradio.themes.Color(*_TEAL, name="teal"),
        secondary_hue=gradio.themes.Color(*_TEAL, name="teal"),
        neutral_hue=gradio.themes.Color(*_GREY, name="grey"),
        text_size="sm", spacing_size="sm", radius_size="md", font=_FONT, font_mono=_MONO,
    )  # fmt: skip
    dark = {f"{name}_dark": colour for name, (_, colour) in _COLOURS.items()}
    return plain.set(
        **{name: colour for name, (colour, _) in _COLOURS.items()}, **dark,
        input_border_width="1px", slider_color="*border_color_accent", block_shadow="none", block_border_width="0px",
        button_primary_shadow="none", input_shadow="none",
        button_secondary_border_color="transparent", button_primary_border_color="transparent",
        shadow_drop="none", shadow_drop_lg="0 8px 28px rgb(0 0 0 / 14%)",
    )  # fmt: skip


def css() -> str:
    return "".join((_HERE / name).read_text("utf-8") for name in _STYLES)


def head() -> str:
    """Style and script, in a scope of its own: it leaves `window.penstock` and `window.penstockChat` only.

    Gradio would put its own classes before each rule of a style sheet that it gets, which breaks media queries.
    """
    script = "\n".join((_HERE / name).read_text("utf-8") for name in _SCRIPTS)
    description = '<meta name="description" content="Chat with the models of this deployment">'
    return f'{description}<style>{css()}</style><script>(() => {{\n"use strict";\n{script}}})();</script>'
