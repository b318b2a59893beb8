"""A program in SGLang's frontend language: two branches of one text, then a choice.

python examples/sglang_program.py [URL]
"""

import sys

import sglang as sgl

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"
sgl.set_default_backend(sgl.RuntimeEndpoint(url))


@sgl.function
def complete(s, signature):
    s += signature
    branches = s.fork(2)
    branches[0] += '    """' + sgl.gen("docstring", max_tokens=24, stop='"""')
    branches[1] += "    return " + sgl.gen("result", max_tokens=16, stop="\n")
    s["docstring"], s["result"] = branches[0]["docstring"], branches[1]["result"]
    s += f"    return {s['result']}\n\nprint(" + sgl.select("call", choices=["add(1, 2)", "add()"])


state = complete.run(signature="def add(a, b):\n", temperature=0)
print("docstring:", state["docstring"])
print("result:", state["result"])
print("call:", state["call"])
