"""Another mask, length, batch or GQA ratio compiles nothing: counted without running anything.

Kernels are compiled in a process of their own, where Triton's interpreter is off.
"""

import json
import os
import subprocess
import sys

COUNT = """
import json, torch, triton
from collections import Counter
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

class NoDevice(DriverBase):
    arch = 80
    def __init__(self): self.stream = 0
    @classmethod
    def is_active(cls): return True
    def map_python_to_cpp_type(self, ty): return ty
    def get_current_target(self): return GPUTarget("cuda", self.arch, 32)
    def get_active_torch_device(self): return torch.device("cpu")
    def get_benchmarker(self): return None
    def get_current_device(self): return self.arch
    def get_current_stream(self, device): return 0

no_device = NoDevice()
driver.set_active(no_device)
compiled = {80: Counter(), 90: Counter()}


def count(self, key, signature, device, constants, options, attrs, warmup):
    compiled[device][self.fn.__name__] += 1
    self.device_caches[device][0][key] = Nothing()
    return self.device_caches[device][0][key]

class Nothing:
    def __getattr__(self, name): return None
    def launch_metadata(self, *args): return None
    def run(self, *args): pass

from triton.runtime.jit import JITFunction
JITFunction._do_compile = count

from flexcp import Mask, build_block_grid, masks
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.shapes import shapes_of
from flexcp.kernels.triton.kernel import TritonKernel
from flexcp.kernels.triton.tuning import tuning_for

calls = 0
noise = torch.rand(400, 400) > 0.5
kinds = [masks.causal(), masks.full(), masks.sliding_window(33), masks.prefix_lm(50),
         masks.causal() & masks.document(lengths=[100, 60, 240]),
         Mask(lambda b, h, q, kv: noise[q, kv]),
         Mask(lambda b, h, q, kv: (q >= kv) & (h != 1)), Mask(lambda b, h, q, kv: q < 0)]
sizes = [(1, 1, 1, 400, 400), (2, 4, 1, 129, 16), (1, 6, 3, 1, 333), (3, 8, 8, 17, 400)]
for mask in kinds:
    for b, h, g, rows, keys in sizes:
        grid = build_block_grid(mask, rows, keys, batch=b, heads=h)
        shapes = CompiledShapes(shapes_of(grid))
        q, k = torch.randn(b, h, rows, 64).bfloat16(), torch.randn(b, g, keys, 128).bfloat16()
        k, v = k[..., :64], k[..., 64:]
        for no_device.arch in compiled:
            tuning, _ = tuning_for(f"sm_{no_device.arch}", 64, 64, torch.bfloat16)
            kernel = TritonKernel(tuning)
            found = kernel.forward(q, k, v, shapes, scale=-0.1 * (calls + 1))
            found = kernel.forward(q, k, v, shapes, scale=0.125, former=found)
            for lse in (None, found.lse):
                back = kernel.backward(q, q, k, v, q, found.lse, shapes, scale=1.0, grad_lse=lse)
            kernel.backward(q, q, k, v, q, found.lse, shapes, scale=1.0, grad_q=back.q)
        calls += 1
without = {device: dict(counts) for device, counts in compiled.items()}
from dataclasses import replace
from flexcp.kernels.score import examine

def scored(number, rows, heads):
    table, scale = torch.full((3, heads, rows + 7 * number), 1.0), torch.tensor(1.0 * number)
    table, slopes = table.transpose(0, 2) if number % 2 else table, torch.ones(heads)
    if number % 2:
        table = table.transpose(0, 2)
    table.requires_grad_(), slopes.requires_grad_()
    def function(s, b, h, q, k):
        return torch.tanh(s * scale - slopes[h] * (q - k)) + table[b, h, q - k]
    mod = examine(function, torch.float32, table.device)
    return replace(mod, first_batch=number, first_head=3 * number)

for number, mask in enumerate(kinds[:4]):
    b, h, g, rows, keys = sizes[number]
    grid = build_block_grid(mask, rows, keys, batch=b, heads=h)
    shapes = CompiledShapes(shapes_of(grid))
    q, k = torch.randn(b, h, rows, 64).bfloat16(), torch.randn(b, g, keys, 64).bfloat16()
    mod = scored(number, rows, h)
    no_device.arch = 80
    tuning, _ = tuning_for("sm_80", 64, 64, torch.bfloat16, scored=True)
    kernel = TritonKernel(tuning)
    found = kernel.forward(q, k, k, shapes, scale=0.1 * number, score_mod=mod)
    kernel.backward(q, q, k, k, q, found.lse, shapes, scale=1.0, score_mod=mod)
print(json.dumps([calls, without, compiled[80]]))
"""


def test_32_calls_compile_each_kernel_once_by_address_and_by_descriptor() -> None:
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    calls, compiled, scored = json.loads(run.stdout)
    once = {"forward": 1, "prep": 1, "dq": 1, "dkdv": 1}
    assert calls == 32
    assert compiled == {"80": once, "90": once}
    # Once more with a score function, whatever it captures; its two tensors have a kernel each.
    assert scored == {"forward": 2, "prep": 1, "dq": 2, "dkdv": 2, "lookup_gradients": 2}
