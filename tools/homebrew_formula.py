"""Write a release's Homebrew formula: ``python tools/homebrew_formula.py SDIST URL > Formula/octavo.rb``.

SDIST is the source distribution that `make wheel` leaves in dist; URL is its address in the release. The
formula pins MLX from PyPI, because Homebrew's mlx may have another version.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

PYTHON = "python@3.13"
TEMPLATE = """\
class Octavo < Formula
  desc "Paged-attention LLM serving engine on MLX, with FP4 KV pages and gRPC streams"
  homepage "{home}"
  url "{url}"
  version "{version}"
  sha256 "{digest}"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "{python}"

  def install
    python = Formula["{python}"].opt_bin/"{executable}"
    system python, "-m", "venv", libexec
    system libexec/"bin/python", "-m", "pip", "install", "--no-cache-dir", "#{{buildpath}}"
    bin.install_symlink libexec/"bin/octavo"
  end

  service do
    run [opt_bin/"octavo", "serve", "--http", "127.0.0.1:8000"]
    keep_alive successful_exit: false
    log_path var/"log/octavo.log"
    error_log_path var/"log/octavo.log"
    environment_variables PATH: std_service_path_env
  end

  test do
    assert_match "metal", shell_output("#{{bin}}/octavo doctor")
    assert_match "outputs", shell_output("#{{bin}}/octavo generate hello --max-tokens 2 --json")
  end
end
"""


def formula(sdist: Path, url: str) -> str:
    """Return the formula's text. Raises ValueError unless ``sdist`` is Octavo's and ``url`` is https."""
    found = re.fullmatch(r"octavo-(.+)\.tar\.gz", sdist.name)
    if found is None:
        raise ValueError(f"a source distribution is named octavo-VERSION.tar.gz, got {sdist.name}")
    if not re.fullmatch(r'https://[^\s"#]+', url):
        raise ValueError(f"Homebrew downloads from an https:// address, got {url!r}")
    return TEMPLATE.format(
        home=url.split("/releases/")[0],
        url=url,
        version=found[1],
        digest=hashlib.sha256(sdist.read_bytes()).hexdigest(),
        python=PYTHON,
        executable=PYTHON.replace("@", ""),
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python tools/homebrew_formula.py SDIST URL")
    try:
        print(formula(Path(sys.argv[1]), sys.argv[2]), end="")
    except (ValueError, OSError) as error:
        print(f"homebrew_formula: {error}", file=sys.stderr)
        raise SystemExit(2) from None
