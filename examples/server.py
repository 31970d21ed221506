"""A server that keeps conversations between requests, and a client: the second turn reads what is new.

For example:

    python examples/server.py --model FOLDER "What is a KV cache?" "What does it cost?"
"""

import argparse
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from openai import OpenAI

from qada_cache.serving import make_folder

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", required=True, help="a model's folder, as `hf download` makes one")
parser.add_argument("--port", default="8000")
parser.add_argument("--new-tokens", type=int, default=64)
parser.add_argument("questions", nargs="+")
options = parser.parse_args()

socket.create_server(("localhost", int(options.port))).close()  # OSError if another server has the port
with TemporaryDirectory() as scratch:
    served = Path(scratch, "served")
    make_folder(options.model, served)  # links to the model's files, and our generate.py
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(served), "--trust-remote-code"]
    command += ["--port", options.port]
    server = subprocess.Popen([*command, "--log-level", "info"])  # the log says how many tokens were kept
    try:
        client = OpenAI(base_url=f"http://localhost:{options.port}/v1", api_key="none")
        while server.poll() is None:
            with suppress(OSError):
                socket.create_connection(("localhost", int(options.port))).close()
                break
            time.sleep(0.1)
        else:
            raise SystemExit("the server has ended, as it says above")
        messages = []
        for question in options.questions:
            messages.append({"role": "user", "content": question})
            start = time.perf_counter()
            reply = client.chat.completions.create(
                model=str(served), messages=messages, max_tokens=options.new_tokens, temperature=0
            )
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            print(f"{messages[-1]['content']}\n[{time.perf_counter() - start:.1f} s]", flush=True)
    finally:
        server.terminate()
        server.wait()
