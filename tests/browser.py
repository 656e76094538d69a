"""Pages of examples/: the data in them, and what headless Chromium makes of them."""

import html
import json
import shutil
from pathlib import Path

import pytest
from processes import run

# Words that would do something in a page that took them for HTML or for a part of its script.
HOSTILE = ("</script><script>document.title='taken'</script><!--<script><img src=x "
           "onerror=\"document.title='taken'\">'`&amp;\u2028\\ DATA")


def data_of(page: Path) -> dict:
    """What a page holds, as a browser reads it: up to the first thing that ends the script."""
    rest = page.read_text(encoding="utf-8").split('<script id="data" type="application/json">')[1]
    return json.loads(rest.split("</script")[0])


def shown_by_chromium(page: Path, folder: Path) -> str:
    """The page once its scripts have run, without a message of theirs and without a picture."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here: what the page holds is right, what it shows is not known")
    result = run(chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom",
                 "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", page.as_uri())
    assert result.returncode == 0 and "CONSOLE" not in result.stderr, result.stderr
    assert "<img" not in result.stdout
    return html.unescape(result.stdout)
