"""What the first bytes of a file say about why it cannot be read."""

from __future__ import annotations


def problem(head: bytes, *, lines: bool = False, is_page: bool = True) -> str:
  """Cause and remedy as a sentence, or "".

  lines: the file should have a JSON value in each line. is_page: a web page is a problem.
  """
  if head.startswith(b"version https:") and b"//git-lfs." in head[:40]:
    return "It is a pointer of Git LFS, and not the file. Run git lfs pull in its repository"
  if head[:2] in (b"\xff\xfe", b"\xfe\xff") or (len(head) > 8 and head.count(0) > len(head) // 4):
    return "It is UTF-16. Convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE"
  start = head.lstrip(b" \t\r\n\xef\xbb\xbf")
  if is_page and start[:15].lower().startswith((b"<!doctype html", b"<html")):
    return "It is a web page, perhaps of a download that failed. Get the file again"
  if lines and start.startswith(b"["):
    return "It is one JSON array. Write a record in each line: jq -c '.[]' FILE > NEW_FILE.jsonl"
  if lines and start.strip() == b"{":
    return "Its records have several lines. Write a record in each line: jq -c . FILE > NEW_FILE.jsonl"
  return ""
