"""Fact: the ranks of a run meet without a name server, for which a store would let all of them wait."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# The resolver of the main thread, which connects, asks a name server that is a socket of this process.
PROGRAM = """
import ctypes, select, socket, struct
import torch.distributed as dist
from megatron3d.runtime.process import skip_name_lookups
library = ctypes.CDLL(None)
library.__res_init()
library.__res_state.restype = ctypes.POINTER(ctypes.c_char * 64)
state = library.__res_state().contents
asked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
asked.bind(("127.0.0.1", 0))
tries, count, servers = 0, 16, 20  # where the numbers of seconds, tries and servers, and the first server's address are
state[tries : tries + 8] = struct.pack("ii", 1, 1)
state[count : count + 4] = struct.pack("i", 1)
port = socket.htons(asked.getsockname()[1])
state[servers : servers + 8] = struct.pack("=HH4s", socket.AF_INET, port, b"\\x7f\\0\\0\\1")
if {skips}:
    skip_name_lookups()
assert struct.unpack("ii", state[tries : tries + 8]) == (1, 1)
store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
print("asked" if select.select([asked], [], [], 0)[0] else "not asked")
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "__res_state"), reason="a C library with another resolver")
@pytest.mark.parametrize(("skips", "words"), [(True, "not asked"), (False, "asked")])
def test_stores_do_not_ask_a_name_server(skips: bool, words: str) -> None:
    """Without the function torch does ask, or the test shows nothing."""
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(skips=skips)], check=True, capture_output=True, text=True
    )
    assert said.stdout.strip() == words
