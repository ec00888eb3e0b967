"""Ask the CUDA driver what it sees, through ``libcuda.so.1`` opened at run time; creates no context on any GPU."""

import ctypes
from dataclasses import dataclass

NAME_BYTES_MAX = 256


@dataclass(frozen=True)
class CudaDevice:
    """One GPU."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class CudaDriver:
    """The driver and the GPUs that this process may use."""

    version: str
    """Newest CUDA version that the driver runs, such as ``12.8``."""
    devices: tuple[CudaDevice, ...]


class _CudaError(Exception):
    """A driver call failed."""


def probe_cuda() -> CudaDriver | str:
    """The driver, or in a few words why there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 not found"
    try:
        _call(driver, "cuInit", 0)
        version, count = ctypes.c_int(), ctypes.c_int()
        _call(driver, "cuDriverGetVersion", ctypes.byref(version))
        _call(driver, "cuDeviceGetCount", ctypes.byref(count))
        devices = tuple(_device(driver, index) for index in range(count.value))
    except _CudaError as error:
        return str(error)
    return CudaDriver(f"{version.value // 1000}.{version.value % 1000 // 10}", devices)


def _device(driver: ctypes.CDLL, index: int) -> CudaDevice:
    handle, memory = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(NAME_BYTES_MAX)
    _call(driver, "cuDeviceGet", ctypes.byref(handle), index)
    _call(driver, "cuDeviceGetName", name, NAME_BYTES_MAX, handle)
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
    return CudaDevice(name.value.decode("ascii", "replace"), memory.value)


def _call(driver: ctypes.CDLL, function: str, *arguments: object) -> None:
    try:
        status = getattr(driver, function)(*arguments)
    except AttributeError:
        raise _CudaError(f"{function} is missing") from None
    if status != 0:
        raise _CudaError(f"{function} answered error {status}")
