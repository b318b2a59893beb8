"""The OpenAI SDK against a running server: a chat answer, then a streamed completion.

    python examples/openai_sdk.py [URL]

Nothing in it is special to SSD: every OpenAI client works.
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")  # or what the server got as --api-key

answer = client.chat.completions.create(
    model="default",
    messages=[{"role": "user", "content": "Write a function that adds two numbers."}],
    max_tokens=64,
    temperature=0,
)
print(answer.choices[0].message.content)
print(f"--- {answer.usage.completion_tokens} tokens\n")

prompt = "def read_lines(path):\n"
stream = client.completions.create(
    model="default", prompt=prompt, max_tokens=64, temperature=0, stream=True
)
print(prompt, end="")
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].text, end="", flush=True)
print()
