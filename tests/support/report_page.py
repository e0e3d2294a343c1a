"""A report page as a browser reads it."""

from __future__ import annotations

import html.parser


class Page(html.parser.HTMLParser):
  """Checks that tags are balanced and collects what is loaded, what is said, and what pictures say."""

  def __init__(self, text: str):
    super().__init__()
    self.open, self.loads, self.media, self.text, self.scripts = [], [], [], "", []
    self.alts, self.cells, self.tiles, self.links = [], [], [], []
    self.feed(text)
    assert self.open == []

  def handle_starttag(self, tag, attrs):
    found = dict(attrs)
    self.alts += [found["alt"]] if tag == "img" else []
    self.links += [found["href"]] if tag == "a" else []
    self.scripts += [found] if tag == "script" else []
    self.cells += [""] if tag in ("td", "th") else []
    self.tiles += [""] if tag == "div" and self.open[-1:] == ["div"] else []
    self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
    self.media += [dict(attrs)] if tag in ("meta", "source") else []
    if tag not in ("meta", "img", "source"):
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    if self.open[-1:] == ["script"]:
      return
    self.text += data + " "
    for texts, tag in ((self.cells, ("td", "th")), (self.tiles, ("div",))):
      if texts and self.open and self.open[-1] in tag:
        texts[-1] += data
