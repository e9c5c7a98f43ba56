"""Ask the index that was built what readers type: `make docs` calls it. Writes each page that comes first and should not.

Exit code 1 if there is any. The site searches with lunr, with titles a thousand times as heavy as text; lunr's Python port
ranks as it does.
"""

import json
import sys
from pathlib import Path

from lunr import lunr

INDEX = Path(__file__).resolve().parents[1] / "site/search/search_index.json"
FIRST = {
    "advise": "guides/choose.html",
    "accelerate": "migration/accelerate.html",
    "cheat sheet": "cheat_sheet.html",
    "deepspeed": "migration/deepspeed.html",
    "export": "guides/compile.html",
    "fp8": "low_precision.html",
    "FSDP": "guides/fsdp.html",
    "glossary": "glossary.html",
    "gradient accumulation": "guides/loop.html",
    "gradient checkpointing": "faq.html",
    "gradient clipping": "guides/loop.html",
    "GradScaler": "faq.html",
    "install": "start.html",
    "LoRA": "guides/adapters.html",
    "mps": "faq.html",
    "NaN": "numerics.html",
    "OOM": "faq.html",
    "out of memory": "faq.html",
    "quantization": "faq.html",
    "reinforcement": "guides/serving.html",
    "resume": "checkpoints.html",
    "slow": "faq.html",
    "SLURM": "launch.html",
    "tensor parallelism": "guides/hybrid.html",
    "torch.amp": "migration/torch_amp.html",
    "Trainer": "guides/trainer.html",
    "Windows": "faq.html",
    "ZeRO": "guides/fsdp.html",
}


def main() -> int:
    sections = json.loads(INDEX.read_text())["docs"]
    documents = [
        ({key: each[key] for key in ("location", "title", "text")}, {"boost": each.get("boost", 1)})
        for each in sections
    ]
    index = lunr(ref="location", fields=[{"field_name": "title", "boost": 1000}, "text"], documents=documents)
    wrong = 0
    for words, page in FIRST.items():
        found = index.search(words)
        first = found[0]["ref"].partition("#")[0] if found else "nothing"
        if first != page:
            wrong += 1
            sys.stdout.write(f"searched.py: {words!r} finds {first} first, not {page}\n")
    sys.stdout.write(f"search: {len(FIRST)} words, {wrong} on the wrong page\n")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
