"""The driver's library is loaded and called as its header says: on a stand-in compiled here, in another process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from layerline.backends.tensorrt import cuda
from layerline.pipeline.errors import Unavailable

CC = shutil.which("cc") or shutil.which("gcc")

# Same names and argument types as cuda.h; memory is the process's own, and CUDA_FAULT makes one function fail.
SOURCE = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef uint64_t CUdeviceptr; typedef void *CUcontext, *CUstream;
static int live = 0, current = 0, retained = 0, queued = 0;
static int fault(const char *name) { const char *f = getenv("CUDA_FAULT"); return f && !strcmp(f, name) ? 999 : 0; }
#define GUARD(name) if (fault(#name)) return fault(#name)
int cuInit(unsigned flags) { GUARD(cuInit); return flags; }
int cuDeviceGetCount(int *n) { *n = getenv("CUDA_NONE") ? 0 : 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return 0; }
int cuDevicePrimaryCtxRetain(CUcontext *c, int device) {
  if (device != 40) return 101; retained = 1; *c = &retained; return 0; }
int cuCtxSetCurrent(CUcontext c) { current = c == (CUcontext)&retained; return !current; }
int cuStreamCreate(CUstream *s, unsigned flags) { if (!current || flags != 1) return 1; *s = &queued; return 0; }
int cuStreamSynchronize(CUstream s) { queued = 0; return s != (CUstream)&queued; }
int cuMemAlloc_v2(CUdeviceptr *p, size_t n) {
  GUARD(cuMemAlloc_v2); if (!n) return 1; live++; *p = (CUdeviceptr)malloc(n); return 0; }
int cuMemFree_v2(CUdeviceptr p) { live--; free((void *)p); return 0; }
int cuMemcpyHtoDAsync_v2(CUdeviceptr d, const void *s, size_t n, CUstream q) {
  if (q != (CUstream)&queued) return 1; queued = 1; memcpy((void *)d, s, n); return 0; }
int cuMemcpyDtoHAsync_v2(void *d, CUdeviceptr s, size_t n, CUstream q) {
  if (q != (CUstream)&queued) return 1; queued = 1; memcpy(d, (void *)s, n); return 0; }
int cuGetErrorString(int code, const char **text) { *text = code == 999 ? "made to fail" : "wrong call"; return 0; }
int live_allocations(void) { return live * 10 + queued; }
"""

ROUND_TRIP = """
import ctypes, numpy as np
from layerline.backends.tensorrt.cuda import Device
device = Device()
arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 3), np.int8), np.array(7, np.int64)]
with device:
    assert device.stream
    pointers = [device.send(a) for a in arrays]
    for a, p in zip(arrays, pointers):
        seen = device.fetch(p, a.shape, a.dtype)
        assert seen.dtype == a.dtype and seen.shape == a.shape and (seen == a).all()
    print("inside", ctypes.CDLL("libcuda.so.1").live_allocations())
print("after", ctypes.CDLL("libcuda.so.1").live_allocations())
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if CC is None or sys.platform != "linux":
        pytest.skip("no C compiler to make the stand-in with")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cuda.c").write_text(SOURCE)
    subprocess.run([CC, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    return folder


def python(code: str, driver: Path, **env: str) -> str:
    env = {**os.environ, "LD_LIBRARY_PATH": str(driver), **env}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_arrays_go_there_and_back_and_the_memory_is_given_back(driver) -> None:
    assert python(ROUND_TRIP, driver).split() == ["inside", "30", "after", "0"]


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({}, "None"),
        ({"CUDA_FAULT": "cuInit"}, "the NVIDIA driver does not start (made to fail, CUDA error 999)"),
        ({"CUDA_NONE": "1"}, "the NVIDIA driver finds no device on this machine"),
    ],
)
def test_why_no_engine_can_run(driver, env, told) -> None:
    code = "from layerline.backends.tensorrt import cuda; print(cuda.unavailable_reason())"
    assert python(code, driver, **env).strip() == told


def test_a_call_that_fails_is_named(driver) -> None:
    assert "CUDA: cuMemAlloc_v2 failed: made to fail, CUDA error 999" in python(
        ROUND_TRIP, driver, CUDA_FAULT="cuMemAlloc_v2"
    )


def test_without_a_driver_the_library_is_named(monkeypatch) -> None:
    monkeypatch.setattr(cuda, "_LIBRARY", "libno-such-driver.so")
    assert cuda.unavailable_reason() == "there is no NVIDIA driver on this machine (libno-such-driver.so is not found)"
    with pytest.raises(Unavailable, match="no NVIDIA driver"):
        cuda.Device()
