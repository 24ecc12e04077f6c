"""What is missing without pycuda, and memory and stream through pycuda on a stand-in driver, in another process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from layerline.backends.tensorrt import cuda
from layerline.pipeline.errors import Unavailable

# The driver's functions that running an engine uses. Memory is the process's own, and CUDA_FAULT makes one fail.
SOURCE = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef uint64_t P; typedef void *C, *S;
static int live = 0, depth = 0, retained = 0, queued = 0;
static int fault(const char *name) { const char *f = getenv("CUDA_FAULT"); return f && !strcmp(f, name) ? 999 : 0; }
#define GUARD(name) if (fault(#name)) return fault(#name)
int cuInit(unsigned flags) { GUARD(cuInit); return flags; }
int cuDriverGetVersion(int *v) { *v = 12090; return 0; }
int cuDeviceGetCount(int *n) { *n = getenv("CUDA_NONE") ? 0 : 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return 0; }
int cuDevicePrimaryCtxRetain(C *c, int device) { if (device != 40) return 101; retained = 1; *c = &retained; return 0; }
int cuCtxPushCurrent_v2(C c) { if (c != (C)&retained) return 201; depth++; return 0; }
int cuCtxPopCurrent_v2(C *c) { if (!depth) return 201; depth--; *c = &retained; return 0; }
int cuCtxGetCurrent(C *c) { *c = depth ? &retained : 0; return 0; }
int cuCtxGetDevice(int *d) { *d = 40; return 0; }
int cuStreamCreate(S *s, unsigned flags) { if (!depth || flags != 1) return 1; *s = &queued; return 0; }
int cuStreamSynchronize(S s) { queued = 0; return s != (S)&queued; }
int cuMemAlloc_v2(P *p, size_t n) {
  GUARD(cuMemAlloc); if (!n || !depth) return 1; live++; *p = (P)malloc(n); return 0; }
int cuMemFree_v2(P p) { live--; free((void *)p); return 0; }
int cuMemcpyHtoDAsync_v2(P d, const void *s, size_t n, S q) {
  if (q != (S)&queued) return 1; queued = 1; memcpy((void *)d, s, n); return 0; }
int cuMemcpyDtoHAsync_v2(void *d, P s, size_t n, S q) {
  if (q != (S)&queued) return 1; queued = 1; memcpy(d, (void *)s, n); return 0; }
int cuGetErrorString(int code, const char **text) { *text = code == 999 ? "made to fail" : "wrong call"; return 0; }
int state(void) { return live * 100 + depth * 10 + queued; }
"""

ROUND_TRIP = """
import ctypes, ml_dtypes, numpy as np
from layerline.backends.tensorrt.cuda import Device
state = ctypes.CDLL("libcuda.so.1").state
device = Device()
arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 3), np.int8), np.array(7, np.int64),
          np.array([1.5, -2], ml_dtypes.bfloat16)]
for _ in range(2):
    with device:
        assert device.stream
        pointers = [device.send(a) for a in arrays]
        for a, p in zip(arrays, pointers):
            seen = device.fetch(p, a.shape, a.dtype)
            assert seen.dtype == a.dtype and seen.shape == a.shape and (seen == a).all()
        print("inside", state())
    print("after", state())
"""


def test_without_pycuda_the_package_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    assert cuda.unavailable_reason() == "pycuda is not installed (pip install 'layerline[gpu]')"
    with pytest.raises(Unavailable, match=r"layerline\[gpu\]"):
        cuda.Device()


def test_a_driver_that_is_missing_is_named(monkeypatch) -> None:
    package = ModuleType("pycuda")
    package.__spec__ = ModuleSpec("pycuda", None)
    monkeypatch.setitem(sys.modules, "pycuda", package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)  # its import fails
    assert (cuda.unavailable_reason() or "").startswith("pycuda finds no NVIDIA driver (import of pycuda.driver")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a libcuda.so.1 with the functions above; all others that pycuda links to return 0."""
    package = find_spec("pycuda")
    if package is None or package.origin is None:
        pytest.skip("pycuda is not installed")
    compiler, nm = shutil.which("cc") or shutil.which("gcc"), shutil.which("nm")
    if compiler is None or nm is None or sys.platform != "linux":
        pytest.skip("no C compiler to make the stand-in driver with")
    [extension] = Path(package.origin).parent.glob("_driver*.so")
    undefined = subprocess.run([nm, "-D", "-u", extension], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1].split("@")[0] for line in undefined.splitlines()}
    others = sorted(n for n in names if n.startswith("cu") and n[2:3].isupper() and f"int {n}(" not in SOURCE)
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cuda.c").write_text(SOURCE + "\n".join(f"int {name}() {{ return 0; }}" for name in others))
    options = ["-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *options, "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    return folder


def python(code: str, driver: Path, **env: str) -> tuple[int, str]:
    """Exit code, and everything that was printed."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(driver), **env}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_arrays_go_there_and_back_and_memory_and_context_are_given_back(driver) -> None:
    code, printed = python(ROUND_TRIP, driver)
    # Four allocations under one context, then nothing; the context is not left for pycuda to abort on.
    assert (code, printed.split()) == (0, ["inside", "410", "after", "0"] * 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({}, "None"),
        ({"CUDA_FAULT": "cuInit"}, "the NVIDIA driver does not start (cuInit failed: made to fail)"),
        ({"CUDA_NONE": "1"}, "the NVIDIA driver finds no device"),
    ],
)
def test_why_no_engine_can_run(driver, env, reason) -> None:
    code, printed = python(
        "from layerline.backends.tensorrt import cuda; print(cuda.unavailable_reason())", driver, **env
    )
    assert (code, printed.strip()) == (0, reason)


@pytest.mark.slow
def test_a_call_that_fails_is_named(driver) -> None:
    code, printed = python(ROUND_TRIP, driver, CUDA_FAULT="cuMemAlloc")
    assert code == 1 and "CUDA: cuMemAlloc failed: made to fail" in printed
    assert "context stack was not empty" not in printed
