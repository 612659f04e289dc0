"""Write each overlay's Serve config, made of its settings by ``rag-service config build``, as a kustomize patch.

``python k8s/tools/serve_config.py`` after a change of an overlay's ``settings.yaml``; with ``--check`` it writes
nothing and exits with 1 when a patch is not what its settings say.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ROOT / "k8s" / "overlays"
PATCH = "serve-config.patch.yaml"
HEADER = "# Made of settings.yaml by k8s/tools/serve_config.py; do not edit.\n"


class _Literal(str):
    """Text that YAML shows line by line."""


def _represent(dumper: yaml.SafeDumper, text: _Literal) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")


yaml.SafeDumper.add_representer(_Literal, _represent)


def overlays() -> list[Path]:
    """The folders of all overlays."""
    return sorted(path.parent for path in OVERLAYS.glob("*/settings.yaml"))


def build(overlay: Path) -> str:
    """The overlay's Serve config as YAML text. Raises ``CalledProcessError`` for settings that are refused."""
    # This machine's own settings must not find their way into a cluster's.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAG_SERVICE_")}
    command = "import sys; from rag_service.cli import main; sys.argv[0] = 'rag-service'; main()"
    arguments = ["config", "build", "--config", str(overlay / "settings.yaml")]
    done = subprocess.run(
        [sys.executable, "-c", command, *arguments],
        cwd=ROOT, env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout


def patch(overlay: Path) -> str:
    """The content of the overlay's patch file."""
    # By way of the parser, so that neither trailing spaces nor the width of lines of the command matter.
    config = yaml.safe_dump(yaml.safe_load(build(overlay)), sort_keys=False, allow_unicode=True)
    operation = {"op": "add", "path": "/spec/serveConfigV2", "value": _Literal(config)}
    return HEADER + yaml.safe_dump([operation], sort_keys=False, allow_unicode=True)


def main() -> int:
    """Write, or check, every overlay's patch."""
    stale = []
    for overlay in overlays():
        text, path = patch(overlay), overlay / PATCH
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is out of date' if '--check' in sys.argv else 'written'}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
