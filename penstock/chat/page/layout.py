"""The page: what stands where. `build` makes it, the server mounts it."""

from __future__ import annotations

from html import escape
from typing import Any

import gradio

from penstock.chat.page import compare_tab, completion_tab, elsewhere_tab
from penstock.chat.page.chat_tab import ChatTab
from penstock.chat.page.config import PageConfig
from penstock.chat.page.settings_panel import Panel
from penstock.chat.page.streaming import Chat
from penstock.chat.page.upstream import Upstream

_LOG_OUT = '<form id="penstock-logout" method="post" action="logout"><button>Log out</button></form>'


def build(config: PageConfig) -> Any:
    """A `gradio.Blocks`. Asks the gateway nothing until somebody opens the page."""
    upstream = Upstream(config.gateway, config.certificate)
    chat = Chat(upstream, config.prices)
    with gradio.Blocks(title=config.title, analytics_enabled=False, fill_height=True) as blocks:
        with gradio.Sidebar(open=True, width=280, elem_id="penstock-left"):
            gradio.HTML('<div id="penstock-history"></div>' + (_LOG_OUT if config.has_login else ""))
        with gradio.Sidebar(open=False, position="right", width=320, elem_id="penstock-settings"):
            panel = Panel(config, upstream)
        gradio.HTML(
            f'<header id="penstock-header"><h1>{escape(config.title)}</h1><div id="penstock-status"></div></header>'
        )
        with gradio.Tab("Chat"):
            tab = ChatTab(config, chat, panel)
        completion_tab.build(config, upstream)
        compare_tab.build(config, upstream, tab.bot.latex_delimiters)
        elsewhere_tab.build(config, upstream)
        panel.listen()
        tab.listen(blocks)
    return blocks
