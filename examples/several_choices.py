"""Several samples of one prompt (n > 1), and seeds.

    python examples/several_choices.py [URL]

The choices share the prompt's KV, on the target and on the draft. Without a seed they are
independent; with one, every request of that seed gets the same text, drafts or no drafts.
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
question = {"model": "default", "prompt": "import ", "max_tokens": 16, "temperature": 1.0}

for choice in client.completions.create(**question, n=4).choices:
    print(f"choice {choice.index}: {choice.text!r}")

first, second = (client.completions.create(**question, seed=7).choices[0].text for _ in range(2))
print(f"seed 7: {first!r}, {'the same' if first == second else 'not the same'} again")
