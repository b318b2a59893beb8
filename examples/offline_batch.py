"""A batch without a server: `sgl_ssd.Engine` takes the arguments of `sglang.Engine`.

    python examples/offline_batch.py

Serves the bundled pair; give `model_path` and `speculative_draft_model_path` for your own.
"""

import sgl_ssd

PROMPTS = ["def add(a, b):\n", "class Reader:\n", "import os\n\n", "for line in file:\n"]


def main() -> None:
    with sgl_ssd.Engine(speculative_num_steps=4, ssd_fan_out=4) as engine:
        answers = engine.generate(PROMPTS, {"max_new_tokens": 32, "temperature": 0})
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        meta = answer["meta_info"]
        print(prompt + answer["text"])
        print(
            f"--- {meta['completion_tokens']} tokens in {meta['spec_verify_ct']} rounds, "
            f"accept length {meta['spec_accept_length']:.2f}\n"
        )


# The engine's processes import this file again, so what starts them must not run on import.
if __name__ == "__main__":
    main()
